"""Options of a rollback that the guard applies while training: warm-up of the LR, skipped batches, another order of data.

At every save the guard records which of the three this run supports (`honours`). It begins at a resume from the contract's
checkpoint and continues at every later resume, because the memory of each later checkpoint records what was begun
(`carried`). Options that the script declared for itself are left to the script. An option that nobody can apply is a
failed check.

Batches are not left out of one epoch, which would then be shorter than every counter believes. The whole stream moves up:
an epoch keeps its length and ends with the first batches of the next, so a trainer that finds its place by steps, by epochs
or by counting finds the same batch after a later resume. That needs an order that is a function of the epoch: samplers
that are sequential or seeded by epoch. A loader that keeps its own place (`PlanLoader` of `chronicle.data`) is asked to leave
them out itself, when it is read next; its state records that, so a later resume does not do it again.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice
from typing import Any

from chronicle.resume.checks.check import Check, failed
from chronicle.resume.contract import Contract, Expectation
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.learning_rate import number, warmed
from chronicle.resume.memory import Carried, Memory
from chronicle.resume.patches import change_object
from chronicle.resume.training import is_within_its_step
from rollback.plan.request import HONOURED, RESHUFFLE, SKIP, WARMUP

BY_EPOCH = ("SeedableRandomSampler", "DistributedSampler")
ADVANCES_ITSELF = "SeedableRandomSampler"  # Accelerate's: at the end of a pass it moves to the next epoch
BATCHES = ("BatchSampler", "BatchSamplerShard", "MovedBatches")


class Honours:
    """State of one process. `script`: which of the three the script declared that it applies itself."""

    def __init__(self, script: Sequence[str]) -> None:
        self._script = frozenset(script)
        self.carried: tuple[Carried, ...] = ()
        self._loader: int | None = None  # which of the loaders the training reads from
        self._moved: list[tuple[Any, Any]] = []  # (loader, `MovedBatches` or what the loader gave)
        self._pending: list[Carried] = []  # changes of the data that wait for their loader
        self._warm_ups: list[WarmUp] = []

    @property
    def used_lr(self) -> float | None:
        """LR of the first group in the last step, if a warm-up made it another than the scheduler's."""
        return self._warm_ups[0].used if self._warm_ups else None

    def add_to(self, memory: Memory, live: LiveState) -> Memory:
        """Add what a checkpoint must record: which options this run supports, and what has been begun."""
        self._find_loader(live)
        can = self._script | self._supported(live, memory.step)
        return replace(
            memory,
            honours=tuple(name for name in HONOURED if name in can),
            carried=self._still_needed(memory.step),
            loader=self._loader,
        )

    def restore_lrs(self) -> None:
        """Give the groups the scheduler's LRs back, in case a step raised half-way."""
        for warm_up in self._warm_ups:
            warm_up.restore()

    def not_by_script(self, contract: Contract) -> str:
        """Names of the contract's options that the script does not apply itself; "" when there are none."""
        data = contract.data or {}
        asked = {WARMUP: contract.warmup_steps, SKIP: data.get("skip_batches"), RESHUFFLE: data.get("reshuffle")}
        return ", ".join(name for name, value in asked.items() if value and name not in self._script)

    # ---- at a resume ---------------------------------------------------------------------------------------------

    def loaded(self, expectation: Expectation | None, live: LiveState) -> None:
        """A checkpoint was loaded: continue what it records as begun, and begin what the contract asks for."""
        for loader, moved in reversed(self._moved):
            take_out(loader, moved)
        self._moved.clear()
        memory = expectation.memory if expectation else None
        self.carried, self._loader = (memory.carried, memory.loader) if memory else ((), None)
        asked = None if expectation is None else self._asked(expectation, live)
        if asked is not None:
            older = [replace(one, warmup=0) if asked.warmup else one for one in self.carried]
            self.carried = (*older, asked)
        self._pending = [one for one in self.carried if one.skip or one.reshuffle]
        self.move_data(live)

    def move_data(self, live: LiveState) -> None:
        """Change the order of the training's loader, once there is one."""
        loader = self._find_loader(live)
        while loader is not None and self._pending and can_move(loader, reshuffle=self._pending[0].reshuffle):
            one = self._pending.pop(0)
            if keeps_place(loader):
                change = loader.change_when_read(one.rollback, batches=one.skip, reshuffle=one.reshuffle)
                self._moved.append((loader, change))
                continue
            seed = one.rollback if one.reshuffle else ""
            moved = move_batches(loader, skip=one.skip, seed=seed, step=one.step, accumulation=one.accumulation)
            self._moved.append((loader, moved))

    def begin(self, expectation: Expectation | None, live: LiveState, start_step: int) -> list[Check]:
        """Right before the first step: begin the warm-up. Returns a failed check for each option that cannot be applied."""
        self._find_loader(live)
        warmups = [(one.step, one.warmup) for one in self.carried if start_step < one.step + one.warmup]
        checks = [] if expectation is None else self._impossible(expectation, live, bool(warmups))
        for earlier in self._warm_ups:
            earlier.cancel()  # of a load before this one: its hooks stay on the optimizer
        if warmups and not checks and can_warm_up(live.stepping):
            self._warm_ups = [WarmUp(optimizer, warmups, start_step) for optimizer in live.stepping]
        return checks

    def _asked(self, expectation: Expectation, live: LiveState) -> Carried | None:
        """What the contract asks of the guard, if this is its checkpoint."""
        contract = expectation.contract
        if contract is None or any(one.rollback == contract.rollback for one in self.carried):
            return None  # no rollback to this checkpoint, or its options were begun before the checkpoint was saved
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

    def _impossible(self, expectation: Expectation, live: LiveState, warms_up: bool) -> list[Check]:
        checks = []
        if warms_up and not can_warm_up(live.stepping) and not expectation.accepts(WARMUP):
            cause = "the script does not apply it, and the guard cannot in this launch"
            checks.append(_not_applied("warm-up of the rollback", "M2", "a lower LR", "optimizer", cause))
        unread = [moved for _, moved in self._moved if not moved.used]
        if (self._pending or unread) and not expectation.accepts("data"):
            cause = (
                "the loader was iterated before the load, or the training reads from another one"
                if unread
                else "this launch has no loader whose order the guard can change"
            )
            checks.append(_not_applied("batches of the rollback", "M4", "left out, or reordered", "data loader", cause))
        return checks

    # ---- what this launch supports -------------------------------------------------------------------------------

    def _supported(self, live: LiveState, step: int | None) -> set[str]:
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
        keeping = [number for number, one in enumerate(loaders) if keeps_place(one)]
        if len(keeping) == 1 and (live.reading is None or live.reading is loaders[keeping[0]]):
            self._loader = keeping[0]  # made after the others, such as one of held-out data
        if self._loader is None and live.reading is not None:
            self._loader = next((i for i, one in enumerate(loaders) if reads_from(one, live.reading)), None)
        return loaders[self._loader] if self._loader is not None and self._loader < len(loaders) else None

    def _still_needed(self, step: int | None) -> tuple[Carried, ...]:
        """Skipped and reordered batches are recorded for good; a warm-up only until it is over."""
        return tuple(
            one for one in self.carried if one.skip or one.reshuffle or step is None or step < one.step + one.warmup
        )


def _not_applied(name: str, code: str, expected: str, where: str, cause: str) -> Check:
    return failed(name, code, expected=expected, found="not applied", where=where, cause=cause)


# ---- warm-up: the step runs with a lower LR, which is removed right after it -----------------------------------------


def can_warm_up(optimizers: Sequence[Any]) -> bool:
    """Whether every optimizer has a `step` to wrap and an LR in every group."""
    return bool(optimizers) and all(
        hasattr(one, "step") and all(number(group.get("lr")) is not None for group in one.param_groups)
        for one in optimizers
    )


class WarmUp:
    """One optimizer whose next steps run under `warmups`; `step`: how many it has completed.

    The lower LR is set right before the step and removed right after it, so that neither a scheduler that multiplies the
    group's LR nor a checkpoint contains it.
    """

    def __init__(self, optimizer: Any, warmups: Sequence[tuple[int, int]], step: int) -> None:
        self._optimizer, self._warmups, self._step = optimizer, tuple(warmups), step
        self._kept: list[tuple[dict[str, Any], Any]] = []  # groups and what their LR was, during a step
        self.used: float | None = None  # LR of the first group in the last step; None if it was the scheduler's
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(lambda *_: None if is_within_its_step(optimizer) else self._lower())
            optimizer.register_step_post_hook(lambda *_: None if is_within_its_step(optimizer) else self._finish())
        else:
            change_object(optimizer, "step", self._around(optimizer.step))  # ZeRO's steps its inner optimizer group by group

    def restore(self) -> None:
        """Restore the LRs that a step left lowered because it raised."""
        while self._kept:
            group, lr = self._kept.pop()
            if hasattr(group["lr"], "copy_"):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr

    def cancel(self) -> None:
        """Lower nothing any more."""
        self.restore()
        self._warmups, self.used = (), None

    def _lower(self) -> None:
        self.restore()
        self.used = None
        if not any(first <= self._step < first + count for first, count in self._warmups):
            return
        done: set[int] = set()  # groups may share one tensor
        for group in self._optimizer.param_groups:
            lr = group["lr"]
            if not hasattr(lr, "copy_"):
                self._kept.append((group, lr))
                group["lr"] = warmed(lr, self._step, self._warmups)
            elif id(lr) not in done:
                done.add(id(lr))
                self._kept.append((group, lr.clone()))
                lr.copy_(warmed(lr, self._step, self._warmups))
        self.used = float(self._optimizer.param_groups[0]["lr"])

    def _finish(self) -> None:
        self.restore()
        self._step += 1

    def _around(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._lower()
            try:
                return original(*args, **kwargs)
            finally:
                self._finish()

        return step


# ---- batches: some skipped, the rest of an epoch in another order ----------------------------------------------------


class MovedBatches:
    """Replaces a batch sampler: its stream without the next `skip` batches, and epoch `epoch` shuffled from `begin` on.

    `seed` determines the order; "" keeps it. Every other attribute is the inner sampler's.
    """

    def __init__(self, inner: Any, *, skip: int = 0, seed: str = "", epoch: int = 0, begin: int = 0) -> None:
        self.inner, self.skip = inner, skip
        self._seed, self._epoch, self._begin = seed, epoch, begin
        self.used = False  # whether it was iterated

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self.used = True
        epoch = _epoch_of(self.inner)
        whole, rest = divmod(self.skip, len(self.inner))
        batches: Iterator[Any] = chain(self._part(epoch, whole, rest, None), self._part(epoch, whole + 1, 0, rest))
        if self._seed and epoch == self._epoch:
            batches = iter(self._shuffled(list(batches)))
        yield from batches
        sampler = _sampler_of(self.inner)
        if epoch is not None and type(sampler).__name__ == ADVANCES_ITSELF:
            sampler.set_epoch(epoch + 1)

    def _part(self, epoch: int | None, ahead: int, begin: int, end: int | None) -> Iterator[Any]:
        """Batches `begin` to `end` of the epoch that is `ahead` epochs later.

        The trainer reads its epoch from the sampler, so the sampler is set to the later one only while its order is fixed.
        """
        if begin == end:
            return
        now = _epoch_of(self.inner)
        if epoch is not None:
            _sampler_of(self.inner).set_epoch(epoch + ahead)
        rows = islice(iter(self.inner), begin, end)
        first = next(rows, None)  # from here on the order is fixed
        if now is not None:
            _sampler_of(self.inner).set_epoch(now)
        if first is not None:
            yield first
            yield from rows
        if now is not None:
            _sampler_of(self.inner).set_epoch(now)

    def _shuffled(self, batches: list[Any]) -> list[Any]:
        """Order by digests and not by a generator: the same on every rank and in every version, and nothing is drawn."""
        places = range(self._begin, len(batches))
        order = sorted(places, key=lambda place: sha256(f"{self._seed}:{place}".encode()).digest())
        if order == list(places):  # of few batches chance may leave each where it was
            order = [*order[1:], *order[:1]]
        return [*batches[: self._begin], *(batches[place] for place in order)]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sampler":  # Accelerate assigns a restored sampler
            change_object(self.inner, "sampler", value)
        else:
            super().__setattr__(name, value)


def keeps_place(loader: Any) -> bool:
    """Whether this loader makes such changes itself."""
    return hasattr(loader, "change_when_read")


def can_move(loader: Any, *, reshuffle: bool = False) -> bool:
    """Whether this loader's order depends on the epoch alone; for `reshuffle`, its epochs must be distinguishable."""
    if keeps_place(loader):
        return True
    base = _base(loader)
    if type(base).__name__ != "DataLoader" or type(loader).__name__ == "DataLoaderDispatcher":
        return False
    if getattr(base, "batch_sampler", None) is None or hasattr(base.dataset, "set_epoch"):
        return False
    sampler = _sampler_of(base.batch_sampler)
    name = type(sampler).__name__
    if name == "SequentialSampler":
        return not reshuffle
    return name in BY_EPOCH and not getattr(sampler, "replacement", False)


def can_reshuffle(loader: Any, step: int | None, accumulation: int) -> bool:
    """Whether this loader can be reshuffled and its epoch agrees with the step count."""
    if step is None or keeps_place(loader) or not can_move(loader, reshuffle=True):
        return step is not None and keeps_place(loader)
    epoch = _epoch_of(_base(loader).batch_sampler) or 0
    by_steps, begin = position_in_epoch(loader, step, accumulation)
    return epoch == by_steps or (begin == 0 and epoch == by_steps - 1)


def position_in_epoch(loader: Any, step: int, accumulation: int) -> tuple[int, int]:
    """Epoch, and batch inside it, after `step` optimizer steps; an epoch's last step takes the batches that remain."""
    steps = max(1, -(-len(_base(loader).batch_sampler) // accumulation))
    return step // steps, step % steps * accumulation


def move_batches(loader: Any, *, skip: int, seed: str, step: int, accumulation: int) -> MovedBatches:
    """Change the order of `loader` from `step` on: leave out `skip` of its batches, and reorder the rest by `seed`."""
    base = _base(loader)
    epoch, begin = position_in_epoch(loader, step, accumulation)
    moved = MovedBatches(base.batch_sampler, skip=skip, seed=seed, epoch=epoch, begin=begin)
    change_object(base, "batch_sampler", moved)
    return moved


def take_out(loader: Any, moved: Any) -> None:
    """Restore the order from before `move_batches`."""
    if keeps_place(loader):
        loader.forget_change(moved)
        return
    change_object(_base(loader), "batch_sampler", moved.inner)


def reads_from(loader: Any, other: Any) -> bool:
    """Whether `other` is `loader`, or was made from it (Accelerate's `skip_first_batches`)."""
    batches, wanted = getattr(other, "batch_sampler", None), getattr(_base(loader), "batch_sampler", None)
    for _ in range(6):
        if batches is None or batches is wanted:
            break
        batches = getattr(batches, "batch_sampler", None)
    return other is loader or (batches is not None and batches is wanted)


def _epoch_of(batches: Any) -> int | None:
    """The epoch of its sampler; None where all epochs are the same."""
    sampler = _sampler_of(batches)
    return int(sampler.epoch) if type(sampler).__name__ in BY_EPOCH else None


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def _sampler_of(batches: Any) -> Any:
    """The sampler of single samples below batch samplers; None for an unknown kind."""
    for _ in range(8):
        if type(batches).__name__ not in BATCHES:
            return batches if type(batches).__name__ in ("SequentialSampler", *BY_EPOCH) else None
        if type(batches).__name__ == "MovedBatches":
            batches = batches.inner
        else:  # a shard of batches may also hold a sampler that it does not use
            batches = getattr(batches, "batch_sampler", None) or getattr(batches, "sampler", None)
    return None
