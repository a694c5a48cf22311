"""What a plain loop saves stays as torch made it, and is known again by its content."""

import copy
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import chronicle
from chronicle import ResumeRefused
from chronicle.checkpoints import known_states
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.records import NOT_RECORDED, state_digest
from rollback.checkpoint.identity import read_state_digests
from rollback.checkpoint.listing import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


class Loop:
    """One start of a script with a plain loop."""

    def __init__(self, run_dir: Path | None, kind: str = "adamw", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 1))
        self.optimizer: Any = KINDS[kind](self.model.parameters())
        self.run = None if run_dir is None else chronicle.attach(run_dir, self.model, self.optimizer)
        self.step = 0

    def train(self, num_steps: int) -> "Loop":
        for _ in range(num_steps):
            x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(self.step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any], *parts: str, step: int = 4) -> "Loop":
        for part in parts or ("model", "optimizer"):
            getattr(self, part).load_state_dict(state[part])
        self.step = step
        return self


def saved(path: Path, run_dir: Path, kind: str = "adamw") -> Path:
    loop = Loop(run_dir, kind).train(4)
    torch.save(loop.state(), path)
    loop.train(2)
    return path


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def verdict(run_dir: Path) -> Any:
    return list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_guarded_optimizer_is_that_of_torch(run_dir: Path, kind: str) -> None:
    guarded, bare = Loop(run_dir, kind).train(3).optimizer.state_dict(), Loop(None, kind).train(3).optimizer.state_dict()
    assert type(guarded) is type(bare) and list(guarded) == list(bare) and state_digest(guarded) == state_digest(bare)
    assert guarded["param_groups"] == bare["param_groups"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [("model", "optimizer"), ("optimizer", "model")])
def test_a_file_that_was_moved_and_renamed_is_known(tmp_path: Path, run_dir: Path, kind: str, parts: Any) -> None:
    moved = shutil.move(saved(tmp_path / "ck.pt", run_dir, kind), tmp_path / "elsewhere.bin")
    Loop(run_dir, kind, seed=1).load(read(moved), *parts).train(1)
    assert verdict(run_dir)["verdict"] == "passed" and verdict(run_dir)["loaded"]["step"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_that_loses_the_weights_is_refused(tmp_path: Path, run_dir: Path, kind: str) -> None:
    state = read(saved(tmp_path / "ck.pt", run_dir, kind))
    with pytest.raises(ResumeRefused):
        Loop(run_dir, kind, seed=1).load(state, "model").train(1)
    if kind != "sgd":  # whose empty state says nothing of the weights that should be beside it
        with pytest.raises(ResumeRefused):
            Loop(run_dir, kind, seed=1).load(state, "optimizer").train(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_distributed_checkpoint_is_read_by_torch_as_without_us(tmp_path: Path, run_dir: Path, kind: str) -> None:
    """torch asks the checkpoint for every key of the state that it loads into: none is ours."""
    loop = Loop(run_dir, kind).train(4)
    dcp.save(loop.state(), checkpoint_id=tmp_path / "ck")
    loop.train(1)
    again = Loop(run_dir, kind, seed=1)
    state = again.state()
    dcp.load(state, checkpoint_id=tmp_path / "ck")
    if kind == "sgd":
        again.load(state).train(1)
        assert verdict(run_dir)["verdict"] == "passed"
    else:  # a fresh optimizer has no moments to load into: torch drops the saved ones in silence
        with pytest.raises(ResumeRefused) as refused:
            again.load(state).train(1)
        assert "parameters with state" in [check.name for check in refused.value.checks if not check.ok]


def test_a_file_with_a_key_of_ours_inside_still_loads(tmp_path: Path, run_dir: Path) -> None:
    """Files of this code before 2026-11-28 hold a record under a key of the optimizer's state, which is no longer read."""
    loop = Loop(run_dir).train(4)
    state = loop.state()
    state["optimizer"]["chronicle"] = {"v": 1}
    torch.save(state, tmp_path / "old.pt")
    loop.train(1)
    shutil.rmtree(run_dir / "states", ignore_errors=True)
    Loop(run_dir, seed=1).load(read(tmp_path / "old.pt")).train(1)
    assert verdict(run_dir)["verdict"] == "unverified"


def test_a_state_that_nobody_recorded_is_unknown_and_trains_on(tmp_path: Path, run_dir: Path) -> None:
    torch.save(Loop(None).train(4).state(), tmp_path / "foreign.pt")
    Loop(run_dir, seed=1).load(read(tmp_path / "foreign.pt")).train(1)
    found = verdict(run_dir)
    assert found["verdict"] == "unverified" and NOT_RECORDED in str(found["not_compared"])


def test_a_copy_that_is_written_later_is_of_its_own_step(tmp_path: Path, run_dir: Path) -> None:
    """The best state is kept in memory, and written when the training is over."""
    loop = Loop(run_dir).train(4)
    best = copy.deepcopy(loop.state())
    loop.train(3)
    torch.save(best, tmp_path / "best.pt")
    assert [entry.step for entry in read_journal(RunPaths(run_dir)).of_kind("guard.saved")] == [4]
    Loop(run_dir, seed=1).load(read(tmp_path / "best.pt")).train(1)
    assert verdict(run_dir)["verdict"] == "passed"


def test_a_state_that_another_thread_writes_is_known(tmp_path: Path, run_dir: Path) -> None:
    loop = Loop(run_dir).train(4)
    state = copy.deepcopy(loop.state())
    thread = threading.Thread(target=torch.save, args=(state, tmp_path / "ck.pt"))
    thread.start()
    thread.join()
    loop.train(1)
    assert [entry.step for entry in read_journal(RunPaths(run_dir)).of_kind("guard.saved")] == [4]
    Loop(run_dir, seed=1).load(read(tmp_path / "ck.pt")).train(1)
    assert verdict(run_dir)["verdict"] == "passed"


def test_an_older_copy_is_not_taken_for_the_state_of_now(tmp_path: Path, run_dir: Path) -> None:
    loop = Loop(run_dir).train(2)
    old = copy.deepcopy(loop.state())
    loop.train(2)
    loop.state()
    torch.save(old, tmp_path / "old.pt")
    Loop(run_dir, seed=1).load(read(tmp_path / "old.pt"), step=2).train(1)
    assert verdict(run_dir)["loaded"]["step"] == 2


def test_weights_alone_that_are_written_are_no_save_of_the_training(tmp_path: Path, run_dir: Path) -> None:
    """A state is taken and thrown away, and weights are written: a launch from scratch is none that lost its checkpoint."""
    loop = Loop(run_dir).train(4)
    loop.state()
    torch.save(loop.model.state_dict(), tmp_path / "weights.pt")
    assert not list(read_journal(RunPaths(run_dir)).of_kind("guard.saved"))
    Loop(run_dir).train(1)


def test_a_run_beside_this_one_knows_what_it_saved(tmp_path: Path, run_dir: Path) -> None:
    path = saved(tmp_path / "ck.pt", run_dir)
    fork = run_dir.with_name("fork")
    Loop(fork, seed=1).load(read(path)).train(1)
    assert verdict(fork)["loaded"]["run"] == run_dir.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_known_on_disk_as_in_memory(tmp_path: Path, run_dir: Path, kind: str) -> None:
    """By its content, read without torch: also where the moments do not lie in the order of their indices."""
    loop = Loop(run_dir, kind)
    loop.model.to(memory_format=torch.channels_last)
    loop.train(4)
    torch.save(loop.state(), tmp_path / "ck-4.pt")
    found = open_checkpoint(tmp_path / "ck-4.pt", count_steps=False)
    digest = state_digest(loop.optimizer.state_dict())
    assert read_state_digests(found) == ((digest,) if digest else ())
    identity = known_states(read_journal(RunPaths(run_dir)).entries).identity_in(found)
    assert (identity.get("step"), identity.get("run")) == ((4, run_dir.name) if digest else (None, None))
