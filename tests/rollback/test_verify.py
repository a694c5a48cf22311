"""Every planted defect of a checkpoint becomes a named finding; a healthy one has none that counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import MANIFEST_NAME, read_manifest, write_manifest
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState
from rollback.checks.state import check_lrs
from rollback.checks.verify import compare_manifest, passes, verify_checkpoint
from rollback.errors import Finding, Severity, UnreadableFile
from tests.attacks.companions import healthy
from tests.builders.checkpoints import CheckpointFactory

DDP = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "both", "processes": 2}
SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}


@pytest.fixture
def ddp(checkpoints: CheckpointFactory, root: Path) -> Path:
    """`accelerator_state` of a real two-rank checkpoint of step 10."""
    checkpoints.accelerate(root, **DDP)
    return root / "opt_step-10" / "accelerator_state"


def found_in(folder: Path, *, full: bool = True) -> list[Finding]:
    return verify_checkpoint(open_checkpoint(folder.parent), full=full)


def counting(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.check, f.severity.value, f.path) for f in findings if f.severity is not Severity.INFO]


def test_healthy_checkpoint_has_no_finding_that_counts(ddp: Path) -> None:
    assert counting(found_in(ddp)) == []


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def flip_in_tensor(path: Path) -> None:
    """One bit inside the second moment of a parameter: torch loads it silently."""
    state = torch.load(path, weights_only=False)
    raw = state["state"][0]["exp_avg_sq"].numpy().tobytes()
    flip_bit(path, path.read_bytes().find(raw) + 5)
    torch.load(path, weights_only=True)


S = "accelerator_state/"
DEFECTS: dict[str, tuple[Callable[[Path], object], tuple[str, str, str], str]] = {
    "flipped bit": (lambda d: flip_in_tensor(d / "optimizer.bin"), ("F3", "error", S + "optimizer.bin"), "CRC"),
    "truncated": (lambda d: (d / "optimizer.bin").write_bytes((d / "optimizer.bin").read_bytes()[:-100]),
                  ("F3", "error", S + "optimizer.bin"), "end-of-directory"),
    "empty file": (lambda d: (d / "scheduler.bin").write_bytes(b""), ("F3", "error", S + "scheduler.bin"), "empty"),
    "zero page": (lambda d: (d / "scheduler.bin").write_bytes(bytes(4096)), ("F3", "error", S + "scheduler.bin"), "zero"),
    "weights cut": (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-8]),
                    ("F3", "error", S + "model.safetensors"), "bytes"),
    "lfs pointer": (lambda d: (d / "optimizer.bin").write_text("version https://git-lfs.github.com/spec/v1\noid a:b\n"),
                    ("F3", "error", S + "optimizer.bin"), "Git LFS"),
    "stray": (lambda d: (d / "optimizer.bin.bak").write_bytes(b"x"), ("F1", "error", S + "optimizer.bin.bak"), "stray"),
    "rng of rank 0 gone": (lambda d: (d / "random_states_0.pkl").unlink(), ("F2", "error", "random_states_0.pkl"), "missing"),
    "weights gone": (lambda d: (d / "model.safetensors").unlink(), ("F2", "error", "model.safetensors"), "missing"),
    "same rng": (lambda d: shutil.copy(d / "random_states_0.pkl", d / "random_states_1.pkl"),
                 ("F7", "warn", "."), "same random state"),
    "two schedulers disagree": (lambda d: edit(d / "scheduler.bin", lambda s: s.update(last_epoch=18)),
                                ("F4", "error", S + "custom_checkpoint_0.pkl"), "disagree"),
    "scheduler from zero": (lambda d: [edit(d / n, lambda s: s.update(last_epoch=2))
                                       for n in ("scheduler.bin", "custom_checkpoint_0.pkl")],
                            ("F4", "warn", S + "custom_checkpoint_0.pkl"), "restarted from zero"),
    "edited in one place": (lambda d: [edit(d / n, lambda s: s.update(_last_lr=[1e-9, 1e-9]))
                                       for n in ("scheduler.bin", "custom_checkpoint_0.pkl")],
                            ("F5", "warn", S + "custom_checkpoint_0.pkl"), "only one of them was edited"),
    "moments gone": (lambda d: edit(d / "optimizer.bin", lambda s: s.update(state={})),
                     ("F6", "error", S + "optimizer.bin"), "from zero"),
    "second moments zeroed": (lambda d: edit(d / "optimizer.bin", lambda s: [
        entry["exp_avg_sq"].zero_() for entry in s["state"].values()]),  # type: ignore[attr-defined]
        ("F6", "error", S + "optimizer.bin"), "all zero after 10 steps"),
    "nan in a moment": (lambda d: edit(d / "optimizer.bin", lambda s: s["state"][0]["exp_avg_sq"].fill_(  # type: ignore[index]
        float("nan"))), ("F11", "error", S + "optimizer.bin"), "NaN"),
    "nan lr": (lambda d: edit(d / "optimizer.bin", lambda s: s["param_groups"][0].update(lr=float("nan"))),  # type: ignore[index]
               ("F5", "error", S + "optimizer.bin"), "nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defect_is_a_named_finding(ddp: Path, name: str) -> None:
    """Without a manifest; each finding says what was found and what the way out is."""
    plant, expected, words = DEFECTS[name]
    plant(ddp)
    found = found_in(ddp)
    assert expected in counting(found)
    finding = next(f for f in found if (f.check, f.severity.value, f.path) == expected)
    assert words in finding.message
    assert finding.remedy


@pytest.mark.parametrize("later", [True, False])
def test_a_group_that_was_added_after_the_scheduler_was_made(ddp: Path, later: bool) -> None:
    """A backbone that is thawed: torch's scheduler keeps the base LRs of the groups that it was made with."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.Adam([weights[0]] if later else [{"params": [one]} for one in weights], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    if later:
        optimizer.add_param_group({"params": [weights[1]], "lr": 0.01})
    optimizer.step()
    scheduler.step()
    saved, groups = {**scheduler.state_dict(), "base_lrs": [0.1]}, tuple(optimizer.state_dict()["param_groups"])
    state = CheckpointState(
        checkpoint=open_checkpoint(ddp),
        schedulers=(SchedulerState(file="s.pt", prefix=(), state=saved, owner="prepared"),),
        optimizers=(OptimizerState(file="s.pt", prefix=(), groups=groups, steps=None),),
    )
    assert [one.message.split(",")[0] for one in check_lrs(state)] == ([] if later else ["base_lrs has 1 values"])


def test_optimizer_of_another_step_contradicts_the_name(checkpoints: CheckpointFactory, root: Path) -> None:
    checkpoints.accelerate(root, **SEED)
    for part in ("optimizer.bin", "custom_checkpoint_0.pkl"):
        shutil.copy(root / "opt_step-5/accelerator_state" / part, root / "opt_step-10/accelerator_state" / part)
    found = found_in(root / "opt_step-10/accelerator_state")
    assert ("F4", "warn", ".") in counting(found)


@pytest.mark.parametrize(("optimizer", "dropped"), [("SGD", False), ("RMSprop", True)])
def test_an_optimizer_that_keeps_no_state_has_lost_none(tmp_path: Path, optimizer: str, dropped: bool) -> None:
    model = torch.nn.Linear(4, 2)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    if not dropped:
        model(torch.ones(1, 4)).sum().backward()
        chosen.step()
    torch.save({"model": model.state_dict(), "optimizer": chosen.state_dict(), "step": 5}, tmp_path / "step-5.pt")
    findings = verify_checkpoint(open_checkpoint(tmp_path / "step-5.pt"), full=True)
    assert [f.check for f in findings if f.severity is Severity.ERROR] == (["F6"] if dropped else [])


def test_an_optimizer_without_counters_does_not_contradict_a_counter_of_the_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # counts nothing
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}
    torch.save(states, tmp_path / "step-100.pt")
    findings = verify_checkpoint(open_checkpoint(tmp_path / "step-100.pt"))
    assert not [finding for finding in findings if finding.check == "F4"]


def test_constant_offset_of_one_is_no_finding(checkpoints: CheckpointFactory, root: Path) -> None:
    """The seed's opt_step-1496 holds Adam step 1497."""
    checkpoints.accelerate(root, **SEED)
    (root / "opt_step-10").rename(root / "opt_step-9")
    assert counting(verify_checkpoint(open_checkpoint(root / "opt_step-9"))) == []


def test_skipped_fp16_steps_are_reported_not_refused(checkpoints: CheckpointFactory, root: Path) -> None:
    checkpoints.accelerate(root, **SEED)
    folder = root / "opt_step-10" / "accelerator_state"
    edit(folder / "custom_checkpoint_0.pkl", lambda s: s.update(last_epoch=8, _step_count=9))
    found = found_in(folder)
    assert ("F4", "warn", S + "custom_checkpoint_0.pkl") in counting(found) and passes(found)


def test_manifest_closes_the_inventory(ddp: Path) -> None:
    """Added, vanished, resized and same-size changed files are four different findings."""
    checkpoint = ddp.parent
    write_manifest(checkpoint, step=10)
    manifest = read_manifest(checkpoint)
    assert manifest is not None and compare_manifest(checkpoint, manifest, full=True) == []
    (ddp / "extra.json").write_text("{}")
    (ddp / "scheduler.bin").unlink()
    flip_bit(ddp / "model.safetensors", -1)
    (ddp / "random_states_0.pkl").write_bytes(b"short")
    found = {(f.check, f.path): f for f in compare_manifest(checkpoint, manifest, full=True)}
    assert set(found) == {("F1", S + "extra.json"), ("F1", S + "scheduler.bin"), ("F3", S + "model.safetensors"),
                          ("F1", S + "random_states_0.pkl")}  # fmt: skip
    assert found["F1", S + "extra.json"].severity is Severity.WARN
    quick = {(f.check, f.path) for f in compare_manifest(checkpoint, manifest, full=False)}
    assert quick == set(found) - {("F3", S + "model.safetensors")}


def test_manifest_round_trip_keeps_memory_and_unknown_fields(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    memory = {"step": 3, "groups": [{"lr": 0.1, "initial_lr": None}]}
    written = write_manifest(tmp_path, step=3, memory=memory, run="r", launch=2, more={"future": [1]})
    assert read_manifest(tmp_path) == written
    assert [p.name for p in tmp_path.iterdir()] != [] and not list(tmp_path.glob(".chronicle*"))
    assert written.files[0].crc32 == "8cdc1683"


@pytest.mark.parametrize("text", ["{", "[]", '{"v": 2, "files": []}', '{"v": 1}', '{"v": 1, "files": [3]}'])
def test_damaged_or_foreign_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(UnreadableFile, match=MANIFEST_NAME):
        read_manifest(tmp_path)


def test_manifest_of_another_step_is_a_finding(ddp: Path) -> None:
    write_manifest(ddp.parent, step=11, digests=False)
    assert ("F4", "error", MANIFEST_NAME) in counting(found_in(ddp))


def test_threads_find_the_same_and_report_every_byte(ddp: Path) -> None:
    flip_in_tensor(ddp / "optimizer.bin")
    checkpoint = open_checkpoint(ddp.parent)
    seen: list[int] = []
    with ThreadPoolExecutor(2) as executor:
        parallel = verify_checkpoint(checkpoint, full=True, executor=executor, progress=seen.append)
    assert parallel == verify_checkpoint(checkpoint, full=True)
    assert sum(seen) > 0


def test_equal_random_states_are_what_the_trainer_gives_its_ranks(tmp_path: Path) -> None:
    """It seeds all ranks alike: reported, and no reason to fail; elsewhere it is a warning."""
    checkpoint = healthy(tmp_path)
    for rank in (0, 1):
        (checkpoint / f"rng_state_{rank}.pth").write_bytes((checkpoint / "rng_state.pth").read_bytes())
    (checkpoint / "rng_state.pth").unlink()
    found = [f for f in verify_checkpoint(open_checkpoint(checkpoint)) if f.check == "F7"]
    assert [(f.severity, "same random state" in f.message) for f in found] == [(Severity.INFO, True)]
