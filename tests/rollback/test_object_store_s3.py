"""Checkpoints in a real S3 server (moto) on loopback, through a proxy that counts bytes and answers wrongly on demand."""

from __future__ import annotations

import http.client
import io
import json
import re
import threading
from collections import Counter
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
from chronicle.journal import JournalWriter, read_journal  # noqa: E402
from chronicle.paths import RunPaths  # noqa: E402
from rollback.disk import RemoteView, remote  # noqa: E402
from tests.builders.checkpoints import CheckpointFactory  # noqa: E402

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}
ROOT = "s3://runs/r/checkpoints"


class Proxy(BaseHTTPRequestHandler):
    """Passes on to moto; `fault(method, path)` may give another status, or None with the body cut in half."""

    protocol_version = "HTTP/1.1"
    upstream = ("127.0.0.1", 0)
    fault: Callable[[str, str], int | str | None] = staticmethod(lambda method, path: None)
    conditions = True  # False: `If-Match` and `If-None-Match` are not passed on, as by a store that does not know them
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
        if wrong == "hang up":
            self.close_connection = True
            return
        link = http.client.HTTPConnection(*self.upstream, timeout=30)
        left_out = {"connection"} | (set() if self.conditions else {"if-match", "if-none-match"})
        kept = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        link.request(self.command, self.path, sent, kept)
        found = link.getresponse()
        body = found.read()
        link.close()
        if wrong == "lost answer":
            self.close_connection = True
            return
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
def store(
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
    store.invalidate_cache()
    store.rm("runs/r", recursive=True)


@pytest.fixture
def saved(store: Path) -> Iterator[Path]:
    """As `store`, for commands that read."""
    yield store
    assert not list(Path.cwd().iterdir()) and Proxy.writes == 0, "nothing is written, here or in the store"


def chronicle(*words: str) -> int:
    s3fs.S3FileSystem.clear_instance_cache()
    RemoteView.opened = None
    return run(words)


def test_s3_reads_as_a_disk_does(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "{}/opt_step-10"], ["verify", "{}/opt_step-10"]):
        told = []
        for place in (str(saved), ROOT):
            code = chronicle(*(word.format(place) for word in words))
            told.append((code, capsys.readouterr().out))
        unread = "  info  F11 .: not looked for NaN: its bytes would be fetched from the store once more\n"
        assert (unread in told[1][1]) == (words[0] == "verify")
        assert told[0] == (told[1][0], told[1][1].replace(unread, "")) and told[0][0] == 0 and told[0][1]
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


# --- rollback: two phases


HALF = ("rollback", "--to", "5", "--lr-scale", "0.5", "--yes")
OWN = f"{ROOT}/chronicle-latest.json"


def with_run(*words: str) -> int:
    return chronicle(*words, "--run", "r", "--logs", "logs", "--checkpoints", ROOT)


def objects() -> dict[str, bytes]:
    """Every object of the bucket, asked behind the proxy."""
    kept = Proxy.fault
    Proxy.fault = staticmethod(lambda method, path: None)
    try:
        found = s3fs.S3FileSystem(skip_instance_cache=True)
        return {name: found.cat_file(name) for name in found.find("runs/r")}
    finally:
        Proxy.fault = kept


def put(name: str, content: bytes) -> None:
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(name, content)


def entries() -> list[str]:
    return [entry.kind for entry in read_journal(RunPaths(Path("logs/r"))).entries]


def added(before: dict[str, bytes]) -> dict[str, bytes]:
    """What is new; everything that was there is as it was."""
    now = objects()
    assert {name: now.get(name) for name in before} == before
    return {name: content for name, content in now.items() if name not in before}


def test_rollback_copies_under_a_new_prefix_and_puts_the_pointer(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects()
    assert with_run("rollback", "--to", "5", "--lr-scale", "0.5", "--dry-run") == 0
    assert Proxy.writes == 0 and not Path("logs").exists()
    assert with_run(*HALF) == 0
    said = capsys.readouterr().out
    assert "later checkpoints stay where they are: opt_step-10" in said and "`chronicle latest --print-path`" in said
    new = added(before)
    named = json.loads(new.pop(OWN.removeprefix("s3://")))["checkpoint"].removeprefix("s3://")
    assert named.startswith("runs/r/chronicle-rollback/")
    assert {name.rpartition("/accelerator_state/")[0] for name in new} == {named}
    edited = {name for name in new if new[name] != before[name.replace(named, "runs/r/checkpoints/opt_step-5")]}
    assert {Path(name).name for name in edited} == {"optimizer.bin", "custom_checkpoint_0.pkl"}
    old, now = (torch.load(io.BytesIO(one), weights_only=False)["param_groups"][0]["lr"] for one in (
        before["runs/r/checkpoints/opt_step-5/accelerator_state/optimizer.bin"], new[f"{named}/accelerator_state/optimizer.bin"]
    ))  # fmt: skip
    assert now == old / 2
    assert with_run("latest", "--verified", "--print-path") == 0
    assert capsys.readouterr().out == f"s3://{named}\n"
    assert with_run("status") == 0 and f"step 5 s3://{named}" in capsys.readouterr().out
    contract = json.loads(Path("logs/r/contract.json").read_text())
    assert contract["checkpoint"] == f"s3://{named}" and contract["lr_ratio"] == 0.5
    other = "accelerator_state/random_states_0.pkl"
    put(f"runs/r/checkpoints/opt_step-10/{other}", before[f"runs/r/checkpoints/opt_step-5/{other}"])
    assert with_run("latest", "--print-path") == 0  # not the one that the rollback left behind: its files are new
    assert "opt_step-10" in capsys.readouterr().out
    assert with_run("undo", "--yes") == 0
    assert [*objects()] == sorted([*before, OWN.removeprefix("s3://")]) and not Path("logs/r/contract.json").exists()
    assert json.loads(objects()[OWN.removeprefix("s3://")])["checkpoint"] is None
    assert with_run("undo", "--yes") == 0 and "no rollback to undo" in capsys.readouterr().out
    assert with_run(*HALF) == 0  # the pointer says that there is none: it is replaced


def test_the_pointer_of_the_trainer_names_a_new_prefix_beside_the_old_one(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put("runs/r/checkpoints/latest", b"opt_step-10\n")
    before = objects()
    assert with_run(*HALF) == 0
    pointer = objects()["runs/r/checkpoints/latest"].decode()
    assert re.fullmatch(r"opt_step-5-chronicle-[a-p]{12}\n", pointer) and OWN.removeprefix("s3://") not in objects()
    assert with_run("latest", "--print-path") == 0
    assert f"{ROOT}/{pointer}" in capsys.readouterr().out
    put("runs/r/checkpoints/latest", b"opt_step-12\n")  # a launch has saved since
    assert with_run("undo", "--yes") == 3
    assert "holds 'opt_step-12': another writer has changed it since the rollback" in capsys.readouterr().err
    put("runs/r/checkpoints/latest", pointer.encode())
    assert with_run("undo", "--yes") == 0 and objects() == before
    assert with_run("rollback", "--to", "5", "--yes") == 0  # without an edit nothing is copied
    assert objects() == before | {"runs/r/checkpoints/latest": b"opt_step-5\n"}


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (("latest", "latest_universal"), "has 2 pointers (latest, latest_universal): a store changes one object at a time"),
        (("latest_checkpointed_iteration.txt",), "holds a number, and Megatron makes the name from it"),
    ],
)
def test_what_one_put_cannot_do_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], present: tuple[str, ...], words: str
) -> None:
    for name in present:
        put(f"runs/r/checkpoints/{name}", b"10")
    before = objects()
    assert with_run(*HALF) == 3
    assert words in capsys.readouterr().err and objects() == before


def test_a_store_that_does_not_know_conditions_is_refused(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    monkeypatch.setattr(Proxy, "conditions", False)
    assert with_run(*HALF) == 3
    assert "does not honour conditional puts" in capsys.readouterr().err
    assert objects() == before and entries()[-1] == "recover.receipt"


@pytest.mark.parametrize(
    ("fault", "where"),
    [(500, "optimizer.bin"), (403, "model.safetensors"), ("hang up", "model.safetensors"), (503, "chronicle-latest.json")],
)
def test_a_put_that_fails_leaves_nothing(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: int | str, where: str
) -> None:
    before = objects()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(Proxy, "fault", staticmethod(lambda method, path: fault if method == "PUT" and where in path else None))
    code = with_run(*HALF)
    said = capsys.readouterr().err
    assert objects() if code == 4 else objects() == before
    assert "Traceback" not in said and len([line for line in said.splitlines() if line.startswith("error: ")]) == 1
    monkeypatch.setattr(Proxy, "fault", staticmethod(lambda method, path: None))
    if where == "chronicle-latest.json":  # the answer might have been lost: it is asked again when the store answers
        assert code == 4 and "is not known" in said
        assert with_run(*HALF) == 3 and "chronicle recover" in capsys.readouterr().err
        assert with_run("recover") == 0 and "reverted" in capsys.readouterr().out
    else:
        assert code == 3 and "nothing was changed" in said
    assert objects() == before
    assert with_run(*HALF) == 0


def test_an_answer_that_is_lost_is_no_failure(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointer was put: the repeated put does not hold its condition any more, and the pointer says why."""
    before, left = objects(), [1]

    def once(method: str, path: str) -> str | None:
        if method == "PUT" and "chronicle-latest" in path and left:
            left.pop()
            return "lost answer"
        return None

    monkeypatch.setattr(Proxy, "fault", staticmethod(once))
    assert with_run(*HALF) == 0 and not left
    assert OWN.removeprefix("s3://") in added(before)


def test_another_writer_of_the_pointer_is_never_lost(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put("runs/r/checkpoints/latest", b"opt_step-10")
    before, left = objects(), [1]

    def between(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("checkpoints/latest") and left:
            left.pop()
            put("runs/r/checkpoints/latest", b"opt_step-15")

    monkeypatch.setattr(Proxy, "fault", staticmethod(between))
    assert with_run(*HALF) == 3
    assert "latest` was changed by another writer after the plan was made" in capsys.readouterr().err
    assert objects() == before | {"runs/r/checkpoints/latest": b"opt_step-15"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_an_object_that_changes_after_the_plan_is_not_copied(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, left = objects(), [1]
    changed = f"runs/r/checkpoints/opt_step-5/accelerator_state/{name}"

    def between(method: str, path: str) -> None:
        if method == "PUT" and left:
            left.pop()
            put(changed, b"another save")

    monkeypatch.setattr(Proxy, "fault", staticmethod(between))
    assert with_run(*HALF) == 3
    assert "after the plan was made" in capsys.readouterr().err
    assert objects() == before | {changed: b"another save"}


class Killed(BaseException):
    """The process ends here."""


def test_killed_at_any_write_the_pointer_is_the_old_one_or_names_all_of_it(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each write: `recover` finishes or reverts, and `undo` of what was finished leaves what was there."""
    put("runs/r/checkpoints/latest", b"opt_step-10")
    before = objects()
    at, count, killed, writes = 0, 0, False, []
    calls = {name: getattr(remote.Bucket, name) for name in ("put", "upload", "copy", "remove")}

    def counted(name: str) -> Any:
        def made(self: Any, *words: Any, **more: Any) -> Any:
            nonlocal count, killed
            if killed:
                raise Killed  # nothing more is done, by no `finally` either
            count += 1
            writes.append((name, next(word for word in reversed(words) if isinstance(word, str)).rpartition("/")[2]))
            killed = count == at
            if killed and at % 2 == 0:
                raise Killed  # before it
            answer = calls[name](self, *words, **more)
            if killed:
                raise Killed  # after it
            return answer

        return made

    outcomes: Counter[str] = Counter()
    for at in (1, 2, 5, 6, 8, 9, 10, 11, 12):  # noqa: B007 `counted` reads it
        count, killed = 0, False
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(remote.Bucket, name, counted(name))
            code = with_run(*HALF)
        pointer = objects()["runs/r/checkpoints/latest"].decode()
        if pointer != "opt_step-10":  # whoever follows it now finds all of it
            assert chronicle("verify", f"{ROOT}/{pointer}") == 0
        if killed:
            capsys.readouterr()
            assert with_run("recover") == 0
            outcomes[capsys.readouterr().out.split()[2].rstrip(":")] += 1
        if pointer != "opt_step-10":
            assert with_run("undo", "--yes") == 0
        assert objects() == before
    assert not killed and code == 0, "the last point is behind the last write"
    assert writes[-1] == ("put", "latest") and outcomes == {"reverted": 7, "finished": 1}, writes


def test_without_credentials_one_sentence(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert with_run(*HALF) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "redentials" in said and "Traceback" not in said


def test_large_objects_are_copied_and_uploaded_in_parts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ETags are no MD5, so every byte is compared."""
    content = bytes(range(256)) * (12 * 2**12)
    path = tmp_path / "large"
    path.write_bytes(content)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.core, "calculate_chunksize", lambda size, chunksize=None, **_: 5 * 2**20)
    bucket = remote.Bucket(ROOT)
    bucket.upload(path, "s3://runs/r/large")
    etag = bucket.etag("s3://runs/r/large")
    assert etag is not None and "-" in etag
    bucket.copy("s3://runs/r/large", "s3://runs/r/copy")
    assert bucket.has_copy("s3://runs/r/large", "s3://runs/r/copy", len(content), etag) and objects()["runs/r/copy"] == content
    put("runs/r/copy", content[:-1] + b"x")
    assert not bucket.has_copy("s3://runs/r/large", "s3://runs/r/copy", len(content), etag)
    with pytest.raises(remote.Superseded):
        bucket.upload(path, "s3://runs/r/large")


def test_a_config_would_have_to_change_in_the_same_moment(
    store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The person changes it first, and says so."""
    for name in [name for name in objects() if "/opt_step-" in name]:
        s3fs.S3FileSystem(skip_instance_cache=True).rm(name)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    args = {"sched": "cosine", "lr": 3e-4, "warmup_lr": 1e-6, "min_lr": 1e-5}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5, "args": args}, tmp_path / "a")
    put("runs/r/checkpoints/step-5.pt", (tmp_path / "a").read_bytes())
    before = objects()
    Path("args.yaml").write_text("lr: 3e-4\nwarmup_lr: 1e-6\nmin_lr: 1e-5\n")
    with JournalWriter(RunPaths(Path("logs/r").absolute())) as writer:
        writer.append("launch.start", launch=1, data={"argv": ["train.py", "--config", "args.yaml"], "cwd": str(Path.cwd())})
        writer.append("launch.end", launch=1, data={"exit_code": 0})
    assert with_run(*HALF, "--lr-in", "args.yaml:lr") == 3
    said = capsys.readouterr().err
    assert "`lr` 0.0003 → 0.00015" in said and "make this change first" in said and objects() == before
    Path("args.yaml").write_text("lr: 0.00015\nwarmup_lr: 5.0e-7\nmin_lr: 5.0e-6\n")
    assert with_run(*HALF, "--accept-unproved", "args.yaml was changed") == 0
    new = added(before)
    (name,) = [name for name in new if name.endswith(".pt")]
    assert torch.load(io.BytesIO(new[name]), weights_only=False)["optimizer"]["param_groups"][0]["lr"] == 1.5e-4
