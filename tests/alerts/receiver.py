"""A receiver of alerts on the loopback, which may be down, refuse, or take a message and lose the answer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """`mode`: up, gone (the connection is closed unread), lost (taken, and not answered), redirect, or a status code."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode: str | int = "up"
        self.taken: list[tuple[str, Any]] = []  # (idempotency key, body) of every message that was taken
        self.headers: list[dict[str, str]] = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        mode = self.server.mode
        if mode == "gone":
            self.connection.close()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if mode == "redirect":
            self.send_response(302)
            self.send_header("Location", self.server.url)
            self.end_headers()
            return
        if isinstance(mode, int):
            self.send_response(mode)
            self.end_headers()
            return
        is_form = self.headers.get("Content-Type", "").startswith("multipart/")
        self.server.taken.append((self.headers.get("Idempotency-Key", ""), body if is_form else json.loads(body)))
        self.server.headers.append(dict(self.headers))
        if mode == "lost":
            self.connection.close()
            return
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
