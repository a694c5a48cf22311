"""Where a step begins: torch's global pre-step hook, and DeepSpeed's `engine.step`, which torch's hook cannot see whole.

The hook costs one identity test a step once the first fifty are over.
"""

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
        if not session.engine_steps:
            session.before_step(optimizer)


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
