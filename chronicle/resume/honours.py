"""What the guard itself carries out of a rollback's contract: warm-up of the LR, batches left out, another order of data.

It says at every save which of the three this run could honour (`honours`), begins at a resume from the contract's
checkpoint, and goes on at every later resume: what was begun travels in the memory of each checkpoint that follows. What
the script declared for itself is the script's. What is asked and nobody can do is a failed check, never left out in silence.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chronicle.resume.contract import Contract, Expectation
from chronicle.resume.data_order import MovedBatches, can_move, can_reshuffle, move_batches, reads_from, take_out
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.memory import Carried, Memory
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.warming import WarmUp, can_warm_up
from rollback.plan.plan_honours import HONOURED, RESHUFFLE, SKIP, WARMUP

__all__ = ["Carrying"]


class Carrying:
    """State of one process. `script`: which of the three the script declared that it carries out itself."""

    def __init__(self, script: Sequence[str]) -> None:
        self._script = frozenset(script)
        self.carried: tuple[Carried, ...] = ()
        self._loader: int | None = None  # which of the loaders the training reads from
        self._moved: list[tuple[Any, MovedBatches]] = []
        self._undone: list[Carried] = []  # moves of the data that wait for their loader
        self._warm_ups: list[WarmUp] = []

    @property
    def used_lr(self) -> float | None:
        """LR of the first group in the last step, where a warm-up made it another than the scheduler's."""
        return self._warm_ups[0].used if self._warm_ups else None

    def add_to(self, memory: Memory, live: LiveState) -> Memory:
        """What a checkpoint must know: what this run could honour, and what has been begun."""
        self._find_loader(live)
        can = self._script | self._can(live, memory.step)
        return replace(
            memory,
            honours=tuple(name for name in HONOURED if name in can),
            carried=self._still_needed(memory.step),
            loader=self._loader,
        )

    def put_back(self) -> None:
        """The groups hold the scheduler's LRs, also when a step has raised half-way."""
        for warm_up in self._warm_ups:
            warm_up.restore()

    def left_undone(self, contract: Contract) -> str:
        """What the contract asks for that is not the script's, in words; "" where nothing is."""
        data = contract.data or {}
        asked = {WARMUP: contract.warmup_steps, SKIP: data.get("skip_batches"), RESHUFFLE: data.get("reshuffle")}
        return ", ".join(name for name, value in asked.items() if value and name not in self._script)

    # ---- at a resume -----------------------------------------------------------------------------------------------

    def loaded(self, expectation: Expectation | None, live: LiveState) -> None:
        """A checkpoint was loaded: take up what it carries, and what the contract asks of this launch."""
        for loader, moved in reversed(self._moved):
            take_out(loader, moved)
        self._moved.clear()
        memory = expectation.memory if expectation else None
        self.carried, self._loader = (memory.carried, memory.loader) if memory else ((), None)
        asked = None if expectation is None else self._asked(expectation, live)
        if asked is not None:
            older = [replace(one, warmup=0) if asked.warmup else one for one in self.carried]
            self.carried = (*older, asked)
        self._undone = [one for one in self.carried if one.skip or one.reshuffle]
        self.move_data(live)

    def move_data(self, live: LiveState) -> None:
        """Change the order of the training's loader, when it is there."""
        loader = self._find_loader(live)
        while loader is not None and self._undone and can_move(loader, reshuffle=self._undone[0].reshuffle):
            one = self._undone.pop(0)
            seed = one.rollback if one.reshuffle else ""
            moved = move_batches(loader, skip=one.skip, seed=seed, step=one.step, accumulation=one.accumulation)
            self._moved.append((loader, moved))

    def first_step(self, expectation: Expectation | None, live: LiveState, start_step: int) -> list[Check]:
        """Right before the first step: begin the warm-up; failed checks for what was asked and is not done."""
        self._find_loader(live)
        warmups = [(one.step, one.warmup) for one in self.carried if start_step < one.step + one.warmup]
        checks = [] if expectation is None else self._left_out(expectation, live, bool(warmups))
        if warmups and not checks and can_warm_up(live.stepping):
            self._warm_ups = [WarmUp(optimizer, warmups, start_step) for optimizer in live.stepping]
        return checks

    def _asked(self, expectation: Expectation, live: LiveState) -> Carried | None:
        """What the contract asks of the guard, if this is its checkpoint."""
        contract = expectation.contract
        if contract is None or any(one.rollback == contract.rollback for one in self.carried):
            return None  # no rollback to this checkpoint, or one that it was saved again under
        step = expectation.memory.step if expectation.memory else None
        data, accumulation = contract.data or {}, int(live.topology.get("accumulation", 1))
        asked = Carried(
            rollback=contract.rollback,
            step=step if step is not None else contract.step or 0,
            warmup=0 if WARMUP in self._script else contract.warmup_steps,
            skip=0 if SKIP in self._script else int(data.get("skip_batches") or 0) * accumulation,
            reshuffle=bool(data.get("reshuffle")) and RESHUFFLE not in self._script,
            accumulation=accumulation,
        )
        return asked if asked.warmup or asked.skip or asked.reshuffle else None

    def _left_out(self, expectation: Expectation, live: LiveState, warms_up: bool) -> list[Check]:
        checks = []
        if warms_up and not can_warm_up(live.stepping) and not expectation.accepts(WARMUP):
            cause = "the script does not carry it out, and the guard cannot in this launch"
            checks.append(_not_done("warm-up of the rollback", "M2", "a lower LR", "optimizer", cause))
        unread = [moved for _, moved in self._moved if not moved.used]
        if (self._undone or unread) and not expectation.accepts("data"):
            cause = (
                "the loader was iterated before the load, or the training reads from another one"
                if unread
                else "this launch has no loader whose order the guard can change"
            )
            checks.append(_not_done("batches of the rollback", "M4", "left out, or reordered", "data loader", cause))
        return checks

    # ---- small readings --------------------------------------------------------------------------------------------

    def _can(self, live: LiveState, step: int | None) -> set[str]:
        can = {WARMUP} if can_warm_up(live.stepping) else set()
        loader = self._find_loader(live)
        if loader is not None and can_move(loader):
            can.add(SKIP)
            if can_reshuffle(loader, step, int(live.topology.get("accumulation", 1))):
                can.add(RESHUFFLE)
        return can

    def _find_loader(self, live: LiveState) -> Any:
        """The loader the training reads from: the only one, else the one seen in use at a step."""
        loaders = live.loaders
        if self._loader is None and len(loaders) == 1:
            self._loader = 0
        if self._loader is None and live.reading is not None:
            self._loader = next((i for i, one in enumerate(loaders) if reads_from(one, live.reading)), None)
        return loaders[self._loader] if self._loader is not None and self._loader < len(loaders) else None

    def _still_needed(self, step: int | None) -> tuple[Carried, ...]:
        """A warm-up that is over is forgotten; data that was left out never is."""
        return tuple(
            one for one in self.carried if one.skip or one.reshuffle or step is None or step < one.step + one.warmup
        )


def _not_done(name: str, code: str, expected: str, where: str, cause: str) -> Check:
    return failed(name, code, expected=expected, found="not carried out", where=where, cause=cause)
