"""Plain torch under guard: one line, `run = chronicle.attach("tr-190", model, optimizer, scheduler)`.

The description of memory is stored in the optimizer's own `state_dict` under the key `chronicle` (plain values; torch ignores
it on load), and so in whatever file the script writes. It is made when the state is written (`Description`). Torch's own
hooks tell the guard of a save (`state_dict`), a resume (`load_state_dict`) and the first step. Generators are not compared,
because the script may not save them.

What the state of a plain torch optimizer carries under the key `chronicle`: a description that is made when it is needed.

A script may call `optimizer.state_dict()` at every step and throw the result away, so nothing is computed by the call itself.
The description is made when the state is pickled, copied or read. What torch returns refers to the optimizer's own tensors:
a file holds them as they are when it is written, and so must its description. A state that is still held when the next
optimizer step begins is described right before that step, at most once in `STEPS_BETWEEN` steps. A state that is written
only after further steps, or by another thread meanwhile, says that it is not described.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import StateSaved
from chronicle.resume.adapters.hooks import StepLog, hear_async_saves, hook_optimizer_steps
from chronicle.resume.contract import Options, parse_mode
from chronicle.resume.faults import (
    last_resort,
    or_else,
    raised_by_script,
    reason_of,
    record_without_session,
    shield,
    shielded,
)
from chronicle.resume.fingerprint import LiveState, collect_optimizers, optimizer_steps
from chronicle.resume.learning_rate import BoundScheduler, number
from chronicle.resume.memory import WHOLE, Memory
from chronicle.resume.own_objects import see_own_loads
from chronicle.resume.session import GuardSession

__all__ = ["STEPS_BETWEEN", "AttachedRun", "Description", "attach"]

MOST_BEGUN = 8  # asynchronous saves
KEY = "chronicle"  # in the optimizer's `state_dict`


def _unguarded(problem: Exception, run: Any = None) -> "AttachedRun":
    """What `attach` returns when the guard itself failed: a run without a guard, which is said and recorded."""
    record_without_session("attach", problem, run)
    attached = object.__new__(AttachedRun)
    attached.gave_up = True
    return attached


@or_else(lambda problem, *args, run=None, **_: _unguarded(problem, args[0] if args else run))
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
    objects: Mapping[str, Any] | None = None,
    scaler: Any = None,
    mode: str = "enforce",
    tokenizer: Any = None,
) -> "AttachedRun":
    """Put a training loop under guard. `run`: name or directory; `averages`: EMA copies of the model by name;
    `objects`: the script's own objects with a `state_dict`, by name.

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
        averages=dict(averages or {}),
        objects=dict(objects or {}),
        mode=parse_mode(mode),
        tokenizer=tokenizer,
    )
    live = LiveState(
        models=_many(model),
        optimizers=collect_optimizers(_many(optimizer)),
        schedulers=tuple(BoundScheduler(scheduler=one) for one in _many(scheduler)),
        scaler=scaler,
        loaders=() if data is None else (data,),
        reading=data,
        feed=data,
    )
    return AttachedRun(live, options, accumulation)


class AttachedRun:
    """The guard of one training loop; keep it alive as long as the loop. `live`: what the loop trains with.

    When the guard cannot be set up, `session` is None, the loop trains without it, and that is said and recorded.
    """

    session: Any = None
    gave_up = False

    def __init__(self, live: LiveState, options: Options, accumulation: int | None = None) -> None:
        self._live, self._accumulation = live, accumulation
        self._log = StepLog()
        self._latest: weakref.ref[Description] | None = None  # of the state that was taken last
        self._since = STEPS_BETWEEN  # optimizer steps since a state was described because it was held
        self._begun: dict[Path, tuple[Memory, int]] = {}  # asynchronous saves that are not told yet, and who began them
        try:
            self._begin(options)
        except ChronicleError:
            raise
        except Exception as problem:
            if raised_by_script(problem):
                raise
            if self.session is None:
                record_without_session("attach", problem, options.run_dir)
            else:
                self.session.retire()
                self.session.faults.record("attach", problem)

    def _begin(self, options: Options) -> None:
        self.session = GuardSession(self._observe, options)
        first = self._live.optimizers[0]
        first.register_state_dict_post_hook(shield(self._on_save, self._save_failed))
        first.register_load_state_dict_pre_hook(shield(self._on_load, lambda problem: self.session.lost("load", problem)))
        for optimizer in self._live.optimizers:
            optimizer.register_load_state_dict_pre_hook(shield(self._before_load, self._load_failed), prepend=True)
            optimizer.register_load_state_dict_post_hook(shield(self._after_load, self._load_failed))
        see_own_loads(options.objects, self.session.loads.own_object_loaded, lambda problem: self.session.lost("load", problem))
        hook_optimizer_steps(self.session, takes_over=self._live.optimizers)
        hear_async_saves(self)
        self.session.before_change = self._memory_changes
        if self._live.models:
            self.session.batches.watch(self._live.models[0])
            self.session.batches.watch_outputs(self._live.models[1:])
            self.session.envelope.watch(self._live.models[0])
        if why := _trained_before(self._live):
            self.session.attached_late(why)

    def now_trains(self, live: LiveState) -> None:
        """The loop trains with these objects from now on: more of them, or the same with their schedulers."""
        self._live = live

    @shielded("save")
    def saved(self, path: str | Path) -> None:
        """Tell the guard where a checkpoint was written: a directory gets a manifest, a file an entry in the journal."""
        if self.session is None:
            return
        target = Path(path).absolute()
        if target.is_dir():
            begun, _ = self._begun.pop(target, (None, 0))
            self.session.after_save(target, begun=begun)
        else:
            memory = self.session.describe()
            identity = self.session.identity
            self.session.sealer.seal_file(
                target, step=memory.step, honours=memory.honours, identity=identity, spoilt=memory.spoilt
            )

    @shielded("save")
    def async_save_begins(self, directory: str | Path) -> None:
        """Torch writes the state of now there while the loop goes on; `saved` is called when it is whole."""
        if self.session is None or self.session.off:
            return
        begun = self.session.state_taken(), threading.get_ident()
        self._begun = dict([*self._begun.items(), (Path(directory).absolute(), begun)][-MOST_BEGUN:])

    @shielded("save")
    def save_begins(self, directory: str | Path) -> None:
        """Torch writes there now. In the thread of the loop it is no asynchronous save: what one had begun there is gone."""
        path = Path(directory).absolute()
        if self._begun.get(path, (None, 0))[1] == threading.get_ident():
            del self._begun[path]

    @shielded("log")
    def log(self, **values: Any) -> None:
        """Write one line to the launch's per-step log; the step is the guard's own count."""
        if self.session is None:
            return
        step, used = self.session.step, self.session.honours.used_lr
        if step is not None:
            self._log.write(step, values if used is None or "lr" not in values else {**values, "lr": used})

    def lost(self, where: str, problem: Exception) -> None:
        """One of the functions above failed."""
        if self.session is None:
            record_without_session(where, problem)
        else:
            self.session.faults.record(where, problem)

    # ---- the state of the optimizer is taken: it is described when it is written --------------------------------

    def _on_save(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        if self.session.off or self._is_allocated(optimizer):
            return state
        latest, lrs = self._latest() if self._latest else None, _lrs(self._live.optimizers)
        seen = self.session.data.position
        if latest is None or latest.is_made:
            # a load will overwrite what is taken before the first step: nothing has been trained yet
            is_first = self.session.waits_for_first_step and not self.session.stepped_unseen
            taken = _nothing if is_first else shield(self._taken, self._save_failed)
            latest = Description(make=lambda: self._describe(lrs, seen), missed=self._missed, saved=taken)
            self._latest = weakref.ref(latest)
        return {**state, KEY: latest}

    def _is_allocated(self, optimizer: Any) -> bool:
        """Whether its state was made to be loaded into (`_is_allocation_step`).

        torch's distributed checkpoint asks the file for every key of what it loads into, and a file may have none of ours.
        """
        session = self.session
        return not (session.has_begun or session.start.resumed or session.stepped_unseen) and bool(optimizer.state)

    def _save_failed(self, problem: Exception) -> None:
        self.session.faults.record("save", problem)

    def _memory_changes(self) -> None:
        """An optimizer step begins: a state that somebody still holds is described now, or never."""
        self._since += 1
        latest = self._latest() if self._latest else None
        self._latest = None
        if latest is None or latest.is_made:
            return
        if self._since >= STEPS_BETWEEN:
            self._since = 0
            latest.made()
        latest.expire()

    def _describe(self, lrs: tuple[Any, ...], seen: str) -> Mapping[str, Any]:
        """The record of memory now; `lrs` and `seen` (batches) are those of the moment when the state was taken."""
        try:
            memory: Memory = self.session.describe(seen)
            if tuple(group.lr for group in memory.groups) != lrs and len(memory.groups) == len(lrs):
                why = "the LR changed between `optimizer.state_dict()` and the writing of the state"
                groups = tuple(replace(group, lr=lr) for group, lr in zip(memory.groups, lrs, strict=True))
                unknown = {**memory.unknown, "next_lrs": why, "schedulers": why}
                memory = replace(memory, groups=groups, unknown=unknown).without(("next_lrs", "schedulers"))
            return memory.to_json()
        except Exception as problem:
            if raised_by_script(problem):
                raise
            last_resort(self._save_failed, problem)
            return self._missed(f"the guard failed: {reason_of(problem)}")

    def _missed(self, why: str) -> Mapping[str, Any]:
        """The record of a state that could not be described."""
        return Memory(unknown={WHOLE: why}).to_json()

    def _taken(self, record: Mapping[str, Any]) -> None:
        """The state is being written."""
        with self.session.contained("save"):
            memory = Memory.from_json(record)
            saved = StateSaved(
                step=memory.step,
                identity=str(memory.identity.get("id") or ""),
                honours=list(memory.honours) or None,
                spoilt=memory.spoilt,
                weights=next((one.weights for one in memory.ranks), ""),
                optimizers=list(memory.optimizers) or None,
            )
            self.session.journal.write(saved, step=memory.step, title="state taken")
            if memory.step is not None:
                self.session.state_written()

    def _on_load(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        if self.session.retired:
            return state  # the session that took over reads the record
        record = state.get(KEY)
        if isinstance(record, Description):
            record = record.made()
        memory = Memory.from_json(record) if isinstance(record, Mapping) else None
        why = "" if memory is None else memory.unknown.get(WHOLE, "")
        self.session.state_loaded(None if why else memory, why)
        return {key: value for key, value in state.items() if key != KEY}

    def _before_load(self, optimizer: Any, state: dict[str, Any]) -> None:
        self.session.loads.options_set.before_load((optimizer,))

    def _after_load(self, optimizer: Any) -> None:
        self.session.loads.options_set.after_load((optimizer,))

    def _load_failed(self, problem: Exception) -> None:
        self.session.faults.record("load", problem)

    def _observe(self) -> LiveState:
        topology: dict[str, Any] = {
            "world_size": self.session.ranks.world_size,
        }
        dtype = next((str(p.dtype) for model in self._live.models[:1] for p in model.parameters()), "")
        if dtype:
            topology["dtype"] = dtype.removeprefix("torch.")
        if self._accumulation is not None:
            topology["accumulation"] = self._accumulation
        size = getattr(self._live.feed, "batch_size", None)
        if isinstance(size, int):
            topology["batch_size"] = size
            topology["global_batch"] = size * (self._accumulation or 1) * topology["world_size"]
        return replace(self._live, topology=topology)


def _lrs(optimizers: Sequence[Any]) -> tuple[float | None, ...]:
    return tuple(number(group.get("lr")) for optimizer in optimizers for group in optimizer.param_groups)


def _trained_before(live: LiveState) -> str:
    """What shows that state was loaded, or steps were taken, before the guard was attached; "" when nothing does."""
    steps = optimizer_steps(live.optimizers)
    if steps is not None and steps[1]:
        return f"the optimizer was already at step {steps[1]}"
    if steps is None and any(optimizer.state for optimizer in live.optimizers):  # Adagrad's begins with its constructor, at 0
        return "the optimizer already had state"
    for bound in live.schedulers:
        epoch = getattr(bound.scheduler, "last_epoch", 0)
        if isinstance(epoch, int) and epoch > 0:
            return f"the scheduler was already at {epoch}"
    return ""


def _nothing(record: Mapping[str, Any]) -> None:
    """A state that is taken before the first step is no save."""


def _many(thing: Any) -> tuple[Any, ...]:
    if thing is None:
        return ()
    return tuple(thing) if isinstance(thing, Iterable) and not hasattr(thing, "state_dict") else (thing,)


# ---- the description in the optimizer's state --------------------------------------------------------------------------


STEPS_BETWEEN = 50  # optimizer steps between two descriptions of states that are only held


def _unknown(problem: Exception) -> dict[str, Any]:
    return {"unknown": {"memory": f"the guard failed: {reason_of(problem)}"}}


def _failed(problem: Exception, otherwise: Any) -> Any:
    """The script's own save goes on, without a description."""
    record_without_session("save", problem)
    return otherwise


class Description(Mapping[str, Any]):
    """A mapping that is filled when it is needed, and pickled as a plain ordered dict.

    `make` describes memory now; `missed(why)` is the record of a state that can no longer be described; `saved(record)`, which
    does not raise, is called once, when the state is really written.
    """

    __slots__ = ("__weakref__", "_is_saved", "_make", "_missed", "_record", "_saved", "_thread")

    def __init__(
        self,
        record: Mapping[str, Any] | None = None,
        make: Callable[[], Mapping[str, Any]] = dict,
        missed: Callable[[str], Mapping[str, Any]] = lambda why: {},
        saved: Callable[[Mapping[str, Any]], None] = lambda record: None,
    ) -> None:
        self._record, self._make, self._missed, self._saved = record, make, missed, saved
        self._thread = threading.get_ident()
        self._is_saved = record is not None

    @property
    def is_made(self) -> bool:
        """Whether memory has been described, or can no longer be."""
        return self._record is not None

    @or_else(lambda problem, *_: _failed(problem, _unknown(problem)))
    def made(self) -> Mapping[str, Any]:
        """The record, made now if it was not yet."""
        if self._record is None:
            if threading.get_ident() != self._thread:
                self._record = self._missed("another thread wrote the state while training went on")
            else:
                self._record = self._made_now()
        return self._record

    def _made_now(self) -> Mapping[str, Any]:
        try:
            return self._make()
        except Exception as problem:
            if raised_by_script(problem):
                raise
            return self._missed(f"the guard failed: {reason_of(problem)}")

    def expire(self) -> None:
        """Memory changes now, and nobody described this state before."""
        if self._record is None:
            self._record = self._missed("the state was written only after further optimizer steps")

    def _written(self) -> Mapping[str, Any]:
        record = self.made()
        if not self._is_saved:
            self._is_saved = True
            self._saved(record)
        return record

    def __getitem__(self, key: str) -> Any:
        return self._written()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._written())

    def __len__(self) -> int:
        return len(self._written())

    @or_else(lambda problem, self, *_: _failed(problem, self))
    def __deepcopy__(self, memo: Any) -> "Description":
        self.made()
        return self

    @or_else(lambda problem, *_: _failed(problem, (OrderedDict, (), None, None, iter(_unknown(problem).items()))))
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (OrderedDict, (), None, None, iter(self._written().items()))
