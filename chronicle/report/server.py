"""The server of the live HTML page: read-only, with server-sent events, standard library only.

The page is loaded once; afterwards only what is new is sent. Event `points` has the lines that a running launch logged since
(`{"launch": 3, "points": [[step, seconds since the epoch, {"loss": 2.1}]]}`, at most `MOST_BYTES`); event `story` says that the
journal has grown, and the page then asks for `/state.json`. Every event carries the mark of what the run was like when it was
sent, so a page that missed some knows it and asks for the state.

Who may read: on 127.0.0.1 everybody on this machine; requests whose Host is not a loopback name are refused, because a web
page could reach the server through a rebound DNS name. On any other address, and where a token is given, only who has it: in
`Authorization: Bearer` or once as `?token=` of a page, which a cookie then stands for.
"""

import gzip
import hashlib
import hmac
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from chronicle.errors import UsageProblem
from chronicle.launch.output import LineTail
from chronicle.metrics.log import Point, parse_line
from chronicle.paths import RunPaths
from chronicle.report.gauges import CONTENT_TYPE, exposition
from chronicle.report.page_data import short

ADDRESS = "127.0.0.1"
OUR_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
ALWAYS_NEW = ("/metrics", "/status.json")  # whether a launch lives changes without a line in any file
OF_A_RUN = re.compile(r"/runs/([^/]+)(/.*)")
DIGEST = re.compile(r"/objects/([0-9a-f]{2})/([0-9a-f]{64})")
STREAMS = 32  # open event streams; further ones get 503
MOST_BYTES = 10_000  # of one event with points: of more points every nth is sent
MOST_READ = 4 << 20  # of a log between two looks; beyond it the page asks for the state
COOKIE = "chronicle_{port}"  # two servers of one machine share their cookies
ASKED = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>chronicle: a token is needed</title><link rel="icon" href="data:,">
<style>:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 30em; margin: 18vh auto; padding: 0 24px; }
input, button { font: inherit; padding: 4px 10px; }</style></head>
<body><h1>chronicle</h1><p>@@</p>
<form><label>token <input type="password" name="token" autofocus required autocomplete="current-password"></label>
<button>enter</button></form>
</body></html>
"""
SHORTEST_TOKEN = 16  # characters
COMPRESSED = 1_000  # bytes from which on an answer is compressed

Mark = Mapping[Path, tuple[int, int]]  # file -> (size in bytes, time of change in ns)


def fingerprint(paths: RunPaths) -> Mark:
    """What grows while a run is recorded: the journal's files and the per-step logs."""
    found = {}
    for path in (*paths.journal_dir.glob("*.jsonl"), *paths.launches_dir.glob("*/metrics.jsonl")):
        try:
            status = path.stat()
        except OSError:
            continue  # gone between listing and looking
        found[path] = (status.st_size, status.st_mtime_ns)
    return found


def mark_of(found: Mark) -> str:
    """A short name of a fingerprint."""
    text = json.dumps(sorted((str(path), *look) for path, look in found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class LogGrowth:
    """What a listener has not seen yet: the points of one log that has only grown, or that the story is to be told again."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._start()

    def _start(self) -> None:
        """From here on; a line that is not whole yet counts as new."""
        self.seen = fingerprint(self._paths)
        logs = [(path, size) for path, (size, _) in self.seen.items() if path.parent.name.isdigit()]
        self._tails = {path: LineTail(path, offset=_whole_lines(path, size)) for path, size in logs}

    def look(self) -> tuple[int, list[Point]] | Literal["story"] | None:
        """(launch, points) that were logged since the last look; "story" for a change of another kind, None for no change."""
        now = fingerprint(self._paths)
        if now == self.seen:
            return None
        path, *others = [path for path in {*now, *self.seen} if now.get(path) != self.seen.get(path)]
        tail, (size, _) = self._tails.get(path), now.get(path, (0, 0))
        if others or tail is None or not tail.offset <= size <= tail.offset + MOST_READ:
            self._start()
            return "story"
        self.seen = now
        points = [point for line in tail.read() if (point := parse_line(line)) is not None]
        return (int(path.parent.name), points) if points else None


def _whole_lines(path: Path, size: int) -> int:
    """The end of the last whole line within the first `size` bytes."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, size - MOST_BYTES))
            tail = log.read(min(size, MOST_BYTES))
    except OSError:
        return 0
    return size - len(tail) + tail.rfind(b"\n") + 1


def points_event(launch: int, points: Sequence[Point], mark: str) -> str:
    """The data of an event `points` within `MOST_BYTES`: of more points every nth and the last; values with five digits."""
    stride = 1
    while True:
        kept = [*points[:-1:stride], points[-1]]
        rows = [[p.step, p.time, {name: short(value) for name, value in p.values.items()}] for p in kept]
        text = json.dumps({"launch": launch, "points": rows, "mark": mark}, separators=(",", ":"))
        if len(text) <= MOST_BYTES or len(kept) <= 2:
            return text
        stride = max(2 * stride, len(points) * len(text) // (len(kept) * MOST_BYTES))


class Makers(NamedTuple):
    """What makes the served texts of a run: its page and its state (with the mark), its status."""

    page: Callable[[RunPaths, str], str]
    state: Callable[[RunPaths, str], str]
    status: Callable[[RunPaths], str]


class RunSite:
    """What is served of one run, below its own path: `/`, `/state.json`, `/status.json`, `/metrics`, `/events`, attachments."""

    def __init__(self, paths: RunPaths, makers: Makers) -> None:
        self.paths = paths
        self._make: dict[str, Callable[[str], str]] = {
            "/": lambda mark: makers.page(paths, mark),
            "/state.json": lambda mark: makers.state(paths, mark),
            "/status.json": lambda mark: makers.status(paths),
            "/metrics": lambda mark: exposition([json.loads(makers.status(paths))]),
        }
        self._made: dict[str, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def body(self, name: str) -> bytes | None:
        """The page, state or status, made again if the run has changed; None for another name."""
        if name not in self._make:
            return None
        with self._lock:
            mark = mark_of(fingerprint(self.paths))
            known = self._made.get(name)
            if known is None or known[0] != mark or name in ALWAYS_NEW:
                known = self._made[name] = (mark, self._make[name](mark).encode("utf-8"))
            return known[1]

    def life(self) -> str:
        """A mark that also changes with each sign of life."""
        beats = {path: path.stat().st_mtime_ns for path in self.paths.heartbeats_dir.glob("*") if path.is_file()}
        return f"{mark_of(fingerprint(self.paths))} {sorted((path.name, at) for path, at in beats.items())}"

    def summary(self) -> Mapping[str, Any]:
        """What `chronicle status --json` gives."""
        return json.loads(self.body("/status.json") or b"{}")  # type: ignore[no-any-return]


class LiveServer(ThreadingHTTPServer):
    """Serves one run at `/`; or of many an index at `/`, and each run below `/runs/NAME/`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        runs: RunPaths | Callable[[], Sequence[RunPaths]],
        port: int,
        *,
        makers: Makers,
        index: Callable[[], str] | None = None,
        poll: float = POLL_SECONDS,
        host: str = ADDRESS,
        token: str | None = None,
    ) -> None:
        """`runs`: the one run, or what lists them, and `index` makes their page.

        Raises `UsageProblem` for another host than this machine without a token, or for a token that can be guessed.
        """
        if host != ADDRESS and token is None:
            way_out = "give a token: --token env:NAME or --token file:PATH"
            raise UsageProblem(f"--host {host}: everybody who reaches it could read the runs", way_out)
        if token is not None and len(token) < SHORTEST_TOKEN:
            short = f"the token has {len(token)} characters: expected at least {SHORTEST_TOKEN}"
            raise UsageProblem(short, "make one with `openssl rand -hex 16`")
        self.token, self._host = token, host
        super().__init__((host, port), _Handler)
        self.poll = poll
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(STREAMS)
        self.index = index
        self._makers = makers
        self._list = runs if callable(runs) else lambda: (runs,)
        self._sites: dict[str, RunSite] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self._host}:{self.server_address[1]}/"

    def sites(self) -> list[RunSite]:
        """Every run that is served now."""
        return [self._site(paths) for paths in self._list()]

    def find(self, path: str) -> tuple[RunSite, str] | None:
        """The run that a path belongs to, and the rest of the path; None where it belongs to none."""
        if self.index is None:
            return self.sites()[0], path
        found = OF_A_RUN.fullmatch(path)
        known = {paths.run: paths for paths in self._list()}  # a path of a request leads nowhere else
        if found is None or unquote(found[1]) not in known:
            return None
        return self._site(known[unquote(found[1])]), found[2]

    def _site(self, paths: RunPaths) -> RunSite:
        with self._lock:
            return self._sites.setdefault(paths.run, RunSite(paths, self._makers))

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
        """Answer a request for the index, a page, the status, the event stream or an attachment."""
        if not self._allowed():
            return
        path = self.path.partition("?")[0]
        if self.server.index is not None and path in ("/", "/metrics"):
            self._index(self.server.index, path)
            return
        site, path = self.server.find(path) or (None, path)
        body = None if site is None else site.body(path)
        stored = DIGEST.fullmatch(path)
        if body is not None:
            kind = "application/json" if path.endswith(".json") else "text/html"
            self._send(HTTPStatus.OK, body, CONTENT_TYPE if path == "/metrics" else f"{kind}; charset=utf-8")
        elif site is not None and path == "/events" and self.command == "GET":
            self._events(site)
        elif site is not None and stored and stored[2].startswith(stored[1]):
            self._object(site.paths.objects_dir / stored[1] / stored[2])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")

    do_HEAD = do_GET  # `_send` leaves the body out

    def _index(self, index: Callable[[], str], path: str) -> None:
        if path == "/":
            self._send(HTTPStatus.OK, index().encode(), "text/html; charset=utf-8")
        else:
            text = exposition([site.summary() for site in self.server.sites()])
            self._send(HTTPStatus.OK, text.encode(), CONTENT_TYPE)

    def _refuse(self, code: HTTPStatus, why: str) -> None:
        self._send(code, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def _allowed(self) -> bool:
        """Whether who asks may read; what was answered otherwise."""
        token = self.server.token
        if token is not None:
            return self._has_token(token)
        if OUR_HOSTS.fullmatch(self.headers.get("Host", "")):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "only this machine is served")
        return False

    def _has_token(self, token: str) -> bool:
        cookies = (one.strip().partition("=") for one in self.headers.get("Cookie", "").split(";"))
        cookie = COOKIE.format(port=self.server.server_address[1])
        given = [value for name, _, value in cookies if name == cookie]
        given.append(self.headers.get("Authorization", "").removeprefix("Bearer ").strip())
        said = hashlib.sha256(token.encode()).hexdigest()
        if any(hmac.compare_digest(one.encode(), known.encode()) for one in given for known in (token, said)):
            return True
        asked = urlsplit(self.path)
        tokens = parse_qs(asked.query).get("token", [])
        if any(hmac.compare_digest(one.encode(), token.encode()) for one in tokens):
            headers = {  # the address without the token, which would stand in the history
                "Location": f"/{asked.path.lstrip('/')}",
                "Set-Cookie": f"{cookie}={said}; HttpOnly; SameSite=Lax; Path=/",
                "Referrer-Policy": "no-referrer",
                "Content-Length": "0",
            }
            self._head(HTTPStatus.SEE_OTHER, headers)
            return False
        if "text/html" in self.headers.get("Accept", ""):  # a person, who is asked
            wrong = "That is not the token." if tokens else "These runs are behind a token."
            self._send(HTTPStatus.UNAUTHORIZED, ASKED.replace("@@", wrong).encode(), "text/html; charset=utf-8")
            return False
        self._refuse(HTTPStatus.UNAUTHORIZED, "a token is needed: ?token=... once, or Authorization: Bearer")
        return False

    def _object(self, path: Path) -> None:
        """An attachment as a download, so that the browser does not run it."""
        try:
            content = path.read_bytes()
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")
            return
        self._send(HTTPStatus.OK, content, "application/octet-stream", download=True)

    def _send(self, code: HTTPStatus, body: bytes, kind: str, *, download: bool = False) -> None:
        packed = len(body) >= COMPRESSED and not download and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 5) if packed else body
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Vary": "Accept-Encoding"}
        headers |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        if download:
            headers["Content-Disposition"] = "attachment"
        self._head(code, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, code: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Cache-Control": "no-store", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self, site: RunSite) -> None:
        if not self.server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many listeners")
            return
        try:
            self._head(HTTPStatus.OK, {"Content-Type": "text/event-stream", "Connection": "close"})
            self.close_connection = True
            self._watch(site)
        except OSError:
            pass  # the browser closed the connection
        finally:
            self.server.streams.release()

    def _watch(self, site: RunSite) -> None:
        growth, quiet = LogGrowth(site.paths), time.monotonic()
        found: tuple[int, list[Point]] | str | None = "here"
        while True:
            mark = mark_of(growth.seen)
            if found is not None:
                quiet = time.monotonic()
                if isinstance(found, tuple):
                    self._say(f"event: points\ndata: {points_event(*found, mark)}\n\n")
                else:
                    self._say(f"event: {found}\ndata: {json.dumps({'mark': mark})}\n\n")
            elif time.monotonic() - quiet > HEARTBEAT_SECONDS:
                quiet = time.monotonic()
                self._say(": still here\n\n")
            if self.server.stopping.wait(self.server.poll):
                return
            found = growth.look()

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Log requests to stderr if `CHRONICLE_SERVE_LOG` is set."""
        if os.environ.get("CHRONICLE_SERVE_LOG"):
            super().log_message(format, *args)
