"""State that moves and that nobody registered is named at the first save; what is in a file, or is none, is not."""

import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.unregistered import Evidence


class Average:
    """Copies of the weights in a dict, as many scripts keep them."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)


class Wrapper(nn.Module):
    """Holds the model that is guarded, and rows that move with it, as DDP does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.rows = {name: torch.zeros(3) for name in ("a", "b")}

    def update(self) -> None:
        self.rows = {name: row + 1 for name, row in self.rows.items()}


class Patience:
    def __init__(self) -> None:
        self.best, self.bad = 9.5, 0

    def update(self) -> None:
        self.best, self.bad = self.best - 1.25, self.bad + 1


class Normaliser:
    def __init__(self) -> None:
        self.mean = np.zeros(4)

    def update(self) -> None:
        self.mean += 0.25


class Meter:
    def __init__(self) -> None:
        self.total, self.mean = 0.0, torch.zeros(4)

    def reset(self) -> None:
        """What can be reset is not meant to last."""

    def update(self) -> None:
        self.total, self.mean = self.total + 1.5, self.mean + 1


class Engine(nn.Module):
    """A wrapper of the model, with numbers of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.norm = model, torch.ones(4)

    def update(self) -> None:
        self.norm = self.norm + 1


class Log:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def update(self) -> None:
        self.rows.append({"loss": 0.5})


def train(top: Path, monkeypatch: pytest.MonkeyPatch, objects: Callable[[nn.Module], dict[str, Any]], **also: Any) -> Any:
    """Four steps, a save, one step; what the script's own objects are called, and what is saved beside the model."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    things = objects(model)
    vars(main).update(things)
    run = chronicle.attach(str(top / "logs" / "r"), model, optimizer)
    path, start = top / "ck" / "last.pt", 0
    path.parent.mkdir(exist_ok=True)
    if also.get("resume"):
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = 4
    for step in range(start, start + 5 if not start else start + 1):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for thing in things.values():
            if isinstance(thing, Average):
                thing.update(model)
            elif isinstance(thing, Patience):
                if step == 3:
                    thing.update()
            elif isinstance(thing, deque):
                thing.append((torch.randn(4), 0.5))
            elif hasattr(thing, "update"):
                thing.update()
        if step == 3:
            more = also["save"](things) if "save" in also else {}
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    run.session.unregistered.settle()
    return things


def said(top: Path) -> list[str]:
    journal = read_journal(RunPaths(top / "logs" / "r"))
    return [one.data["text"] for one in journal.of_kind("incident") if one.data["kind"] == "state-not-saved"]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        (lambda model: {"ema": Average(model)}, "`ema` (Average) moves and is in no file of this checkpoint: shadow"),
        (lambda model: {"stop": Patience()}, "`stop` (Patience) moves and is in no file of this checkpoint: best, bad"),
        (lambda model: {"norm": Normaliser()}, "`norm` (Normaliser) moves and is in no file of this checkpoint: mean"),
        (lambda model: {"replay": deque(maxlen=9)}, "`replay` (deque) moves and is in no file of this checkpoint: its content"),
    ],
)
def test_what_moves_and_is_in_no_file_is_named_once(
    objects: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, monkeypatch, objects)
    assert said(tmp_path) == [words]
    assert capsys.readouterr().err.count("not saved:") == 1


@pytest.mark.parametrize(
    ("objects", "save"),
    [
        (lambda model: {"ema": Average(model)}, lambda things: {"ema": things["ema"].shadow}),
        (lambda model: {"ema": Average(model)}, lambda things: {"h": [t.half() for t in things["ema"].shadow.values()]}),
        (lambda model: {"stop": Patience()}, lambda things: {"least": things["stop"].best}),
        (lambda model: {"norm": Normaliser()}, lambda things: {"statistics": things["norm"].mean}),
        (lambda model: {"meter": Meter(), "log": Log(), "np": np, "engine": Engine(model)}, lambda things: {}),
    ],
)
def test_what_is_in_a_file_or_is_no_state_is_not_named(
    objects: Any, save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, monkeypatch, objects, save=save)
    assert said(tmp_path) == []


class Odd:
    """Its array cannot be read: `shape` and `dtype` without values."""

    class Nothing:
        shape, dtype = (4,), "float32"

    def __init__(self) -> None:
        self.mean = Odd.Nothing()


def test_an_object_that_cannot_be_looked_at_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, monkeypatch, lambda model: {"odd": Odd(), "stop": Patience()})
    assert said(tmp_path) == ["`stop` (Patience) moves and is in no file of this checkpoint: best, bad"]
    kinds = [one.data["kind"] for one in read_journal(RunPaths(tmp_path / "logs" / "r")).of_kind("incident")]
    assert kinds.count("state-not-read") == 1 and capsys.readouterr().err.count("`odd` cannot be looked at") == 1


class Late(Odd):
    """It can be read from its first update on, and moves."""

    def update(self) -> None:
        self.mean = np.zeros(4) if isinstance(self.mean, Odd.Nothing) else self.mean + 0.25


def test_what_could_not_be_looked_at_once_is_still_named_when_it_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, monkeypatch, lambda model: {"late": Late()})
    assert said(tmp_path) == ["`late` (Late) moves and is in no file of this checkpoint: mean"]


@pytest.mark.parametrize("restores", [False, True])
def test_a_resume_says_what_is_not_as_it_was(restores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(model: nn.Module) -> dict[str, Any]:
        stop = Patience()
        if restores:
            stop.update()
        return {"stop": stop}

    train(tmp_path, monkeypatch, lambda model: {"stop": Patience()}, save=lambda things: {})
    train(tmp_path, monkeypatch, again, resume=True)
    (verdict,) = [one.data for one in read_journal(RunPaths(tmp_path / "logs" / "r")).of_kind("guard.verdict")][-1:]
    row = next(check for check in verdict["checks"] if check["name"] == "state of `stop`")
    assert (verdict["verdict"], row["outcome"]) == (("passed", "equal") if restores else ("unverified", "not compared"))
    assert restores or "best 8.25 → 9.5" in row["cause"]


def test_files_that_cannot_be_searched_name_nobody(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "packed.npz", mean=np.ones(4))
    assert not Evidence([tmp_path]).is_whole
    (tmp_path / "packed.npz").unlink()
    np.savez(tmp_path / "plain.npz", mean=np.full(4, 0.25))
    assert not Evidence([tmp_path / "plain.npz", tmp_path / "gone.pt"]).is_whole  # sent away, and removed here
    found = Evidence([tmp_path])
    assert found.is_whole and found.holds([np.full(4, 0.25).tobytes()]) and not found.holds([np.full(4, 0.5).tobytes()])


def test_a_wrapper_of_the_model_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, monkeypatch, lambda model: {"net": Wrapper(model)})
    assert not said(tmp_path)
