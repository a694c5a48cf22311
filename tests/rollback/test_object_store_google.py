"""Checkpoints in gs://, by gcsfs itself, against a small server on loopback that answers as the JSON API of the store does.

The server holds what the documentation says of generations, preconditions, ranges and rewrites, and no more
(https://cloud.google.com/storage/docs/json_api/v1/objects). `test_the_emulator…` asks another hand's server.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest
import torch

from chronicle.cli.main import run
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from rollback.disk import RemoteView, remote
from tests.builders.checkpoints import CheckpointFactory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
try:
    remote._import_gcsfs()
    import gcsfs
except ImportError:
    pytest.skip("needs gcsfs, of the extra `remote`", allow_module_level=True)

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}
ROOT = "gs://runs/r/checkpoints"
OWN = "r/checkpoints/chronicle-latest.json"
HALF = ("rollback", "--to", "5", "--lr-scale", "0.5", "--yes")


class Google(BaseHTTPRequestHandler):
    """Objects in memory, or files of a directory; `fault(method, path)` may give a status, or None with half of the body."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, tuple[bytes | Path, int]]] = {}  # name -> content, generation
    uploads: ClassVar[dict[str, tuple[str, str | None, bytearray]]] = {}
    fault: Callable[[str, str], int | str | None] = staticmethod(lambda method, path: None)
    conditions, piecewise = True, False
    generation, num_bytes, writes = 1_700_000_000_000_000, 0, 0
    lock = threading.RLock()

    def log_message(self, *words: Any) -> None:
        """Nothing on the screen."""

    def do_POST(self) -> None:
        with Google.lock:
            self._answer()

    do_GET = do_PUT = do_DELETE = do_POST

    def _answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.words = {key: values[0] for key, values in parse_qs(url.query).items()}
        wrong = Google.fault(self.command, unquote(self.path))
        Google.writes += self.command != "GET"
        if wrong == "hang up":
            self.close_connection = True
        elif isinstance(wrong, int):
            self._reply(wrong, {"error": {"code": wrong, "message": "as told"}})
        else:
            self._route(url.path, sent, cut=wrong == "cut", lost=wrong == "lost answer")

    def _route(self, path: str, sent: bytes, *, cut: bool, lost: bool) -> None:
        if found := re.fullmatch(r"/upload/storage/v1/b/runs/o", path):
            answer = self._insert(sent)
        elif found := re.fullmatch(r"/storage/v1/b/runs/o/([^/]+)/rewriteTo/b/runs/o/([^/]+)", path):
            answer = self._rewrite(*map(unquote, found.groups()))
        elif found := re.fullmatch(r"(?:/download)?/storage/v1/b/runs/o/([^/]+)", path):
            answer = self._object(unquote(found[1]), cut=cut)
        elif path == "/storage/v1/b/runs/o":
            answer = self._list()
        else:
            answer = (200, {"name": "runs"}) if path == "/storage/v1/b/runs" else (404, {})
        if lost:
            self.close_connection = True
        elif answer is not None:
            self._reply(*answer)

    def _list(self) -> tuple[int, Any]:
        prefix, delimiter = self.words.get("prefix", ""), self.words.get("delimiter")
        items, prefixes = [], set()
        for name in sorted(self.objects):
            if name.startswith(prefix):
                head, slash, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                prefixes.add(prefix + head + slash) if slash else items.append(self._resource(name))
        return 200, {"items": items, "prefixes": sorted(prefixes)}

    def _object(self, name: str, *, cut: bool) -> tuple[int, Any] | None:
        if name not in self.objects:
            return 404, {"error": {"code": 404, "message": "No such object"}}
        if self.command == "DELETE":
            del self.objects[name]
            return 204, None
        if self.words.get("alt") != "media":
            return 200, self._resource(name)
        content, _ = self.objects[name]
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        first, last = 0, size - 1
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), min(int(found[2] or last), last)
        if isinstance(content, Path):
            with content.open("rb") as file:
                file.seek(first)
                body = file.read(last + 1 - first)
        else:
            body = content[first : last + 1]
        body = body[: len(body) // 2] if cut else body
        Google.num_bytes += len(body)
        self._reply(206 if "Range" in self.headers else 200, body)
        return None

    def _insert(self, sent: bytes) -> tuple[int, Any] | None:
        kind, name = self.words["uploadType"], self.words.get("name", "")
        if kind == "multipart":
            described, sent = (part.partition(b"\n\n")[2] for part in sent.split(b"--==0==")[1:3])
            name, sent = json.loads(described)["name"], sent[:-1]
        if kind == "resumable" and "u" not in self.words:
            id_ = str(len(self.uploads))
            self.uploads[id_] = (name or json.loads(sent)["name"], self.words.get("ifGenerationMatch"), bytearray())
            self.send_response(200)
            self.send_header("Location", f"http://{self.headers['Host']}{self.path.split('?')[0]}?uploadType=resumable&u={id_}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if self.command == "DELETE":  # gcsfs gives up an upload
            return 499, None
        if kind == "resumable":
            name, wanted, so_far = self.uploads[self.words["u"]]
            so_far += sent
            if not self.headers["Content-Range"].endswith(f"/{len(so_far)}"):
                self._reply(308, b"", Range=f"bytes=0-{len(so_far) - 1}")
                return None
            return self._put(name, bytes(so_far), wanted)
        return self._put(name, sent, self.words.get("ifGenerationMatch"))

    def _put(self, name: str, content: bytes, wanted: str | None) -> tuple[int, Any]:
        now = self.objects[name][1] if name in self.objects else 0
        if self.conditions and wanted is not None and int(wanted) != now:
            return 412, {"error": {"code": 412, "message": "At least one of the pre-conditions you specified did not hold."}}
        Google.generation += 1
        self.objects[name] = (content, Google.generation)
        return 200, self._resource(name)

    def _rewrite(self, source: str, name: str) -> tuple[int, Any]:
        if source not in self.objects:
            return 404, {}
        content, now = self.objects[source]
        if self.words.get("ifSourceGenerationMatch") not in (None, str(now)):
            return 412, {"error": {"code": 412, "message": "source"}}
        if self.piecewise and "rewriteToken" not in self.words:
            return 200, {"done": False, "rewriteToken": "next"}
        assert isinstance(content, bytes)
        status, made = self._put(name, content, self.words.get("ifGenerationMatch"))
        return status, {"done": True, "resource": made} if status == 200 else made

    def _resource(self, name: str) -> dict[str, Any]:
        content, generation = self.objects[name]
        told = {"kind": "storage#object", "bucket": "runs", "name": name, "generation": str(generation), "metageneration": "1",
                "etag": base64.b64encode(str(generation).encode()).decode(), "updated": "2026-01-01T00:00:00.000Z"}  # fmt: skip
        if isinstance(content, Path):
            return told | {"size": str(content.stat().st_size)}
        return told | {"size": str(len(content)), "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode()}

    def _reply(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


class Served(ThreadingHTTPServer):
    """Says nothing of a client that hangs up before it has read the answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing on the screen."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server's address."""
    served = Served(("127.0.0.1", 0), Google)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.fixture
def empty(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket `gs://runs`, and an empty directory in which the commands run."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "p"})
    for name, value in (("objects", {}), ("uploads", {}), ("num_bytes", 0), ("writes", 0), ("conditions", True)):
        monkeypatch.setattr(Google, name, value)
    monkeypatch.setattr(Google, "piecewise", False)
    monkeypatch.setattr(Google, "fault", staticmethod(lambda method, path: None))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield
    RemoteView.opened = None


@pytest.fixture
def store(empty: None, checkpoints: CheckpointFactory, root: Path) -> Path:
    """Two checkpoints on disk; the same bytes are below `ROOT`."""
    made = checkpoints.accelerate(root, **SEED)
    for path in sorted(made.rglob("*")):
        if path.is_file():
            put(f"r/checkpoints/{path.relative_to(made).as_posix()}", path.read_bytes())
    return made


def put(name: str, content: bytes | Path) -> None:
    Google.generation += 1
    Google.objects[name] = (content, Google.generation)


def objects() -> dict[str, bytes]:
    return {name: content for name, (content, _) in Google.objects.items() if isinstance(content, bytes)}


def chronicle(*words: str) -> int:
    gcsfs.GCSFileSystem.clear_instance_cache()
    RemoteView.opened = None
    return run(words)


def with_run(*words: str) -> int:
    return chronicle(*words, "--run", "r", "--logs", "logs", "--checkpoints", ROOT)


def entries() -> list[str]:
    return [entry.kind for entry in read_journal(RunPaths(Path("logs/r"))).entries]


def test_gs_reads_as_a_disk_does(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "{}/opt_step-10"], ["verify", "{}/opt_step-10"]):
        told = []
        for place in (str(store), ROOT):
            code = chronicle(*(word.format(place) for word in words))
            told.append((code, capsys.readouterr().out))
        unread = "  info  F11 .: not looked for NaN: its bytes would be fetched from the store once more\n"
        assert (unread in told[1][1]) == (words[0] == "verify")
        assert told[0] == (told[1][0], told[1][1].replace(unread, "")) and told[0][0] == 0 and told[0][1]
    assert chronicle("latest", "--verified", "--print-path", "--checkpoints", ROOT) == 0
    assert capsys.readouterr().out == f"{ROOT}/opt_step-10\n"
    assert Google.writes == 0 and not list(Path.cwd().iterdir())


def test_inspect_of_two_gigabytes_reads_less_than_two_megabytes(
    empty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sparse file stands for 2 GB of moments: its zip has the directory and the pickle that torch writes."""
    folder = tmp_path / "big" / "checkpoint-700"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 700, "log_history": []}))
    torch.save({"last_epoch": 700, "_step_count": 701, "base_lrs": [1e-3], "_last_lr": [1e-3]}, folder / "scheduler.pt")
    states = {n: {"step": torch.tensor(700.0), "exp_avg": torch.zeros(2_600_000)} for n in range(200)}
    torch.save({"state": states, "param_groups": [{"lr": 1e-3, "params": list(range(200))}]}, folder / "optimizer.pt")
    for path in folder.iterdir():
        put(f"checkpoint-700/{path.name}", path)
    try:
        assert (folder / "optimizer.pt").stat().st_size > 2e9
        assert chronicle("inspect", "gs://runs/checkpoint-700", "--json") == 0
        assert json.loads(capsys.readouterr().out)["optimizers"][0]["num_states"] == 200
        assert 0 < Google.num_bytes < 2e6, Google.num_bytes
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("words", [["inspect"], ["verify"]], ids=lambda w: w[0])
@pytest.mark.parametrize("fault", [403, 404, "cut"])
def test_a_fault_of_the_store_says_nothing_about_the_checkpoint(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], fault: int | str
) -> None:
    where = re.compile("optimizer.bin.*media")
    monkeypatch.setattr(Google, "fault", staticmethod(lambda method, path: fault if where.search(path) else None))
    assert chronicle(*words, f"{ROOT}/opt_step-10") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "opt_step-10" in err.splitlines()[0] and "Traceback" not in err


def test_rollback_and_undo(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Google, "piecewise", True)  # a copy takes several requests
    before = objects()
    assert with_run("rollback", "--to", "5", "--lr-scale", "0.5", "--dry-run") == 0 and Google.writes == 0
    assert with_run(*HALF) == 0
    assert "later checkpoints stay where they are: opt_step-10" in capsys.readouterr().out
    new = {name: content for name, content in objects().items() if name not in before}
    assert {name: objects()[name] for name in before} == before, "nothing is overwritten"
    named = json.loads(new.pop(OWN))["checkpoint"].removeprefix("gs://runs/")
    edited = {name for name in new if new[name] != before[name.replace(named, "r/checkpoints/opt_step-5")]}
    assert {Path(name).name for name in edited} == {"optimizer.bin", "custom_checkpoint_0.pkl"}
    old, now = (torch.load(io.BytesIO(one), weights_only=False)["param_groups"][0]["lr"] for one in (
        before["r/checkpoints/opt_step-5/accelerator_state/optimizer.bin"], new[f"{named}/accelerator_state/optimizer.bin"]
    ))  # fmt: skip
    assert now == old / 2
    assert with_run("latest", "--verified", "--print-path") == 0
    assert capsys.readouterr().out == f"gs://runs/{named}\n"
    assert with_run("status") == 0 and f"step 5 gs://runs/{named}" in capsys.readouterr().out
    assert chronicle("verify", f"gs://runs/{named}") == 0
    assert with_run("undo", "--yes") == 0
    assert {*objects()} == {*before, OWN} and json.loads(objects()[OWN])["checkpoint"] is None
    assert with_run(*HALF) == 0  # the pointer says that there is none: it is replaced on the condition that it still does


def test_a_pointer_of_the_trainer_is_put_once(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put("r/checkpoints/latest", b"opt_step-10\n")
    before = objects()
    assert with_run(*HALF) == 0
    assert re.fullmatch(rb"opt_step-5-chronicle-[a-p]{12}\n", objects()["r/checkpoints/latest"]) and OWN not in objects()
    assert with_run("undo", "--yes") == 0 and objects() == before


def test_a_store_that_ignores_conditions_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    monkeypatch.setattr(Google, "conditions", False)
    assert with_run(*HALF) == 3
    assert "does not honour conditional puts (`ifGenerationMatch`)" in capsys.readouterr().err
    assert objects() == before and entries()[-1] == "recover.receipt"


@pytest.mark.parametrize("where", ["uploadType=multipart", "model.safetensors", "chronicle-latest.json"])
def test_a_write_that_fails_leaves_nothing(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = objects()
    monkeypatch.setattr(Google, "fault", staticmethod(lambda method, path: 403 if method == "POST" and where in path else None))
    code = with_run(*HALF)
    said = capsys.readouterr().err
    assert code in (3, 4) and "Traceback" not in said
    monkeypatch.setattr(Google, "fault", staticmethod(lambda method, path: None))
    if code == 4:  # the answer might have been lost
        assert "is not known" in said and with_run("recover") == 0
    assert objects() == before and with_run(*HALF) == 0


def test_a_lost_answer_is_no_failure(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs repeats the put, whose condition does not hold any more; the pointer says why."""
    left = [1]

    def once(method: str, path: str) -> str | None:
        return "lost answer" if method == "POST" and "chronicle-latest" in path and left and not left.clear() else None

    monkeypatch.setattr(Google, "fault", staticmethod(once))
    assert with_run(*HALF) == 0 and not left and OWN in objects()


def test_another_writer_of_the_pointer_is_never_lost(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put("r/checkpoints/latest", b"opt_step-10")
    before, left = objects(), [1]

    def between(method: str, path: str) -> None:
        if method == "POST" and "name=r/checkpoints/latest" in path and left:
            left.clear()
            put("r/checkpoints/latest", b"opt_step-15")

    monkeypatch.setattr(Google, "fault", staticmethod(between))
    assert with_run(*HALF) == 3 and not left
    assert "latest` was changed by another writer after the plan was made" in capsys.readouterr().err
    assert objects() == before | {"r/checkpoints/latest": b"opt_step-15"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_an_object_that_changes_after_the_plan_is_not_copied(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, left = objects(), [1]
    changed = f"r/checkpoints/opt_step-5/accelerator_state/{name}"

    def between(method: str, path: str) -> None:
        if method == "POST" and left:
            left.clear()
            put(changed, before[changed])  # the same bytes, saved again: another generation

    monkeypatch.setattr(Google, "fault", staticmethod(between))
    assert with_run(*HALF) == 3
    assert "after the plan was made" in capsys.readouterr().err and objects() == before


def test_large_objects_are_created_once_and_a_copy_is_compared(empty: None, tmp_path: Path) -> None:
    content = bytes(range(256)) * (12 * 2**12)
    path = tmp_path / "large"
    path.write_bytes(content)
    gcsfs.GCSFileSystem.clear_instance_cache()
    bucket = remote.open_bucket(ROOT)
    bucket.upload(path, "gs://runs/r/large")
    assert objects()["r/large"] == content
    with pytest.raises(remote.Superseded):
        bucket.upload(path, "gs://runs/r/large")
    generation = bucket.etag("gs://runs/r/large")
    assert generation is not None
    bucket.copy("gs://runs/r/large", "gs://runs/r/copy")
    assert bucket.has_copy("gs://runs/r/large", "gs://runs/r/copy", len(content), generation)
    put("r/copy", content[:-1] + b"x")
    assert not bucket.has_copy("gs://runs/r/large", "gs://runs/r/copy", len(content), generation)
    assert not bucket.has_copy("gs://runs/r/large", "gs://runs/r/large", len(content), "17")


def test_the_emulator_of_another_hand(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """gcp-storage-emulator reads alike, and ignores preconditions: a rollback there is refused, and nothing stays."""
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    made = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="runs")
    made.start()
    try:
        port = made._api._httpd.server_address[1] if hasattr(made, "_api") else made._httpd.server_address[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        gcsfs.GCSFileSystem.clear_instance_cache()
        link = fsspec.filesystem("gs")
        for name, content in objects().items():
            link.pipe_file(f"runs/{name}", content)
        before = link.find("runs/r")
        assert chronicle("verify", f"{ROOT}/opt_step-10") == 0
        assert with_run(*HALF) == 3
        assert "does not honour conditional puts" in capsys.readouterr().err
        link.invalidate_cache()
        assert link.find("runs/r") == before
    finally:
        made.stop()
