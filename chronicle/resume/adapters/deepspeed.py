"""A DeepSpeed engine without Accelerate under guard: its `save_checkpoint`, `load_checkpoint` and `step` are wrapped."""

import functools
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chronicle.resume.adapters.hooks import dtype_of, hook_engine_steps
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.contract import Options
from chronicle.resume.events import Begins, Loaded, Loading, Saved
from chronicle.resume.faults import shield
from chronicle.resume.fingerprint import LiveState, collect_optimizers
from chronicle.resume.learning_rate import BoundScheduler, raw_scheduler
from chronicle.resume.patches import around, change_object
from chronicle.resume.session import GuardSession


def guard_engine(engine: Any, options: Options) -> GuardSession:
    """Wrap one engine; a second call on the same object changes nothing."""
    present = getattr(engine, "chronicle", None)
    if isinstance(present, GuardSession):
        return present
    session = GuardSession(lambda: observe_engine(engine, session.ranks.world_size), options)
    change_object(engine, "chronicle", session)
    change_object(engine, "save_checkpoint", _saving(engine, engine.save_checkpoint, session))
    change_object(engine, "load_checkpoint", _loading(engine.load_checkpoint, session))
    hook_engine_steps(session, engine)
    session.hear(Begins(model=engine.module, says_so=False))
    return session


def observe_engine(engine: Any, world_size: int) -> LiveState:
    """The objects this engine trains with, as they are now."""
    scheduler = raw_scheduler(engine.lr_scheduler)
    bound = (BoundScheduler(scheduler=scheduler),) if hasattr(scheduler, "step") else ()
    optimizer = getattr(engine, "optimizer", None)
    return LiveState(
        models=(engine.module,),
        optimizers=collect_optimizers((optimizer,)) if hasattr(optimizer, "param_groups") else (),
        schedulers=bound,
        scaler=getattr(optimizer, "loss_scaler", None),
        topology={
            "world_size": world_size,
            "accumulation": int(engine.gradient_accumulation_steps()),
            "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
            "global_batch": int(engine.train_batch_size()),
            "sharding": f"zero{engine.zero_optimization_stage()}",
            "dtype": dtype_of((engine.module,)),
        },
        step=int(engine.global_steps),
        steppers=(optimizer,) if hasattr(optimizer, "param_groups") else (),
        arguments=_arguments(engine),
    )


def _arguments(engine: Any) -> dict[str, Any]:
    """What the configuration says of how a gradient becomes an update."""
    names = ("gradient_clipping", "gradient_predivide_factor", "prescale_gradients")
    found = {name: getattr(engine, name, None) for name in names}
    return {name: one() for name, one in found.items() if callable(one)}


def _saving(engine: Any, original: Callable[..., Any], session: GuardSession) -> Callable[..., Any]:
    def seal(result: Any, begun: float, save_dir: Any, tag: Any = None, *_: Any, **__: Any) -> None:
        root = Path(save_dir) / str(tag if tag is not None else f"global_step{engine.global_steps}")
        session.hear(Saved(path=root, seconds=time.perf_counter() - begun))

    return around(original, before=lambda *_, **__: time.perf_counter(), after=session.faults.shield("save", seal))


def _loading(original: Callable[..., Any], session: GuardSession) -> Callable[..., Any]:
    def begin(load_dir: Any, tag: Any, weights_alone: bool) -> Path | None:
        # what is no resume is not compared as one; in a run that has saved, a first step without its state is refused
        if (weights_alone and not session.has_begun) or (tag is None and not _holds_a_save(Path(load_dir))):
            return None
        directory, checks = _resolve(Path(load_dir), tag)
        session.hear(Loading(directory=directory, checks=checks))
        return directory

    def end(directory: Path | None) -> None:
        if directory is not None:
            session.hear(Loaded(directory=directory, generators=False))  # DeepSpeed's checkpoints contain none

    begins = shield(begin, lambda problem: session.lost("load", problem))
    ends = shield(end, lambda problem: session.lost("load", problem))

    @functools.wraps(original)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        directory = begins(load_dir, tag, _asks_for_weights_alone(original, load_dir, tag, *args, **kwargs))
        try:
            result = original(load_dir, tag, *args, **kwargs)
        except BaseException as problem:
            session.hear(Loaded(problem=problem))
            raise
        ends(directory)
        return result

    return load_checkpoint


def _asks_for_weights_alone(load: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the script tells DeepSpeed to leave the optimizer's state out: it begins a training with these weights."""
    try:
        given = inspect.signature(load).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return False  # DeepSpeed says what is wrong
    return bool(given.get("load_module_only", False)) or not given.get("load_optimizer_states", True)


def _holds_a_save(load_dir: Path) -> bool:
    """Whether there is anything that DeepSpeed saved, or says that it did."""
    return os.path.lexists(load_dir / "latest") or any(load_dir.glob("*/*_states.pt"))


def _resolve(load_dir: Path, tag: Any) -> tuple[Path, list[Check]]:
    """The directory DeepSpeed will read. Without `latest` it loads nothing and only warns; the guard refuses."""
    if tag is not None:
        return load_dir / str(tag), []
    pointer = load_dir / "latest"
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except OSError:
        name = ""
    if name:
        return load_dir / name, []
    check = failed(
        "pointer",
        "F9",
        expected="a file `latest` that names a checkpoint",
        found="none, or empty",
        where=str(load_dir),
        cause="DeepSpeed would return (None, None) and train from scratch",
    )
    return load_dir, [check]
