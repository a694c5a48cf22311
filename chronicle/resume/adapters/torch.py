"""Plain torch under guard: one line, `run = chronicle.attach("tr-190", model, optimizer, scheduler)`.

The description of memory is stored in the optimizer's own `state_dict` under the key `chronicle` (plain values; torch ignores
it on load), and so in whatever file the script writes. Torch's own hooks tell the guard of a save (`state_dict`), a resume
(`load_state_dict`) and the first step. Generators are not compared, because the script may not save them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.journal.events import StateSaved
from chronicle.resume.adapters.hooks import StepLog, hook_optimizer_steps
from chronicle.resume.contract import Mode, Options
from chronicle.resume.fingerprint import LiveState, collect_optimizers
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.memory import Memory
from chronicle.resume.session import GuardSession

__all__ = ["AttachedRun", "attach"]

KEY = "chronicle"  # in the optimizer's `state_dict`


def attach(
    run: str | Path | None,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *,
    data_state: Callable[[], Any] | None = None,
    step: Callable[[], int | None] | None = None,
    same_data: bool = False,
    honours: Sequence[str] = (),
    fresh_start: bool = False,
    accept_change: Mapping[str, str] | None = None,
    data: Any = None,
    accumulation: int | None = None,
    averages: Mapping[str, Any] | None = None,
    scaler: Any = None,
    mode: str = "enforce",
) -> "AttachedRun":
    """Put a training loop under guard. `run`: name or directory; `averages`: EMA copies of the model by name.

    `model`, `optimizer`, `scheduler` may be single objects or sequences of them. `data`: the DataLoader that is trained
    from, needed for `chronicle rollback --skip-batches`; one optimizer step takes `accumulation` of its batches.
    Other arguments as for `guard`.
    """
    options = Options(
        run_dir=run,
        data_state=data_state,
        step=step,
        same_data=same_data,
        honours=tuple(honours),
        fresh_start=fresh_start,
        accept_change=dict(accept_change or {}),
        mode=Mode(mode),
    )
    live = LiveState(
        models=_many(model),
        optimizers=collect_optimizers(_many(optimizer)),
        schedulers=tuple(BoundScheduler(scheduler=one) for one in _many(scheduler)),
        scaler=scaler,
        averages=dict(averages or {}),
        loaders=() if data is None else (data,),
        reading=data,
        feed=data,
    )
    return AttachedRun(live, options, accumulation)


class AttachedRun:
    """The guard of one training loop; keep it alive as long as the loop. `live`: what the loop trains with."""

    def __init__(self, live: LiveState, options: Options, accumulation: int | None = None) -> None:
        self._live, self._accumulation = live, accumulation
        self._log = StepLog()
        self.session = GuardSession(self._observe, options)
        hook_optimizer_steps(self.session)
        self.session.batches.watch(live.models[0])
        first = live.optimizers[0]
        first.register_state_dict_post_hook(self._on_save)
        first.register_load_state_dict_pre_hook(self._on_load)

    def now_trains(self, live: LiveState) -> None:
        """Take in what is trained with from here on: a second optimizer or a scheduler that was made later."""
        self._live = live

    def saved(self, path: str | Path) -> None:
        """Tell the guard where a checkpoint was written: a directory gets a manifest, a file an entry in the journal."""
        target = Path(path).absolute()
        if target.is_dir():
            self.session.after_save(target)
        else:
            memory = self.session.describe()
            identity = self.session.identity
            self.session.sealer.seal_file(target, step=memory.step, honours=memory.honours, identity=identity)

    def log(self, **values: Any) -> None:
        """Write one line to the launch's per-step log; the step is the guard's own count."""
        step, used = self.session.step, self.session.honours.used_lr
        if step is not None:
            self._log.write(step, values if used is None or "lr" not in values else {**values, "lr": used})

    def _on_save(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        session = self.session
        if session.off:
            return state
        memory = session.describe()
        if session.waits_for_first_step:
            return {**state, KEY: memory.to_json()}  # a load will overwrite it: nothing has been trained yet
        saved = StateSaved(step=memory.step, identity=session.identity, honours=list(memory.honours) or None)
        session.journal.write(saved, step=memory.step, title="state taken")
        session.batches.after_save(f"step {memory.step}")
        return {**state, KEY: memory.to_json()}

    def _on_load(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        record = state.get(KEY)
        memory = Memory.from_json(record) if isinstance(record, Mapping) else None
        self.session.state_loaded(memory)
        return {key: value for key, value in state.items() if key != KEY}

    def _observe(self) -> LiveState:
        topology: dict[str, Any] = {
            "world_size": self.session.ranks.world_size,
            "dtype": str(next(self._live.models[0].parameters()).dtype).removeprefix("torch."),
        }
        if self._accumulation is not None:
            topology["accumulation"] = self._accumulation
        size = getattr(self._live.feed, "batch_size", None)
        if isinstance(size, int):
            topology["batch_size"] = size
            topology["global_batch"] = size * (self._accumulation or 1) * topology["world_size"]
        return replace(self._live, topology=topology)


def _many(thing: Any) -> tuple[Any, ...]:
    if thing is None:
        return ()
    return tuple(thing) if isinstance(thing, Iterable) and not hasattr(thing, "state_dict") else (thing,)
