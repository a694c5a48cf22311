"""The gauges of runs, sent to an OTLP collector over HTTP while they are served."""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from chronicle.alerts.sending import post
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.report.gauges import otlp_request
from chronicle.report.server import LiveServer

OTLP_SECONDS = 15.0
OTLP_PATH = "/v1/metrics"


def otlp_target(endpoint: str, environ: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Where to, and the headers of `OTEL_EXPORTER_OTLP_HEADERS`, which may be secret. Raises `UsageProblem` for no address."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        what = f"--otlp {endpoint}: expected http://… or https://… without a password"
        raise UsageProblem(what, "as in --otlp http://127.0.0.1:4318")
    if parts.port == 4317:
        raise UsageProblem("--otlp: port 4317 speaks gRPC, and this is OTLP over HTTP", "name the HTTP port, 4318 as a rule")
    url = endpoint if parts.path.endswith(OTLP_PATH) else endpoint.rstrip("/") + OTLP_PATH
    given = environ.get("OTEL_EXPORTER_OTLP_METRICS_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    pairs = (one.partition("=") for one in given.split(",") if "=" in one)
    return url, {name.strip(): unquote(value.strip()) for name, _, value in pairs}


class OtlpSender(threading.Thread):
    """Sends the gauges of the runs that have changed, or live, every `OTLP_SECONDS` to a collector.

    Nothing is kept: what could not be sent is sent as it is then. Each trouble, and its end, is said once.
    """

    def __init__(self, server: LiveServer, target: tuple[str, Mapping[str, str]], say: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._server, self._say, self._trouble = server, say, ""
        self._url, self._headers = target
        self._sent: dict[str, str | None] = {}  # run -> the mark of what was sent; None while it lives

    def run(self) -> None:
        """Send until the server stops."""
        while True:
            self.go()
            if self._server.stopping.wait(OTLP_SECONDS):
                return

    def go(self) -> int:
        """One round; returns how many runs were sent. Does not raise: a run that cannot be read is left out of it."""
        from chronicle import __version__

        found: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
        for site in self._server.sites():
            try:
                mark = site.life()
                if self._sent.get(site.paths.run) != mark:
                    summary = site.summary()
                    alive = (summary.get("last_launch") or {}).get("alive")
                    found[site.paths.run] = (None if alive else mark, summary)
            except (ChronicleError, OSError, ValueError):
                continue
        if not found:
            return 0
        request = otlp_request(
            [summary for _, summary in found.values()],
            nanoseconds=time.time_ns(), host=socket.gethostname(), version=__version__,
        )  # fmt: skip
        headers = {"Content-Type": "application/json", "User-Agent": "chronicle", **self._headers}
        answer = post(self._url, json.dumps(request).encode(), headers)
        trouble = answer.why if answer.state != "sent" else _left_out(answer.body)
        if answer.state == "sent":
            self._sent |= {run: mark for run, (mark, _) in found.items()}
        if trouble != self._trouble:
            self._say(f"otlp: {trouble}; it is tried again" if trouble else "otlp: the collector takes the gauges again")
            self._trouble = trouble
        return len(found) if answer.state == "sent" else 0


def _left_out(body: bytes) -> str:
    """What the collector's answer says that it did not take; empty where it took all."""
    try:
        part = json.loads(body or b"{}").get("partialSuccess") or {}
        count, why = int(part.get("rejectedDataPoints") or 0), str(part.get("errorMessage") or "")
    except (ValueError, AttributeError, TypeError):
        return ""
    return f"the collector left out {count} points: {why[:200]}" if count else ""
