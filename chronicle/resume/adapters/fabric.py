"""Lightning Fabric under guard: `chronicle.guard(fabric)`; automatic under `chronicle run`.

A Fabric script is a plain torch loop, and is guarded like one (`torch.py`): the description of memory is in the optimizer's
state. `setup` tells what is trained, `save` where it was written, and the `state` of `save` and `load` names the schedulers.
Fabric calls its callbacks with the module alone, so the methods of the class are wrapped, once per process.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning.fabric  # noqa: F401 whose class is changed

from chronicle.resume.adapters.torch import AttachedRun
from chronicle.resume.contract import Options
from chronicle.resume.faults import or_else, reason_of, record_without_session, shield
from chronicle.resume.fingerprint import LiveState, collect_optimizers
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.patches import around, change, change_object

_every = [False]  # whether a Fabric is guarded that the script has not named


class FabricRun:
    """What one Fabric has set up so far, and its guard: none before there are a model and an optimizer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.guard: AttachedRun | None = None
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._unknown: dict[str, str] = {}  # parts of a description that an error of the guard left out

    def set_up(self, things: Any) -> None:
        """Take in what `setup` returned: a wrapped module, wrapped optimizers, a scheduler, or a tuple of them."""
        for thing in things if isinstance(things, tuple) else (things,):
            if hasattr(thing, "param_groups"):
                self._take(self._optimizers, getattr(thing, "optimizer", thing))
            elif hasattr(thing, "named_parameters"):
                self._take(self._models, getattr(thing, "module", thing))
            elif _is_scheduler(thing):
                self._take(self._schedulers, thing)
        self._refresh()

    def see_state(self, state: Any) -> None:
        """Take in the schedulers among the objects that are saved or loaded."""
        for thing in state.values() if isinstance(state, Mapping) else ():
            if _is_scheduler(thing):
                self._take(self._schedulers, thing)
        self._refresh()

    def lost(self, problem: Exception) -> None:
        """Taking something in failed: without a guard yet, this Fabric trains without one. Else what it drives is not known."""
        if self.guard is None or self.guard.session is None:
            record_without_session("setup", problem, self._options.run_dir)
            return
        self.guard.session.faults.record("setup", problem)
        why = f"the guard failed at its setup ({reason_of(problem)}), so it does not know the schedulers"
        self._unknown = {"schedulers": why, "next_lrs": why}
        self._refresh()

    def _take(self, known: list[Any], thing: Any) -> None:
        if not any(thing is one for one in known):
            known.append(thing)

    def _refresh(self) -> None:
        if not self._models or not self._optimizers:
            return
        live = LiveState(
            models=tuple(self._models),
            optimizers=collect_optimizers(tuple(self._optimizers)),
            schedulers=tuple(BoundScheduler(scheduler=one) for one in self._schedulers),
            unknown=self._unknown,
        )
        if self.guard is None:
            self.guard = AttachedRun(live, self._options)
        else:
            self.guard.now_trains(live)


def _is_scheduler(thing: Any) -> bool:
    return hasattr(thing, "last_epoch") and hasattr(thing, "step") and hasattr(thing, "optimizer")


def guard_fabric(fabric: Any, options: Options) -> None:
    """Put one Fabric under guard, before its first `setup`; a second call on the same object changes nothing."""
    _wrap_class()
    if not hasattr(fabric, "chronicle"):
        change_object(fabric, "chronicle", FabricRun(options))


@or_else(lambda problem: _unguarded(problem))
def callbacks_factory() -> list[Any]:
    """Entry point `lightning.fabric.callbacks_factory`: under `chronicle run` every Fabric gets a guard.

    No callback is needed: Fabric calls this at its beginning, in time to wrap the class.
    """
    named = os.environ.get("CHRONICLE_RUN_DIR") or os.environ.get("CHRONICLE_RUN")
    _every[0] = bool(named) and os.environ.get("CHRONICLE_GUARD", "").strip().lower() != "off"
    if _every[0]:
        _wrap_class()
    return []


def _unguarded(problem: Exception) -> list[Any]:
    record_without_session("setup", problem)
    return []


def _run_of(fabric: Any) -> FabricRun | None:
    if _every[0] and not hasattr(fabric, "chronicle"):
        change_object(fabric, "chronicle", FabricRun(Options()))
    return getattr(fabric, "chronicle", None)


def _wrap_class() -> None:
    for name in ("setup", "setup_module", "setup_optimizers"):
        _wrap(name, after=_set_up)
    _wrap("save", before=_see_state, after=_saved)
    _wrap("load", before=_see_state)


def _wrap(name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> None:
    """Around a method of Fabric: `before` and `after` of the run, whose errors never reach the script."""

    def begin(fabric: Any, *args: Any, **kwargs: Any) -> None:
        shield(_with_run, functools.partial(_lost, fabric))(before, fabric, args, kwargs)

    def end(made: Any, given: None, fabric: Any, *args: Any, **kwargs: Any) -> None:
        shield(_with_run, functools.partial(_lost, fabric))(after, fabric, args, kwargs, made)

    change("Fabric", functools.partial(around, before=begin, after=end), f".{name}")


def _with_run(work: Callable[..., None] | None, fabric: Any, *rest: Any) -> None:
    run = None if work is None else _run_of(fabric)
    if work is not None and run is not None:
        work(run, *rest)


def _lost(fabric: Any, problem: Exception) -> None:
    run = getattr(fabric, "chronicle", None)
    if isinstance(run, FabricRun):
        run.lost(problem)
    else:
        record_without_session("setup", problem)


def _set_up(run: FabricRun, args: Any, kwargs: Any, made: Any) -> None:
    run.set_up(made)


def _see_state(run: FabricRun, args: Any, kwargs: Any) -> None:
    run.see_state(args[1] if len(args) > 1 else kwargs.get("state"))


def _saved(run: FabricRun, args: Any, kwargs: Any, made: Any) -> None:
    if run.guard is not None and run.guard.session is not None and not run.guard.session.off:
        run.guard.saved(args[0] if args else kwargs["path"])
