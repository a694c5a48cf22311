"""The server of the live HTML page: read-only, on 127.0.0.1, with server-sent events, standard library only.

The page is rendered on request if the run has changed. Requests whose Host is not a loopback name are refused, because a web
page could reach the server through a rebound DNS name.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from chronicle.paths import RunPaths

__all__ = ["LiveServer", "fingerprint"]

ADDRESS = "127.0.0.1"
OUR_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
DIGEST = re.compile(r"/objects/([0-9a-f]{2})/([0-9a-f]{64})")
STREAMS = 32  # open event streams; further ones get 503


def fingerprint(paths: RunPaths) -> tuple[tuple[str, int, int], ...]:
    """A value that changes when a journal file or a per-step log grows."""
    found = []
    for path in (*paths.journal_dir.glob("*.jsonl"), *paths.launches_dir.glob("*/metrics.jsonl")):
        try:
            status = path.stat()
        except OSError:
            continue  # gone between listing and looking
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


class LiveServer(ThreadingHTTPServer):
    """Serves `/` (the page), `/status.json`, `/events` and attachments."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, paths: RunPaths, port: int, *, page: Callable[[], str], status: Callable[[], str], poll: float = POLL_SECONDS
    ) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.paths = paths
        self.poll = poll
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(STREAMS)
        self._make = {"/": page, "/status.json": status}
        self._made: dict[str, tuple[object, bytes]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def body(self, name: str) -> bytes | None:
        """The page or status, rendered again if the run has changed; None for another name."""
        if name not in self._make:
            return None
        with self._lock:
            mark = fingerprint(self.paths)
            known = self._made.get(name)
            if known is None or known[0] != mark:
                known = self._made[name] = (mark, self._make[name]().encode("utf-8"))
            return known[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that the browser closed; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """Stop serving and end the event streams."""
        self.stopping.set()
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version = "chronicle"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for the page, the status, the event stream or an attachment."""
        if not self._asked_by_our_name():
            return
        path = self.path.partition("?")[0]
        if path == "/events":
            self._events()
            return
        body = self.server.body(path)
        if body is not None:
            kind = "application/json" if path.endswith(".json") else "text/html"
            self._send(HTTPStatus.OK, body, f"{kind}; charset=utf-8")
            return
        stored = DIGEST.fullmatch(path)
        if stored and stored[2].startswith(stored[1]):
            self._object(self.server.paths.objects_dir / stored[1] / stored[2])
            return
        self._send(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")

    def do_HEAD(self) -> None:
        """Answer as GET, without the body."""
        if not self._asked_by_our_name():
            return
        body = self.server.body(self.path.partition("?")[0])
        self._send(HTTPStatus.OK if body is not None else HTTPStatus.NOT_FOUND, body or b"", "text/html; charset=utf-8")

    def _asked_by_our_name(self) -> bool:
        if OUR_HOSTS.fullmatch(self.headers.get("Host", "")):
            return True
        self._send(HTTPStatus.FORBIDDEN, b"only this machine is served\n", "text/plain; charset=utf-8")
        return False

    def _object(self, path: Path) -> None:
        """An attachment as a download, so that the browser does not run it."""
        try:
            content = path.read_bytes()
        except OSError:
            self._send(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8")
            return
        self._send(HTTPStatus.OK, content, "application/octet-stream", download=True)

    def _send(self, code: HTTPStatus, body: bytes, kind: str, *, download: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if download:
            self.send_header("Content-Disposition", "attachment")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _events(self) -> None:
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"too many listeners\n", "text/plain; charset=utf-8")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            self._watch()
        except OSError:
            pass  # the browser closed the connection
        finally:
            self.server.streams.release()

    def _watch(self) -> None:
        known, quiet = fingerprint(self.server.paths), time.monotonic()
        self._say(": here\n\n")
        while not self.server.stopping.wait(self.server.poll):
            now = fingerprint(self.server.paths)
            if now != known:
                known, quiet = now, time.monotonic()
                self._say("event: change\ndata: \n\n")
            elif time.monotonic() - quiet > HEARTBEAT_SECONDS:
                quiet = time.monotonic()
                self._say(": still here\n\n")

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Log requests to stderr if `CHRONICLE_SERVE_LOG` is set."""
        if os.environ.get("CHRONICLE_SERVE_LOG"):
            super().log_message(format, *args)
