"""Checkpoints in a real S3 server (moto) on loopback, through a proxy that counts bytes and answers wrongly on demand."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
moto_server = pytest.importorskip("moto.server", reason="needs moto[server]: pip install 'moto[s3,server]'")
s3fs = pytest.importorskip("s3fs", reason="needs the extra `remote`")

import torch  # noqa: E402

from chronicle.cli.main import run  # noqa: E402
from rollback.disk import RemoteView  # noqa: E402
from tests.builders.checkpoints import CheckpointFactory  # noqa: E402

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}
ROOT = "s3://runs/r/checkpoints"


class Proxy(BaseHTTPRequestHandler):
    """Passes on to moto; `fault(method, path)` may give another status, or None with the body cut in half."""

    protocol_version = "HTTP/1.1"
    upstream = ("127.0.0.1", 0)
    fault: Callable[[str, str], int | str | None] = staticmethod(lambda method, path: None)
    num_bytes = 0
    writes = 0

    def log_message(self, *words: Any) -> None:
        """Nothing on the screen."""

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wrong = type(self).fault(self.command, self.path)
        type(self).writes += self.command not in ("GET", "HEAD")
        if isinstance(wrong, int):
            body = b"<Error><Code>InternalError</Code></Error>" if wrong >= 500 else b"<Error><Code>NoSuchKey</Code></Error>"
            self.reply(wrong, {"Content-Type": "application/xml"}, b"" if self.command == "HEAD" else body, len(body))
            return
        link = http.client.HTTPConnection(*self.upstream, timeout=30)
        kept = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        link.request(self.command, self.path, sent, kept)
        found = link.getresponse()
        body = found.read()
        link.close()
        told = {n: v for n, v in found.getheaders() if n.lower() not in ("content-length", "connection", "transfer-encoding")}
        length = int(found.getheader("Content-Length") or 0) if self.command == "HEAD" else len(body)
        if self.command == "GET" and "list-type" not in self.path:
            type(self).num_bytes += len(body)
        self.reply(found.status, told, body[: len(body) // 2] if wrong == "cut" else body, length)

    def reply(self, status: int, headers: dict[str, str], body: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        if len(body) < length and self.command != "HEAD":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The proxy's address; moto is behind it."""
    behind = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    behind.start()
    Proxy.upstream = behind.get_host_and_port()
    front = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{front.server_address[1]}"
    front.shutdown()
    front.server_close()
    behind.stop()


@pytest.fixture
def saved(
    server: str, checkpoints: CheckpointFactory, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Two checkpoints on disk; the same bytes are below `ROOT`."""
    made = checkpoints.accelerate(root, **SEED)
    for name, value in (("AWS_ENDPOINT_URL", server), ("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test"),
                        ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_EC2_METADATA_DISABLED", "true")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Proxy, "fault", staticmethod(lambda method, path: None))
    store = s3fs.S3FileSystem(skip_instance_cache=True)
    store.mkdirs("runs", exist_ok=True)
    store.put(str(made), "runs/r/checkpoints", recursive=True)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    Proxy.num_bytes = Proxy.writes = 0
    yield made
    monkeypatch.setattr(Proxy, "fault", staticmethod(lambda method, path: None))
    assert not list(work.iterdir()) and Proxy.writes == 0, "nothing is written, here or in the store"


def chronicle(*words: str) -> int:
    s3fs.S3FileSystem.clear_instance_cache()
    RemoteView.opened = None
    return run(words)


def test_s3_reads_as_a_disk_does(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "{}/opt_step-10"], ["diff", "{}/opt_step-5", "{}/opt_step-10"], ["verify", "{}/opt_step-10"]):
        told = []
        for place in (str(saved), ROOT):
            code = chronicle(*(word.format(place) for word in words))
            told.append((code, capsys.readouterr().out))
        assert told[0] == told[1] and told[0][0] == 0 and told[0][1]
    assert chronicle("latest", "--verified", "--print-path", "--checkpoints", ROOT) == 0
    assert capsys.readouterr().out == f"{ROOT}/opt_step-10\n"


@pytest.mark.parametrize("words", [["inspect"], ["verify"]], ids=lambda w: w[0])
@pytest.mark.parametrize("fault", [500, 404, "cut"])
def test_a_fault_of_the_server_says_nothing_about_the_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], fault: int | str
) -> None:
    """In the middle of the reading: the listing and the first objects are answered."""
    monkeypatch.setattr(
        Proxy, "fault", staticmethod(lambda method, path: fault if method == "GET" and "optimizer.bin" in path else None)
    )
    assert chronicle(*words, f"{ROOT}/opt_step-10") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "opt_step-10" in err.splitlines()[0] and "Traceback" not in err


def test_one_fault_that_passes_is_no_fault(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [2]

    def twice(method: str, path: str) -> int | None:
        left[0] -= method == "GET" and "optimizer.bin" in path
        return 500 if method == "GET" and "optimizer.bin" in path and left[0] >= 0 else None

    monkeypatch.setattr(Proxy, "fault", staticmethod(twice))
    assert chronicle("verify", f"{ROOT}/opt_step-10") == 0


def test_inspect_fetches_what_it_needs(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 MB of tensors under 2 MB; the same for 2 GB is in `test_object_store.py` (moto holds objects in memory)."""
    folder = tmp_path / "big" / "checkpoint-700"
    folder.mkdir(parents=True)
    states = {n: {"step": torch.tensor(700.0), "exp_avg": torch.zeros(80_000)} for n in range(200)}
    torch.save({"state": states, "param_groups": [{"lr": 1e-3, "params": list(range(200))}]}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 700, "log_history": []}))
    torch.save({"last_epoch": 700, "_step_count": 701, "base_lrs": [1e-3], "_last_lr": [1e-3]}, folder / "scheduler.pt")
    s3fs.S3FileSystem(skip_instance_cache=True).put(str(folder), "runs/checkpoint-700", recursive=True)
    Proxy.num_bytes = Proxy.writes = 0
    assert chronicle("inspect", "s3://runs/checkpoint-700", "--json") == 0
    assert json.loads(capsys.readouterr().out)["optimizers"][0]["num_states"] == 200
    assert (folder / "optimizer.pt").stat().st_size > 6.4e7 and Proxy.num_bytes < 2e6


def test_what_would_write_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle("rollback", "--to", "5", "--checkpoints", ROOT, "--yes") == 3
    assert "store" in capsys.readouterr().err
