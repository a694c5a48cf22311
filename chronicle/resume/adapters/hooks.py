"""Where a step begins: torch's global pre-step hook, and DeepSpeed's `engine.step`, which torch's hook cannot see whole.

The hook costs one identity test a step once the first fifty are over.
"""

import sys
import weakref
from typing import Any

from chronicle.resume.session import GuardSession

_sessions: "weakref.WeakSet[GuardSession]" = weakref.WeakSet()
_registered: list[Any] = []  # the hook itself, once per process; removing it inside a step would break torch's loop

__all__ = ["hook_engine_steps", "hook_optimizer_steps"]


def hook_optimizer_steps(session: GuardSession) -> None:
    """Call `session.before_step` before every step of any torch optimizer in this process.

    Every optimizer, because the accident may be that another one steps. Sessions are held weakly: an Accelerator that
    is gone must not be guarded for ever.
    """
    if not _registered:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _registered.append(register_optimizer_step_pre_hook(_before_step))
    _sessions.add(session)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for session in tuple(_sessions):
        if not session.engine_steps and not (session.waits_for_first_step and _is_making_room()):
            session.before_step(optimizer)


def _is_making_room() -> bool:
    """Whether this step is no step: torch's distributed checkpoint takes one with LR 0 to make room for a state to load."""
    frame = sys._getframe(2)
    for _ in range(16):
        if frame.f_code.co_name == "_init_optim_state":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def hook_engine_steps(session: GuardSession, engine: Any) -> None:
    """Wrap `engine.step` once: ZeRO steps its inner optimizer per group, on flat copies, out of the hook's sight."""
    if getattr(engine.step, "_chronicle", False):
        return
    session.engine_steps = True
    original = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            session.before_step(None)
        return original(*args, **kwargs)

    step._chronicle = True  # type: ignore[attr-defined]
    engine.step = step
