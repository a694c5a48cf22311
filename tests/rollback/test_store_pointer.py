"""The one put that counts in a store: what is not known of it is said, and nothing that it may name is removed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.disk.remote import Superseded
from rollback.errors import PlanRefused, StoppedPartWay, StoreFailed
from rollback.transaction import in_store
from rollback.transaction.in_store import StorePlan, apply_in_store


class Bucket:
    """A store whose put of the pointer ends as it is told."""

    def __init__(self, ending: BaseException) -> None:
        self.ending = ending
        self.removed: list[str] = []

    def refuse_unconditional(self, folder: str) -> None:
        """It knows conditions."""

    def put(self, url: str, content: bytes, *, etag: str | None) -> str:
        raise self.ending

    def read(self, url: str) -> tuple[bytes, str] | None:
        if isinstance(self.ending, StoreFailed):
            raise self.ending
        return b"of another writer", "etag"

    def below(self, folder: str) -> list[str]:
        return [f"{folder}/model.bin"]

    def remove(self, url: str) -> None:
        self.removed.append(url)


def plan() -> StorePlan:
    folder = "s3://b/run/opt_step-5-chronicle-abc"
    return StorePlan(
        plan=SimpleNamespace(entry="opt_step-5"),  # type: ignore[arg-type]
        root="s3://b/run", folder=folder, target=folder, pointer="s3://b/run/latest",
        before=b"opt_step-9", etag="old", after=b"opt_step-5-chronicle-abc", objects=(), later={},
    )  # fmt: skip


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), OSError("reset"), StoreFailed("no answer", "wait")])
def test_a_put_of_which_nothing_is_known_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    written: list[str] = []
    bucket = Bucket(ending)
    with pytest.raises(StoppedPartWay, match="was put is not known"):
        go(tmp_path, monkeypatch, bucket, written)
    assert bucket.removed == [] and written == ["rollback.intent"]


def test_a_put_that_another_writer_forestalled_removes_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    bucket = Bucket(Superseded("s3://b/run/latest"))
    with pytest.raises(PlanRefused, match="was changed by another writer"):
        go(tmp_path, monkeypatch, bucket, written)
    assert len(bucket.removed) == 1 and written == ["rollback.intent", "recover.receipt"]


def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: Any, written: list[str]) -> None:
    def record(kind: str, data: Any) -> str:
        written.append(kind)
        return f"E{len(written)}"

    monkeypatch.setattr(in_store, "facts_of", lambda plan: {})
    monkeypatch.setattr(in_store, "_PAUSES_SECONDS", (0.0,))
    contract = tmp_path / "contract.json"
    apply_in_store(plan(), bucket, objects_dir=tmp_path / "objects", record=record, contract_path=contract, contract={})
