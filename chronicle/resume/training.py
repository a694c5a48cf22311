"""The training of this process, as every part of the guard knows it: its objects, its step, and where it is recorded."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.paths import RunPaths
from chronicle.resume.checks.run import drives
from chronicle.resume.contract import Mode, Options, effective_options, launch_number
from chronicle.resume.faults import Containment, Faults
from chronicle.resume.fingerprint import LiveState, Parts, optimizer_steps
from chronicle.resume.journal import GuardJournal, find_run_dir
from chronicle.resume.verdict import Ranks, StartingPoint


class Training:
    """One training, and the guard's own means: its options, journal, ranks, and record of its errors."""

    def __init__(
        self,
        observe: Callable[[], LiveState],
        options: Options,
        environ: Mapping[str, str] = os.environ,
        ranks: Ranks | None = None,
    ) -> None:
        """`observe`, given by an adapter, returns the objects in use right now."""
        self._observe = observe
        self.environ = environ
        self.options = effective_options(options, environ)
        self.ranks = ranks or Ranks()
        run_dir, origin = find_run_dir(options.run_dir, environ, Path.cwd())
        self.journal = GuardJournal(run_dir, launch=launch_number(environ), rank=lambda: self.ranks.rank)
        if run_dir is None:
            self.journal.say("run", f"no run directory ({origin}): verdicts are not recorded")
        self.faults = Faults(self.journal, lambda: self.step)
        self.start = StartingPoint()
        self.retired = False  # the guard does nothing more in this launch
        self.models: tuple[Any, ...] = ()  # that are trained, from the first step on
        self.optimizers: tuple[Any, ...] = ()  # that are guarded, from the first step on
        self.steps_here = 0  # since the launch or its latest load
        self.has_stepped = False  # since the latest load
        self.has_ever_stepped = False
        self.num_begun = 0  # steps of any optimizer, guarded or not: memory changes with each
        self._counted: Any = None  # the optimizer whose steps are counted
        named = environ.get("CHRONICLE_LAUNCH_DIR")
        self.launch_dir = Path(named) if named and not self.off else None

    @property
    def off(self) -> bool:
        """Whether the guard was switched off for this launch."""
        return self.retired or self.options.mode is Mode.OFF

    @property
    def paths(self) -> RunPaths | None:
        """Where the run lies; None where nothing is kept."""
        return None if self.off else self.journal.paths

    @property
    def step(self) -> int | None:
        """Optimizer steps completed, as far as the guard knows without a transfer from the device."""
        if self.start.start_step is None:  # nothing was trained since the load
            loaded = self.start.memory if self.start.resumed else None
            return None if loaded is None else loaded.step
        return self.start.start_step + self.steps_here

    @property
    def has_stepped_unseen(self) -> bool:
        """Whether the optimizers' counters are beyond what was loaded, or beyond the one step that allocates their state."""
        if self.has_stepped:
            return False
        taken, memory, loaded = optimizer_steps(self.observe().optimizers), self.start.memory, 1
        if self.start.resumed:
            if memory is None or memory.step is None:
                return False
            loaded = memory.step
        return taken is not None and taken[1] > loaded

    def contained(self, where: str) -> Containment:
        """A context for code of the guard: an error in it is recorded and never raised into training; a refusal is."""
        return self.faults.contained(where)

    def observe(self) -> LiveState:
        """The objects in use, with the averages and objects that the script named."""
        live, options = self._observe(), self.options
        if not (options.averages or options.objects):
            return live
        return replace(
            live,
            averages={**live.averages, **options.averages},
            objects={**live.objects, **options.objects},
        )

    def live(self) -> LiveState:
        """The objects in use, with step and data position as the script itself says them."""
        live = self.observe()
        said = Parts()  # the script's own functions may fail, for example before its loader exists
        step, data = live.step, live.data
        if self.options.step is not None:
            step = said.take("step", self.options.step)
        if self.options.data_state is not None:
            data = said.take("data", self.options.data_state)
        return replace(live, rank=self.ranks.rank, step=step, data=data, unknown={**live.unknown, **said.unknown})

    def trains(self, live: LiveState) -> None:
        """These objects take the steps from now on."""
        self.models, self.optimizers = tuple(live.models), tuple(live.optimizers)
        self.has_ever_stepped = True

    def reopen(self) -> None:
        """The next optimizer step is a first one."""
        self.has_stepped, self.steps_here, self._counted = False, 0, None

    def retire(self) -> None:
        """The guard does nothing more in this launch."""
        self.retired = True

    def changes(self) -> None:
        """A step of any optimizer begins."""
        self.num_begun += 1

    def counts(self) -> None:
        """A step begins."""
        self.steps_here += 1

    def begins_step(self) -> None:
        """A first step is judged."""
        self.has_stepped = True

    def is_counted(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is counted: that of the first guarded one, or of one that shares its groups."""
        if optimizer is None or optimizer is self._counted:
            return True
        if self._counted is None and self.optimizers and drives(optimizer, self.optimizers[0]):
            self._counted = optimizer
            return True
        return False

    def place_of(self, optimizer: Any) -> int:
        """Which of the guarded optimizers this is; -1 for a whole engine, whose gradients cannot be reached."""
        if optimizer is None:
            return -1
        return next((index for index, one in enumerate(self.optimizers) if drives(optimizer, one)), -1)

    def guards(self, optimizers: Sequence[Any]) -> bool:
        """Whether steps were taken under guard with one of these optimizers."""
        return any(drives(one, known) for one in optimizers for known in self.optimizers)


# ---- steps within steps ----------------------------------------------------------------------------------------------

_within: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()  # optimizer -> its steps that have begun
_hears_ends: list[Any] = []  # the hook, once there is such an optimizer


def begins_within_its_step(optimizer: Any) -> bool:
    """Note that a step begins; whether it is one within a step of the same optimizer: a subclass calls `super().step()`.

    torch hooks the `step` of every class of which an optimizer was made, so a subclass whose base class was used, too, is heard
    twice a step.
    """
    num_hooked = 0
    for base in type(optimizer).__mro__:
        num_hooked += bool(getattr(base.__dict__.get("step"), "hooked", False))
    if num_hooked < 2:
        return False
    if not _hears_ends:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hears_ends.append(register_optimizer_step_post_hook(_step_ended))
    _within[optimizer] = _within.get(optimizer, 0) + 1
    return is_within_its_step(optimizer)


def _step_ended(optimizer: Any, *_: Any) -> None:
    if optimizer in _within:
        _within[optimizer] = max(0, _within[optimizer] - 1)


def a_batch_entered() -> bool:
    """No step of the batch before is going on: one that raised has no end. Whether there is any optimizer of that kind."""
    _within.clear()
    return bool(_hears_ends)


def is_within_its_step(optimizer: Any) -> bool:
    """Whether the step that goes on is one within a step of the same optimizer."""
    return bool(_within) and _within.get(optimizer, 0) > 1
