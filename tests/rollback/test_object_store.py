"""Checkpoints and logs in object stores: `inspect`, `verify`, `diff`, `latest`, `status` read them by range, and write nothing.

The store is a directory behind fsspec's own local filesystem, under a scheme of its own that counts bytes and breaks on demand;
the same commands were tried by hand against an S3 server (moto).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from chronicle.cli.main import run
from chronicle.resume.checks.run import check_contract
from chronicle.resume.contract import load_contract, same_checkpoint
from chronicle.resume.journal import GuardHistory
from rollback.disk import RemoteView
from tests.builders.checkpoints import CheckpointFactory

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}


class Bucket(LocalFileSystem):  # type: ignore[misc]
    """`bucket://NAME/KEY` is `top/NAME/KEY`; every read is counted, and `fault` may answer instead."""

    protocol = "bucket"
    cachable = False
    top = Path()
    num_bytes = 0
    fault: Callable[[str], bytes | None] | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("bucket://").strip("/")

    def _info(self, found: dict[str, Any], name: str) -> dict[str, Any]:
        return {"name": name, "size": found["size"], "type": found["type"], "mtime": found["mtime"]}

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kw: Any) -> Any:
        names = [p for p in (self.top / path).rglob("*") if p.is_file()] or [p for p in [self.top / path] if p.is_file()]
        return {str(p.relative_to(self.top)): self.info(str(p.relative_to(self.top))) for p in names}

    def ls(self, path: str, detail: bool = False, **kw: Any) -> Any:
        return [self.info(str(p.relative_to(self.top))) for p in (self.top / path).iterdir()]

    def info(self, path: str, **kw: Any) -> dict[str, Any]:
        return self._info(LocalFileSystem().info(str(self.top / path)), path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kw: Any) -> bytes:
        answer = type(self).fault(path) if type(self).fault is not None else None
        if answer is None:
            with (self.top / path).open("rb") as file:
                file.seek(start or 0)
                answer = file.read((end or 0) - (start or 0))
        type(self).num_bytes += len(answer)
        return answer


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that is `bucket://b`."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "top", tmp_path / "store")
    monkeypatch.setattr(Bucket, "num_bytes", 0)
    monkeypatch.setattr(Bucket, "fault", None)
    monkeypatch.setattr(RemoteView, "opened", None)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield tmp_path / "store" / "b"
    assert not list(work.iterdir()), "nothing is written where the command runs"


@pytest.fixture
def saved(bucket: Path, checkpoints: CheckpointFactory, root: Path) -> Path:
    """Two checkpoints on disk; the same bytes are in `bucket://b/run/checkpoints`."""
    made = checkpoints.accelerate(root, **SEED)
    shutil.copytree(made, bucket / "run" / "checkpoints")
    return made


@pytest.fixture(autouse=True)
def fresh_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteView, "opened", None)


ROOT = "bucket://b/run/checkpoints"


def chronicle(*words: str) -> int:
    """One command, as a new process would run it: nothing is kept of what an earlier one listed."""
    RemoteView.opened = None
    return run(words)


OF_ELEMENTS = ("not looked for NaN", "would be fetched", "tensors that", "values are equal")  # said of a store


def test_a_store_reads_as_a_disk_does(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words for the same bytes, with the URL in place of the path."""
    for words in (["inspect", "{}/opt_step-10"], ["diff", "{}/opt_step-5", "{}/opt_step-10"], ["verify", "{}/opt_step-10"]):
        told = []
        for place in (str(saved), ROOT):
            code = chronicle(*(word.format(place) for word in words))
            said = capsys.readouterr().out.splitlines()
            told.append((code, [line for line in said if not any(words in line for words in OF_ELEMENTS)]))
        assert told[0] == told[1] and told[0][0] == 0 and told[0][1]


def test_latest_prints_the_url(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a script gets can be given to the next launch."""
    assert chronicle("latest", "--verified", "--print-path", "--checkpoints", ROOT) == 0
    assert capsys.readouterr().out == f"{ROOT}/opt_step-10\n"


def test_changed_bytes_are_found(saved: Path, bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte is compared with its checksum, as on a disk."""
    path = bucket / "run/checkpoints/opt_step-10/accelerator_state/optimizer.bin"
    data = bytearray(path.read_bytes())
    data[data.find(b"data/1") + 600] ^= 1
    path.write_bytes(data)
    assert chronicle("verify", f"{ROOT}/opt_step-10") == 5
    assert "F3" in capsys.readouterr().out


def test_inspect_of_two_gigabytes_reads_two_megabytes(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only names, pickles and the step of each parameter are fetched: 0.1 % of the file."""
    folder = bucket / "run" / "checkpoint-700"
    folder.mkdir(parents=True)
    moment = torch.empty(1_300_000)
    states = {
        n: {"step": torch.tensor(700.0), "exp_avg": torch.empty_like(moment), "exp_avg_sq": torch.empty_like(moment)}
        for n in range(200)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(200))}
    with torch.serialization.skip_data():  # reserves the place of each tensor: a hole of the right size
        torch.save({"state": states, "param_groups": [group]}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 700, "log_history": []}))
    torch.save({"last_epoch": 700, "_step_count": 701, "base_lrs": [1e-3], "_last_lr": [1e-3]}, folder / "scheduler.pt")
    size = (folder / "optimizer.pt").stat().st_size
    assert chronicle("inspect", "bucket://b/run/checkpoint-700", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["optimizers"][0]["num_states"] == 200 and shown["path"] == "bucket://b/run/checkpoint-700"
    assert size > 2e9 and Bucket.num_bytes < 2e6


def _reset(name: str) -> bytes:
    raise ConnectionResetError("Connection reset by peer")


def _gone(name: str) -> bytes:
    raise FileNotFoundError(name)


def _unavailable(name: str) -> bytes:
    raise OSError("503 Slow Down")


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["latest", "--verified"], ["diff"]], ids=lambda w: w[0])
@pytest.mark.parametrize("fault", [_reset, _gone, _unavailable, lambda name: b"x"], ids=["reset", "gone", "503", "short"])
def test_a_store_that_fails_says_nothing_about_the_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], fault: Any
) -> None:
    """One sentence and exit 1: not damaged, not verified, and no older checkpoint in place of one that could not be read."""
    monkeypatch.setattr(Bucket, "fault", fault)
    named = {"inspect": [f"{ROOT}/opt_step-10"], "verify": [f"{ROOT}/opt_step-10"], "latest": ["--checkpoints", ROOT],
             "diff": [f"{ROOT}/opt_step-5", f"{ROOT}/opt_step-10"]}  # fmt: skip
    assert chronicle(*words, *named[words[0]]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"`{ROOT}/opt_step-" in err.splitlines()[0]
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1 and "Traceback" not in err


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_an_object_that_changes_while_it_is_read_is_not_verified(
    saved: Path, bucket: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A launch writes the checkpoint again during the verification: the bytes that were read are of two saves."""
    path = bucket / "run/checkpoints/opt_step-10/accelerator_state/optimizer.bin"

    def change(name: str) -> None:
        if name.endswith("random_states_0.pkl") and path.exists():
            if how == "removed":
                path.unlink()
            else:
                os.utime(path, (1, 1))

    monkeypatch.setattr(Bucket, "fault", change)
    assert chronicle("verify", f"{ROOT}/opt_step-10") == 1
    out, err = capsys.readouterr()
    assert out == "" and "optimizer.bin` " in err and "while it was read" in err


def test_what_would_write_into_a_store_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the way out, before anything is read or written."""
    before = sorted(p.name for p in saved.rglob("*"))
    for words in (
        ["rollback", "--to", "5", "--checkpoints", ROOT, "--yes"],
        ["manifest", f"{ROOT}/opt_step-5"],
        ["verify", "--all", "--quarantine", "--checkpoints", ROOT],
        ["prune", "--checkpoints", ROOT],
        ["undo", "--checkpoints", ROOT],
        ["recover", "--checkpoints", ROOT],
        ["note", "hello", "--logs", "bucket://b/run/logs"],
    ):
        assert chronicle(*words) == 3, words
        assert "is in an object store" in capsys.readouterr().err
    assert sorted(p.name for p in (Bucket.top / "b/run/checkpoints").rglob("*")) == before and Bucket.num_bytes == 0


def test_a_launch_after_a_rollback_in_a_store_loads_a_copy(tmp_path: Path) -> None:
    """Its place tells nothing but the name, which holds the id of the rollback; what cannot be compared refuses no run."""
    record = {"v": 1, "rollback": "R", "checkpoint": "s3://b/aside/x/step-5-chronicle-abcd", "step": 5, "groups": []}
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(record))
    contract, history = load_contract(path), GuardHistory()
    assert contract is not None and same_checkpoint(contract, tmp_path / "step-5-chronicle-abcd", None)
    assert not same_checkpoint(contract, tmp_path / "step-5", None)
    assert check_contract(contract, tmp_path / "step-5", None, history) == []
    path.write_text(json.dumps(record | {"checkpoint": str(tmp_path / "step-5-chronicle-abcd")}))
    local = load_contract(path)
    assert local is not None and len(check_contract(local, tmp_path / "step-5", None, history)) == 1


def test_a_file_url_is_a_local_path(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No store is between the command and the disk."""
    assert chronicle("inspect", f"file://{saved}/opt_step-10") == 0
    assert "step 10" in capsys.readouterr().out and RemoteView.opened is None


def test_names_that_no_disk_holds_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object key may be any text: it is never a path outside the view."""
    assert chronicle("inspect", "bucket://b/../../etc") == 1
    assert "cannot be listed" in capsys.readouterr().err


def test_status_reads_logs_from_a_store(
    saved: Path, bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal is fetched, the per-step log is read by range, and a verdict is not recorded where nothing can be."""
    logs = tmp_path / "logs"
    assert run(["init", "--run", "r", "--logs", str(logs), "--checkpoints", str(saved)]) == 0
    assert run(["note", "the run is well", "--step", "10", "--run", "r", "--logs", str(logs)]) == 0
    (logs / "r" / "launches" / "0001").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": n, "loss": 1.0 / (n + 1), "text": "x" * 200}) for n in range(20_000)]
    (logs / "r" / "launches" / "0001" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(logs, bucket / "run" / "logs")
    for name in ("chronicle.toml",):
        Path(name).unlink(missing_ok=True)
    capsys.readouterr()
    assert chronicle("status", "--run", "r", "--logs", str(logs), "--checkpoints", str(saved)) == 0
    on_disk = capsys.readouterr().out
    assert chronicle("status", "--run", "r", "--logs", "bucket://b/run/logs", "--checkpoints", ROOT) == 0
    there = capsys.readouterr().out.replace(ROOT, str(saved))
    assert there.split() == on_disk.split() and "opt_step-10" in on_disk  # lines end elsewhere: the places differ in length
    assert Bucket.num_bytes < 1e6 < (bucket / "run/logs/r/launches/0001/metrics.jsonl").stat().st_size
    assert chronicle("verify", "--all", "--run", "r", "--logs", "bucket://b/run/logs", "--checkpoints", ROOT) == 0
    assert "not recorded: the journal is in an object store" in capsys.readouterr().err


def test_commands_that_go_on_without_the_store_say_what_they_leave_undone(
    bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    top = ["--run", "r", "--logs", str(tmp_path / "logs"), "--checkpoints", ROOT]
    assert chronicle("run", *top, "--", "true") == 0
    said = capsys.readouterr().err
    assert f"the checkpoints are in `{ROOT}`, an object store: what the launch saves there is not recorded" in said
    assert chronicle("audit", *top) == 0
    assert "their manifests are not compared" in capsys.readouterr().err
