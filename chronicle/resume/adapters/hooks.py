"""What adapters share: the hooks on optimizer steps, and on saves of torch.

Torch's global pre-step hook does not see a DeepSpeed step as a whole, so `engine.step` is wrapped instead. Once the first
fifty steps are over, the hook costs one identity test per step.
"""

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from chronicle.resume.compiled import outside_graphs
from chronicle.resume.contract import Options
from chronicle.resume.events import StepBegins
from chronicle.resume.faults import last_resort, raised_by_script, record_without_session, shield
from chronicle.resume.fingerprint import params_of
from chronicle.resume.learning_rate import number
from chronicle.resume.patches import around, change, change_object, is_changed
from chronicle.resume.session import GuardSession
from chronicle.resume.training import begins_within_its_step

_sessions: "weakref.WeakSet[GuardSession]" = weakref.WeakSet()
_registered: list[Any] = []  # the hook itself, once per process; removing it inside a step would break torch's loop


def hook_optimizer_steps(session: GuardSession, takes_over: Sequence[Any] = ()) -> None:
    """Tell the session of every step of any torch optimizer in this process.

    Every optimizer, because the error may be that another one steps. Sessions are held weakly, so that a deleted
    Accelerator is not guarded for ever. `takes_over`: optimizers that an older session of the same run may have stepped: it
    ends, because the schedule that it expects no longer drives them.
    """
    for other in tuple(_sessions):
        if other is not session and other.journal.paths == session.journal.paths and other.training.guards(takes_over):
            other.retire()
    if not _registered:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _registered.append(register_optimizer_step_pre_hook(outside_graphs(shield(_before_step, _lost))))
    _hear("files", _tell_of_file)
    _sessions.add(session)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Every session for itself: an error in one is no reason to give up another."""
    if begins_within_its_step(optimizer):
        return
    for session in tuple(_sessions):
        try:
            if not session.engine_steps and (session.training.has_stepped or not _is_allocation_step(optimizer, session)):
                session.hear(StepBegins(optimizer=optimizer, has_closure=_has_closure(args, kwargs)))
        except Exception as problem:
            if raised_by_script(problem):
                raise
            last_resort(functools.partial(session.lost, "step"), problem)


def dtype_of(models: Sequence[Any]) -> str:
    """The dtype of the first parameter; "" where there is none."""
    parameter = next((p for model in models for p in model.parameters()), None)
    return "" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def split_of(batch_size: Any, accumulation: int, world_size: int) -> dict[str, int]:
    """How the samples of a step are split, as a topology says it; {} where the batch size is not known."""
    if not isinstance(batch_size, int):
        return {}
    return {"batch_size": batch_size, "global_batch": batch_size * accumulation * world_size}


# ---- saves of torch ---------------------------------------------------------------------------------------------------------

_hears_saves: "weakref.WeakSet[Any]" = weakref.WeakSet()  # with the three methods below


def hear_saves(run: Any) -> None:
    """Tell `run` what torch writes, and where.

    `run.writes(object)` is called by every `torch.save` and distributed save. `run.async_save_begins(directory)` is called when
    `async_save` is: what will be in the directory is the state of now. `run.save_begins(directory)` is called by every
    distributed save in the thread that writes. Of `torch.save` only what is looked up from here on is heard.
    """
    _hears_saves.add(run)
    tellers = {"files": _tell_of_file, "distributed saves": _tell_of_save, "asynchronous saves": _tell_of_async_save}
    for row, tell in tellers.items():
        _hear(row, tell)


def _hear(row: str, tell: Callable[[Any, Any, Any], None]) -> None:
    change(row, functools.partial(around, before=functools.partial(_tell_all, tell)))


def _tell_all(tell: Callable[[Any, Any, Any], None], *args: Any, **kwargs: Any) -> None:
    for run in tuple(_hears_saves):
        try:
            tell(run, args, kwargs)
        except Exception as problem:  # noqa: BLE001 nothing may reach the save of the script
            last_resort(functools.partial(run.lost, "save"), problem)
    for session in tuple(_sessions):
        with session.contained("save"):
            session.unregistered.written(_directory_of(args, kwargs) or kwargs.get("f") or next(iter(args[1:2]), None))


def _tell_of_async_save(run: Any, args: Any, kwargs: Any) -> None:
    if directory := _directory_of(args, kwargs):
        run.async_save_begins(directory)


def _tell_of_save(run: Any, args: Any, kwargs: Any) -> None:
    if directory := _directory_of(args, kwargs):
        run.save_begins(directory)
    run.writes(args[0] if args else kwargs.get("state_dict"))


def _tell_of_file(run: Any, args: Any, kwargs: Any) -> None:
    run.writes(args[0] if args else kwargs.get("obj"))


def _directory_of(args: Any, kwargs: Any) -> Any:
    writer = kwargs.get("storage_writer") or next((one for one in args[1:2] if hasattr(one, "path")), None)
    found = kwargs.get("checkpoint_id") or getattr(writer, "checkpoint_id", None) or getattr(writer, "path", None)
    return found if isinstance(found, str | os.PathLike) else None


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step is given a function that it calls: most run the model and the backward pass in it."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _lost(problem: Exception) -> None:
    for session in tuple(_sessions):
        session.lost("step", problem)


def _is_allocation_step(optimizer: Any, session: GuardSession) -> bool:
    """Whether a step only allocates the state that a load will fill: no batch before it, no state, and gradients of zero.

    torch's distributed checkpoint takes such a step with LR 0, torchtnt's with the LR of the schedule. After a batch, gradients
    of zero with an LR are a finding: all labels are masked.
    """
    if getattr(optimizer, "state", True):
        return False
    gradients = [p.grad for p in params_of(optimizer) if p.grad is not None]
    if not gradients or any(bool(gradient.any()) for gradient in gradients):
        return False
    return not session.has_begun or all(number(group.get("lr")) == 0 for group in optimizer.param_groups)


def hook_engine_steps(session: GuardSession, engine: Any) -> None:
    """Wrap `engine.step` once. The hook sees steps of its inner optimizer: groups one by one, or flat copies of them."""
    if is_changed(engine.step):
        return
    session.steps_by_engine()
    hook_optimizer_steps(session)

    def look(*_: Any, **__: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            session.hear(StepBegins(optimizer=None, engine=engine))

    change_object(engine, "step", around(engine.step, before=shield(look, functools.partial(session.lost, "step"))))


class GuardedCallback:
    """What the callbacks of frameworks share: their `shielded` methods tell it of an error."""

    _session: GuardSession | None = None
    _options = Options()
    gave_up = False  # the guard could not be set up: this launch trains without one

    def lost(self, where: str, problem: Exception) -> None:
        """One of the methods failed: it is recorded, and what it would have found out stays unknown."""
        if self._session is None:
            self.gave_up = True
            record_without_session(where, problem, self._options.run_dir)
        elif where == "load":
            self._session.lost(where, problem)
        else:
            self._session.faults.record(where, problem)
            if where == "setup":
                self._session.retire()
