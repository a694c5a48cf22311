"""What is not understood is never called proved: unknown writers, subclasses, odd optimizers, states made at random."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as L

from chronicle.checkpoints import LR_NOT_AS_PROMISED
from chronicle.cli.main import run
from chronicle.journal import JournalWriter
from chronicle.journal.events import Incident
from chronicle.paths import RunPaths
from chronicle.watch.advice import collect_candidates
from rollback.checkpoint.listing import open_checkpoint, read_state
from rollback.errors import PlanRefused, RollbackError
from rollback.files.config_text import ConfigFile
from rollback.lr.authority import Evidence, lr_doubts
from rollback.lr.rules import infer_scheduler_class
from rollback.plan.lr import plan_lr_edits
from rollback.plan.request import RollbackRequest
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, SchedulerCase, build, lrs, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HALF = RollbackRequest(step=10, lr_scale=0.5)


def saved(tmp_path: Path, name: str = "cosine", **more: Any) -> Path:
    """A checkpoint of a script: model, optimizer, step and `more`; the scheduler where `more` has none."""
    model, optimizer, scheduler = build((COMPUTED | FUNCTIONS)[name])
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    path = tmp_path / "checkpoints" / "ckpt.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10}
    torch.save(content | ({"scheduler": scheduler.state_dict()} | more), path)
    return path


def doubts(path: Path, **evidence: Any) -> str:
    found = lr_doubts(read_state(open_checkpoint(path)), 0.5, Evidence(**evidence))
    return " | ".join(f"{doubt.seen} => {doubt.change}" for doubt in found)


@pytest.mark.parametrize("name", [*COMPUTED, *FUNCTIONS])
def test_schedulers_of_torch_that_were_saved_leave_no_doubt(name: str, tmp_path: Path) -> None:
    assert doubts(saved(tmp_path, name)) == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scheduler": None}, "no scheduler was saved"),
        ({"scheduler": None, "config": {"learning_rate": 6e-4}}, "saved with `config.learning_rate` 0.0006"),
        ({"scheduler": None, "args": {"lr": 0.2, "epochs": 3}}, "saved with `args.lr` 0.2"),
        ({"scheduler": {"last_epoch": 10}}, "holds a counter alone"),
        ({"scheduler": {"phase": 3, "rate": 0.1}}, "looks like the state of a scheduler of an unknown class"),
        ({"lr_schedule": {"n": 10}}, "`ckpt.pt:lr_schedule` looks like the state of a scheduler"),
        ({"warmup": [{"last_step": 4}]}, "`ckpt.pt:warmup.0` looks like"),
        ({"scheduler": None, "extra": {"base_values": [0.1], "t": 3}}, "`ckpt.pt:extra` looks like"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_with_what_to_change(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **more)
    assert words in doubts(path)
    with pytest.raises(PlanRefused, match="not proved to follow from this checkpoint"):
        plan_lr_edits(HALF, read_state(open_checkpoint(path)), None)


def test_the_argument_is_quoted_from_the_command_of_the_newest_launch(tmp_path: Path) -> None:
    path = saved(tmp_path, scheduler=None)
    said = doubts(path, argv=("python", "train.py", "--lr", "1e-3", "optim.min_lr=1e-4", "--lr-decay-iters", "100"))
    assert "`--lr 1e-3` → `--lr 0.0005`, `optim.min_lr=1e-4` → `optim.min_lr=5e-05`" in said
    assert "--lr-decay-iters 100`" in said and "decay-iters 50" not in said


@pytest.mark.parametrize(
    "line",
    ["for g in opt.param_groups: g['lr'] = args.lr", 'group["lr"] *= 0.1', "g.update(lr=args.lr)", 'g.update({"lr": lr})'],
)
def test_a_script_that_sets_the_lr_itself_contradicts_a_saved_scheduler(line: str, tmp_path: Path) -> None:
    """`for g in opt.param_groups: g["lr"] = args.lr` after the load: the file cannot tell, the launch's own text does."""
    path = saved(tmp_path)
    script = ConfigFile(path="/run/train.py", text=f"import torch\n{line}  # anneal\n", origin="from the command")
    assert "sets the LR of its parameter groups itself: `/run/train.py` line 2" in doubts(path, files=(script,))
    assert doubts(path, files=(script,), memory={"lr_source": "scheduler", "schedulers": [{}]}) == ""  # a guard saw otherwise
    harmless = """# g["lr"] = 1\nprint(g["lr"] == 1)\nlr = g["lr"]\nlog.update(step=1)\n"""
    assert doubts(path, files=(ConfigFile(path="/run/train.py", text=harmless, origin=""),)) == ""


def test_a_promise_that_a_launch_has_not_kept_is_a_doubt_until_it_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the log of a launch showed after an earlier rollback is known of the next one too."""
    path = saved(tmp_path)
    with JournalWriter(RunPaths(tmp_path / "logs" / "r")) as writer:
        event = Incident(kind=LR_NOT_AS_PROMISED, tier="warn", status="open", launch=2, text="expected 1, found 2")
        incident = writer.write(event, step=11, title="warn: expected 1, found 2")
    words = ["--run", "r", "--logs", str(tmp_path / "logs")]
    half = ["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", "--checkpoints", str(path.parent), *words]
    assert run(half) == 3
    said = capsys.readouterr().err
    assert "has not kept the LR of an earlier rollback: expected 1, found 2" in said
    assert f"`chronicle note --close {incident.id} --outcome worked`" in said
    assert run(["close", incident.id, "--outcome", "worked", "it loads its scheduler now", *words]) == 0
    assert run(half) == 0
    assert "assumed     CosineAnnealingLR is its library's own class" in capsys.readouterr().out


def test_a_proposal_knows_what_the_checkpoint_cannot_carry(tmp_path: Path) -> None:
    """Its command must be one that the rollback does not refuse."""
    known, unknown = saved(tmp_path / "a"), saved(tmp_path / "b", scheduler=None)
    found = [collect_candidates([path.parent], before=10**6)[-1] for path in (known, unknown)]
    assert [one.verified for one in found] == [True, True]
    assert found[0].lr_elsewhere == "" and "no scheduler was saved" in found[1].lr_elsewhere


def test_an_optimizer_that_no_scheduler_is_at_is_a_doubt(tmp_path: Path) -> None:
    model, optimizer, scheduler = build(COMPUTED["cosine"])
    other = torch.optim.SGD(model.parameters(), lr=0.3)
    train_step(model, optimizer, scheduler)
    path = tmp_path / "ckpt.pt"
    torch.save({"a": optimizer.state_dict(), "b": other.state_dict(), "s": scheduler.state_dict(), "step": 1}, path)
    assert "no saved scheduler is at the LRs of the optimizer in `ckpt.pt:b` (0.3)" in doubts(path)


def test_a_class_that_does_not_give_the_saved_lr_is_a_doubt(tmp_path: Path) -> None:
    """A subclass without state of its own has the fields of its parent, and is told by what it computed."""

    class Halved(L.CosineAnnealingLR):
        def get_lr(self) -> list[float]:
            return [base * 0.5**self.last_epoch for base in self.base_lrs]

    model, optimizer, scheduler = build(lambda o: Halved(o, 60))
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    path = tmp_path / "ckpt.pt"
    torch.save({"optimizer": optimizer.state_dict(), "s": scheduler.state_dict()}, path)
    assert "CosineAnnealingLR would be at" in doubts(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Rprop(p, lr=0.1), "Rprop uses `lr` for its first step only"),
        (lambda p: torch.optim.ASGD(p, lr=0.1), "`state.*.eta`"),
        (lambda p: _with_fields(p, d=1e-6, d0=1e-6), "Prodigy or D-Adaptation"),
        (lambda p: _with_fields(p, weight_sum=1.0, lr_max=0.1), "schedule-free"),
        (lambda p: _with_fields(p, lr=None, relative_step=True), "Adafactor computes its step"),
        (lambda p: _with_fields(p, lr=None), "the group's `lr` is None"),
        (lambda p: _with_fields(p, base_lr=0.1), "the group holds `base_lr` 0.1"),
    ],
)
def test_optimizers_that_step_by_something_else_are_named(make: Any, words: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 1)
    optimizer = make(layer.parameters())
    scheduler = L.LambdaLR(torch.optim.SGD(layer.parameters(), lr=0.1), lambda n: 1.0)
    path = tmp_path / "ckpt.pt"
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path)
    assert words in doubts(path)


def _with_fields(parameters: Any, **fields: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.param_groups[0].update(fields)
    return optimizer


def test_accepted_without_proof_it_is_edited_recorded_and_held(tmp_path: Path) -> None:
    import json

    path = saved(tmp_path, scheduler=None)
    words = ["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", "--run", "r", "--logs", str(tmp_path / "logs")]
    words += ["--checkpoints", str(path.parent)]
    assert run(words) == 3
    before = torch.load(path, weights_only=False)["optimizer"]["param_groups"][0]["lr"]
    assert run([*words, "--accept-unproved", "the next launch has --lr 5e-4"]) == 0
    assert torch.load(path, weights_only=False)["optimizer"]["param_groups"][0]["lr"] == before / 2
    contract = json.loads((tmp_path / "logs" / "r" / "contract.json").read_text())
    assert "no scheduler was saved" in contract["lr_unproved"][0]
    journal = "".join(p.read_text() for p in (tmp_path / "logs" / "r").rglob("*.jsonl"))
    assert '"accept_unproved":"the next launch has --lr 5e-4"' in journal.replace('": "', '":"')


# --- a hundred states made at random

_KEYS = ("gamma", "T_max", "eta_min", "factor", "total_iters", "warmup", "n", "phase", "peak_lr", "_own", "best", "power")


def _random_state(chance: random.Random) -> dict[str, Any]:
    """The state of a torch scheduler with one thing changed: a field more, a field renamed, a value of another kind."""
    name = chance.choice([*COMPUTED, *FUNCTIONS])
    model, optimizer, scheduler = build((COMPUTED | FUNCTIONS)[name])
    for _ in range(3):
        train_step(model, optimizer, scheduler)
    state = dict(scheduler.state_dict())
    extra = chance.choice([chance.randint(1, 9), chance.random(), {"a": 1}, torch.tensor([1.0, 2.0]), [0.1], "text", True])
    how = chance.choice(["more", "renamed", "none"])
    if how == "more":
        state[chance.choice([k for k in _KEYS if k not in state])] = extra
    elif how == "renamed":
        own = [k for k in state if k not in ("base_lrs", "last_epoch", "_last_lr", "_step_count", "_is_initial", "verbose")]
        key = chance.choice([k for k in own if not k.startswith("_get_lr")] or ["last_epoch"])
        state["renamed_" + key] = state.pop(key)
    return {"how": how, "state": state, "optimizer": optimizer.state_dict(), "true": name}


@pytest.mark.parametrize("seed", range(5))
def test_states_made_at_random_are_never_named_as_another_class(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for index in range(20):
        made = _random_state(chance)
        path = tmp_path / f"{index}.pt"
        torch.save({"optimizer": made["optimizer"], "lr_scheduler": made["state"], "step": 3}, path)
        state = read_state(open_checkpoint(path))
        if made["how"] == "none":
            assert lr_doubts(state, 0.5) == (), made["true"]
            continue
        whole = [s for s in state.schedulers if s.prefix == ("lr_scheduler",)]
        assert all(infer_scheduler_class(s.state) is None for s in whole), made
        assert lr_doubts(state, 0.5), made


class Floored(L.StepLR):
    """All fields of its parent, and another formula once the floor is reached."""

    def get_lr(self) -> list[float]:
        return [max(float(lr), 9e-4) for lr in super().get_lr()]


class Squared(L.CosineAnnealingLR):
    """All fields of its parent, and another formula."""

    def get_lr(self) -> list[float]:
        return [base * (0.5 + 0.5 * math.cos(math.pi * self.last_epoch / self.T_max)) ** 2 + 1e-5 for base in self.base_lrs]


class Shifted(L.ExponentialLR):
    """All fields of its parent, and LRs of its own."""

    def get_lr(self) -> list[float]:
        return [3e-4 * self.gamma**self.last_epoch for _ in self.base_lrs]


SUBCLASSES: dict[str, SchedulerCase] = {
    "floored": lambda o: Floored(o, 2, 0.5), "squared": lambda o: Squared(o, 60), "shifted": lambda o: Shifted(o, 0.97),
}  # fmt: skip
EVERY = COMPUTED | FUNCTIONS | SUBCLASSES


def _changed(chance: random.Random, how: str, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Change one thing of a scheduler's state, or of the optimizer's groups, in place."""
    own = [k for k in state if k not in ("base_lrs", "last_epoch", "_last_lr", "_step_count", "_is_initial", "verbose")]
    field = chance.choice([k for k in own if not k.startswith("_get_lr")] or ["last_epoch"])
    if how == "removed":
        del state[field]
    elif how == "another kind":
        state[field] = chance.choice(["7", None, torch.tensor(7.0), [3], {"a": 3}, -5, 1e9, 7.0, True])
    elif how == "merged":
        state |= {**build(EVERY[chance.choice(list(COMPUTED))])[2].state_dict(), **state}
    elif how == "bases":
        bases: list[Any] = [[1e-3], torch.tensor([1e-3, 5e-4]), [1e-3, 5e-4, 1e-4], [2e-3, 1e-3], [0.0, 0.0]]
        state["base_lrs"] = chance.choice([*bases, [math.nan] * 2, None])
    elif how == "counter":
        state["last_epoch"] = chance.choice([0, -1, 500, 2.5, None])
    elif how == "last":
        state["_last_lr"] = [2 * lr for lr in state["_last_lr"]]
    elif how == "groups":
        for group in groups:
            group["lr"] *= 3


def _with(tree: Any, keys: tuple[Any, ...], value: float) -> None:
    for key in keys[:-1]:
        tree = tree[key]
    tree[keys[-1]] = torch.tensor(value) if isinstance(tree[keys[-1]], torch.Tensor) else value


def _next_lrs(name: str, content: dict[str, Any]) -> list[tuple[float, ...]]:
    """The LRs of 25 steps of a launch that loads what was saved into the class that saved it."""
    model, optimizer, scheduler = build(EVERY[name])
    optimizer.load_state_dict(copy.deepcopy(content["optimizer"]))
    scheduler.load_state_dict(copy.deepcopy(content["scheduler"]))
    rows = []
    for _ in range(25):
        rows.append(lrs(optimizer))
        train_step(model, optimizer, scheduler)
    return rows


@pytest.mark.parametrize("how", ["none", "removed", "another kind", "merged", "bases", "counter", "last", "groups", "second"])
def test_what_is_proved_of_states_made_at_random_comes_true(how: str, tmp_path: Path) -> None:
    """Whatever is accepted is loaded by the class that saved it: half of the old LRs, and those of the forecast."""
    chance = random.Random(how)
    for index in range(12):
        name = list(SUBCLASSES)[index] if index < len(SUBCLASSES) else chance.choice(list(EVERY))
        model, optimizer, scheduler = build(EVERY[name])
        for _ in range(num_steps := chance.choice([5, 8, 14])):
            train_step(model, optimizer, scheduler)
        content = {"optimizer": optimizer.state_dict(), "scheduler": dict(scheduler.state_dict()), "step": num_steps}
        content = copy.deepcopy(content)
        _changed(chance, how, content["scheduler"], content["optimizer"]["param_groups"])
        if how == "second":
            content["other_scheduler"] = build(EVERY[chance.choice(list(COMPUTED))])[2].state_dict()
        torch.save(content, path := tmp_path / f"{index}.pt")
        request = RollbackRequest(step=num_steps, lr_scale=0.5)
        try:
            plan = plan_lr_edits(request, read_state(open_checkpoint(path)), None)
        except RollbackError:
            assert how != "none" or name in SUBCLASSES, name
            continue
        assert name not in SUBCLASSES, (how, name)
        edited = copy.deepcopy(content)
        for edit in plan.edits:
            _with(edited, edit.keys, edit.after)
        try:
            before, after = _next_lrs(name, content), _next_lrs(name, edited)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # torch cannot go on from it either
        for old, new, foretold in zip(before, after, plan.expected.next_lrs or after, strict=False):
            assert new == pytest.approx([lr / 2 for lr in old], rel=1e-9, abs=1e-15), (how, name)
            assert new == pytest.approx(list(foretold), rel=1e-6, abs=1e-15), (how, name)


# --- Megatron's directories, single files, an LR saved as an integer, and what a killed process left


def megatron_run(tmp_path: Path, layout: str) -> Path:
    """Two checkpoints in the layout of `megatron/training/checkpointing.py`, and the tracker of the newest."""
    from argparse import Namespace

    root = tmp_path / "checkpoints"
    model, optimizer, scheduler = build(COMPUTED["cosine"])
    del scheduler
    for step in range(1, 21):
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10:
            continue
        state = {"max_lr": 1e-3, "min_lr": 1e-5, "num_steps": step, "lr_decay_style": "cosine",
                 "lr_decay_steps": 100, "lr_warmup_steps": 0}  # fmt: skip
        arguments = Namespace(lr=1e-3, min_lr=1e-5, use_checkpoint_opt_param_scheduler=True,
                              override_opt_param_scheduler=False, lr_warmup_init=0.0)  # fmt: skip
        content = {"args": arguments, "iteration": step, "opt_param_scheduler": state, "optimizer": optimizer.state_dict()}
        folder = root / f"iter_{step:07d}"
        path = folder / ("mp_rank_00/model_optim_rng.pt" if layout == "torch" else "common.pt")
        path.parent.mkdir(parents=True)
        if layout == "torch_dist":
            import torch.distributed.checkpoint as dcp

            dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder))
        torch.save(content | ({"model": model.state_dict()} if layout == "torch" else {}), path)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    return root


@pytest.mark.parametrize("layout", ["torch", "torch_dist"])
def test_megatron_goes_back_with_its_tracker(layout: str, tmp_path: Path) -> None:
    root = megatron_run(tmp_path, layout)
    file = root / "iter_0000010" / ("mp_rank_00/model_optim_rng.pt" if layout == "torch" else "common.pt")
    before = torch.load(file, weights_only=False)
    places = ["--run", "r", "--logs", str(tmp_path / "logs"), "--checkpoints", str(root)]
    assert run(["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *places]) == 0
    after = torch.load(file, weights_only=False)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert not (root / "iter_0000020").exists()
    for name in ("max_lr", "min_lr"):
        assert after["opt_param_scheduler"][name] == before["opt_param_scheduler"][name] / 2
    assert after["optimizer"]["param_groups"][0]["lr"] == before["optimizer"]["param_groups"][0]["lr"] / 2
    assert run(["undo", "--yes", "--run", "r", "--logs", str(tmp_path / "logs")]) == 0
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_a_single_file_is_read_as_what_it_is(tmp_path: Path) -> None:
    _, optimizer, scheduler = build(COMPUTED["step"])
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert len(read_state(open_checkpoint(tmp_path / "scheduler.pt")).schedulers) == 1
    assert len(read_state(open_checkpoint(tmp_path / "optimizer.pt")).optimizers) == 1


def test_an_lr_saved_as_an_integer_is_scaled(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1)
    scheduler = L.LambdaLR(optimizer, lambda n: 1)
    root = tmp_path / "checkpoints"
    root.mkdir()
    content = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": 10}
    torch.save(content, root / "ckpt.pt")
    places = ["--run", "r", "--logs", str(tmp_path / "logs"), "--checkpoints", str(root)]
    assert run(["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *places]) == 0
    edited = torch.load(root / "ckpt.pt", weights_only=False)
    assert edited["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert edited["scheduler"]["base_lrs"] == [0.5]
