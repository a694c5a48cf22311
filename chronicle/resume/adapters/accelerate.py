"""Accelerate under guard: `save_state`, `load_state` and `prepare` of one Accelerator are wrapped.

Accelerate's own load hooks do not help: they run before the state is there, and for DeepSpeed and FSDP after it
(`accelerator.py` 1.15, `load_state`). The wrappers do not change results, and arguments only where naming is automatic.

Importing this module registers the tracker `log_with="chronicle"` (Accelerate 1.15 and newer; for older ones pass
`ChronicleTracker()` in `log_with`). Looking up `chronicle.guard` imports it when Accelerate is loaded, so that
`chronicle.guard(Accelerator(log_with="chronicle"))` is one line: Python looks up `guard` before it builds the argument.
"""

import functools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import tracking

from chronicle.recording import Recording, start
from chronicle.resume.adapters.hooks import hook_engine_steps, hook_optimizer_steps
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.contract import Options
from chronicle.resume.events import Begins, Loaded, Loading, Logged, Saved, StepBegins
from chronicle.resume.faults import shield
from chronicle.resume.fingerprint import LiveState, collect_optimizers
from chronicle.resume.honours import keeps_place
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.learning_rate import BoundScheduler, raw_scheduler
from chronicle.resume.patches import around, change_object
from chronicle.resume.save import checkpoint_root, files_in
from chronicle.resume.session import GuardSession

NUMBER = re.compile(r"[0-9]+(?=[^/]*$)")


def guard_accelerator(accelerator: Any, options: Options) -> GuardSession:
    """Wrap one Accelerator; a second call on the same object changes nothing."""
    present = getattr(accelerator, "chronicle", None)
    if isinstance(present, GuardSession):
        return present
    session = GuardSession(lambda: observe_accelerator(accelerator), options)
    session.hub.add(EpochWatch(accelerator, session))
    prepared = session.faults.shield("preparation", functools.partial(_prepared, accelerator, session))
    configured = session.faults.shield("settings", _configured)
    change_object(accelerator, "chronicle", session)
    change_object(accelerator, "save_state", _saving(accelerator.save_state, session))
    change_object(accelerator, "load_state", _loading(accelerator, accelerator.load_state, session))
    change_object(accelerator, "prepare", around(accelerator.prepare, after=prepared))
    change_object(accelerator, "init_trackers", around(accelerator.init_trackers, before=configured))
    hook_optimizer_steps(session)
    return session


class EpochWatch(Observer):
    """Finds batches that are skipped in a later epoch; only the resumed one may skip any (accelerate issue 1451)."""

    about = "batches left out"

    def __init__(self, accelerator: Any, session: GuardSession) -> None:
        self._state, self._start = accelerator.gradient_state, session.start
        self._ended = False

    def step_begins(self, event: StepBegins) -> list[Check] | Rest:
        """A failed check at the first step of such an epoch."""
        if not self._start.resumed:
            return RESTS
        if self._state.end_of_dataloader:
            self._ended = True
            return []
        if not self._ended:
            return []
        self._ended = False
        loader: Any = self._state.active_dataloader
        skipped = int(getattr(loader, "skip_batches", 0) or 0) or _skipped_by_sampler(loader)
        if not skipped:
            return []
        check = failed(
            self.about,
            "L4",
            expected="all batches of a new epoch",
            found=f"the first {skipped} are skipped",
            where="data loader",
            cause="skip_first_batches is applied in every epoch, not only in the resumed one",
        )
        return [check]


def _skipped_by_sampler(loader: Any) -> int:
    sampler = getattr(loader, "batch_sampler", None)
    for _ in range(4):
        if sampler is None or getattr(sampler, "skip_batches", None):
            break
        sampler = getattr(sampler, "batch_sampler", None)
    return int(getattr(sampler, "skip_batches", None) or 0)


def observe_accelerator(accelerator: Any) -> LiveState:
    """The objects this Accelerator trains with, as they are now."""
    engines = [
        model for model in accelerator._models if hasattr(model, "save_checkpoint") and hasattr(model, "global_steps")
    ]
    optimizers = collect_optimizers(accelerator._optimizers or [engine.optimizer for engine in engines])
    return LiveState(
        models=tuple(getattr(model, "module", model) if model in engines else model for model in accelerator._models),
        optimizers=optimizers,
        schedulers=_schedulers(accelerator, engines),
        scaler=accelerator.scaler,
        objects=_own_objects(accelerator),
        topology=_topology(accelerator, engines),
        step=int(engines[0].global_steps) if engines else None,
        steppers=tuple(engine.optimizer for engine in engines) if engines else None,
        loaders=(*accelerator._dataloaders, *(thing for thing in accelerator._custom_objects if keeps_place(thing))),
        reading=accelerator.gradient_state.active_dataloader,
        feed=_feed(accelerator),
        accumulating=not accelerator.sync_gradients,
    )


def _schedulers(accelerator: Any, engines: list[Any]) -> tuple[BoundScheduler, ...]:
    """Prepared, registered and engine-owned schedulers, each once; a prepared one takes num_processes steps at a time."""
    found: dict[int, BoundScheduler] = {}
    for wrapper in accelerator._schedulers:
        raw = raw_scheduler(wrapper)
        unit = accelerator.num_processes if _steps_many(wrapper) and raw is not wrapper else 1
        found.setdefault(id(raw), BoundScheduler(scheduler=raw, unit=unit))
    for thing in accelerator._custom_objects:  # ChainedScheduler has no last_epoch
        raw = raw_scheduler(thing)
        if hasattr(raw, "optimizer") and (hasattr(raw, "last_epoch") or hasattr(raw, "_schedulers")):
            found.setdefault(id(raw), BoundScheduler(scheduler=raw))
    for engine in engines:
        raw = raw_scheduler(engine.lr_scheduler)
        if raw is not None and hasattr(raw, "step"):
            found.setdefault(id(raw), BoundScheduler(scheduler=raw))
    return tuple(found.values())


def _feed(accelerator: Any) -> Any:
    """The loader that is trained from: the one being read, else the only one."""
    active, loaders = accelerator.gradient_state.active_dataloader, accelerator._dataloaders
    return active if active is not None else (loaders[0] if len(loaders) == 1 else None)


def _own_objects(accelerator: Any) -> dict[str, Any]:
    """The other registered objects. Loaders are left out: some begin to iterate when asked for their state."""
    return {
        f"{type(thing).__name__} {index}": thing
        for index, thing in enumerate(accelerator._custom_objects)
        if not hasattr(thing, "optimizer") and not hasattr(thing, "__iter__") and not hasattr(thing, "parameters")
    }


def _steps_many(wrapper: Any) -> bool:
    """Whether one step of the wrapper is `num_processes` steps of its scheduler (Accelerate's `scheduler.py`)."""
    if any(base.__name__ == "DeepSpeedSchedulerWrapper" for base in type(wrapper).__mro__):
        return False  # the engine steps it, once
    return bool(getattr(wrapper, "step_with_optimizer", False) and not getattr(wrapper, "split_batches", False))


def _topology(accelerator: Any, engines: list[Any]) -> dict[str, Any]:
    topology: dict[str, Any] = {
        "world_size": int(accelerator.chronicle.ranks.world_size) if hasattr(accelerator, "chronicle") else 1,
        "num_processes": int(accelerator.num_processes),
        "accumulation": int(accelerator.gradient_accumulation_steps),
        "mixed_precision": str(accelerator.mixed_precision),
        "sharding": _sharding(accelerator, engines),
    }
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for m in accelerator._models for p in m.parameters()})
    if dtypes:
        topology["dtype"] = "+".join(dtypes)
    active = accelerator.gradient_state.active_dataloader
    loaders = accelerator._dataloaders if active is None else [active]
    sizes = [_total_batch_size(loader, topology["num_processes"]) for loader in loaders]
    if len(sizes) == 1 and isinstance(sizes[0], int):  # of several, only the one in use is the one trained from
        topology["batch_size"] = sizes[0]
        topology["global_batch"] = sizes[0] * topology["accumulation"]
    return topology


def _total_batch_size(loader: Any, num_processes: int) -> int | None:
    """Samples of one batch over all ranks. The loader that `skip_first_batches` makes does not know it itself."""
    size = getattr(loader, "total_batch_size", None)
    sampler = getattr(loader, "batch_sampler", None)
    for _ in range(4):
        if isinstance(size, int) or sampler is None:
            break
        own = getattr(sampler, "batch_size", None)
        if isinstance(own, int):
            size = own if getattr(sampler, "split_batches", False) else own * num_processes
        sampler = getattr(sampler, "batch_sampler", None)
    return size if isinstance(size, int) else None


def _sharding(accelerator: Any, engines: list[Any]) -> str:
    if engines:
        return f"zero{engines[0].zero_optimization_stage()}"
    return "fsdp" if "FSDP" in str(accelerator.distributed_type) else "replicated"


def _saving(original: Callable[..., Any], session: GuardSession) -> Callable[..., Any]:
    def begin(output_dir: Any = None, *_: Any, **__: Any) -> tuple[float, Mapping[str, tuple[int, int]]]:
        is_seen = output_dir is not None and not session.off
        files = files_in(checkpoint_root(Path(output_dir))) if is_seen else {}
        return time.perf_counter(), files

    def seal(location: Any, begun: Any, *_: Any, **__: Any) -> None:
        since, files = begun or (None, None)
        seconds = None if since is None else time.perf_counter() - since
        if location is not None:
            session.hear(Saved(path=Path(location), seconds=seconds, before=files))

    return around(original, before=session.faults.shield("save", begin), after=session.faults.shield("save", seal))


def _loading(accelerator: Any, original: Callable[..., Any], session: GuardSession) -> Callable[..., Any]:
    def begin(input_dir: Any) -> Path | None:
        directory, checks = resolve_directory(accelerator, input_dir)
        if directory is not None:
            session.hear(Loading(directory=directory, checks=checks))
        return directory

    begins = shield(begin, lambda problem: session.lost("load", problem))
    ends = shield(
        lambda directory: session.hear(Loaded(directory=directory)), lambda problem: session.lost("load", problem)
    )

    @functools.wraps(original)
    def load_state(input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        directory = begins(input_dir)
        if directory is None:
            return original(input_dir, *args, **kwargs)  # Accelerate's own error says what is missing
        try:
            # the checked directory is the one that is loaded, also under automatic naming
            result = original(str(directory), *args, **kwargs)
        except BaseException as problem:
            session.hear(Loaded(problem=problem))
            raise
        ends(directory)
        return result

    return load_state


def _prepared(accelerator: Any, session: GuardSession, *_: Any, **__: Any) -> None:
    for model in accelerator._models:
        if hasattr(model, "save_checkpoint") and hasattr(model, "global_steps"):
            hook_engine_steps(session, model)
    session.hear(Begins(model=next(iter(accelerator._models), None), says_so=False))


def _configured(project_name: Any = None, config: Any = None, *_: Any, **__: Any) -> None:
    """The settings that the script gives to its trackers are settings of this launch."""
    if isinstance(config, Mapping):
        start().add_settings("init_trackers", config)


def resolve_directory(accelerator: Any, input_dir: Any) -> tuple[Path | None, list[Check]]:
    """The directory `load_state` will read, and a failed check for each stray one that automatic naming might take.

    Accelerate picks the highest first number in the last path component: `checkpoint_2.orig` and `backup_99` count
    (reproduced with 1.15).
    """
    if input_dir is not None:
        directory = Path(input_dir).expanduser()
        return (directory, []) if directory.is_dir() else (None, [])
    if not accelerator.project_configuration.automatic_checkpoint_naming or accelerator.project_dir is None:
        return None, []
    root = Path(accelerator.project_dir) / "checkpoints"
    names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    strays = [name for name in names if not re.fullmatch(r"checkpoint_[0-9]+", name)]
    numbered = [(int(name.removeprefix("checkpoint_")), name) for name in names if name not in strays]
    if not numbered and not strays:
        return None, []
    checks = [
        failed(
            "stray directory",
            "F1",
            expected="only checkpoint_<N>",
            found=name,
            where=str(root),
            cause="Accelerate's automatic naming may load it as the newest: move it out",
        )
        for name in strays
        if NUMBER.search(name)
    ]
    return root / (max(numbered)[1] if numbered else strays[-1]), checks


# ---- tracker: `log_with="chronicle"` ---------------------------------------------------------------------------------


class ChronicleTracker(tracking.GeneralTracker):  # type: ignore[misc]
    """Writes the per-step log of the launch; outside `chronicle run` it does nothing."""

    name = "chronicle"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name: str = "", **_: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._log = Recording()
        self._calls = 0

    @property
    def tracker(self) -> Recording:
        """The log itself."""
        return self._log

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Record the settings."""
        start().add_settings("init_trackers", values)

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Write one line; without a step the calls are counted."""
        self._calls += 1
        Logged(step=self._calls if step is None else step, values=values).into(self._log)

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Close the file."""
        self._log.close()


def register_tracker() -> None:
    """Register the tracker's name with Accelerate, once."""
    add = getattr(tracking, "register_tracker_class", None)
    if add is not None and ChronicleTracker.name not in tracking.LOGGER_TYPE_TO_CLASS:
        add(ChronicleTracker)


register_tracker()
