"""Plain torch under guard: one line, `run = chronicle.attach("tr-190", model, optimizer, scheduler)`.

`optimizer.state_dict()` stays as torch made it. The description of memory is kept in the run's directory, under the digest of
the state that was saved (`records.py`), and found again by the digest of the state that is loaded: wherever the file was moved.
Torch's own hooks tell the guard that a state is taken (`state_dict`), loaded (`load_state_dict`), and of the first step.
Generators are not compared, because the script may not save them.

Memory is described when the state is taken. That something was saved is known once torch writes it (`torch.save`, a distributed
checkpoint). A script may take the state at every step and throw it away: after `MOST_UNSEEN` states that nobody was seen
writing, one is described when it is written before the next step, and else not.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from chronicle.errors import ChronicleError
from chronicle.resume.adapters.hooks import dtype_of, hear_saves, hook_optimizer_steps, split_of
from chronicle.resume.compiled import ModelHook
from chronicle.resume.contract import Options, Said, options_from
from chronicle.resume.events import Begins, Loaded, Logged, Saved
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
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.memory import WHOLE, Memory
from chronicle.resume.records import NOT_RECORDED, optimizer_states, state_digest
from chronicle.resume.session import GuardSession

MOST_BEGUN = 8  # asynchronous saves, and states that are known by their digest
MOST_UNSEEN = 16  # states that are described though nobody was seen writing them


@dataclass(slots=True)
class Taken:
    """A state that the script has asked for, and what is known of the moment."""

    digest: str
    at: int  # steps that had begun
    seen: str  # position in the data
    thread: int
    memory: Memory | None = None  # once it is described
    is_first: bool = False  # it was taken before the first step
    is_written: bool = False


@or_else(lambda problem, *args, run=None, **_: _Unguarded(problem, args[0] if args else run))
def attach(
    run: str | Path | None,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *,
    data: Any = None,
    accumulation: int | None = None,
    scaler: Any = None,
    **said: Unpack[Said],
) -> "AttachedRun":
    """Put a training loop under guard. `run`: name or directory.

    `model`, `optimizer`, `scheduler` may be single objects or sequences of them. `data`: the DataLoader that is trained
    from, needed for `chronicle rollback --skip-batches`; one optimizer step takes `accumulation` of its batches.
    What else can be said: `Said`, as for `guard`.
    """
    options = options_from(run, said)
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
        self._last: Taken | None = None
        self._unseen = 0  # states described that nobody was seen writing
        self._recorded: dict[str, Taken] = {}  # by digest, the newest last
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
        hook_optimizer_steps(self.session, takes_over=self._live.optimizers)
        hear_saves(self)
        for model in self._live.models:
            model.register_load_state_dict_post_hook(ModelHook(self._weights_loaded, self._load_failed))
        if self._live.models:
            self.session.hear(Begins(model=self._live.models[0], says_so=False))
        if why := _trained_before(self._live):
            why = f"{why} when `attach` was called: call it before the load"
            self.session.start.learn(state_loaded=True, no_basis=why)

    def _weights_loaded(self, model: Any, incompatible: Any) -> None:
        if not self.session.training.has_stepped:
            self.session.loads.saw_weights()

    def now_trains(self, live: LiveState) -> None:
        """The loop trains with these objects from now on: more of them, or the same with their schedulers."""
        self._live = live

    @shielded("save")
    def saved(self, path: str | Path) -> None:
        """Tell the guard where a checkpoint was written: a directory gets a manifest, a file an entry in the journal."""
        if self.session is None:
            return
        target, taken = Path(path).absolute(), self._taken
        memory, _ = self._begun.pop(target, (None, 0))
        if memory is None and taken is not None:
            memory = taken.memory
        if memory is None and not target.is_dir():
            memory = self.session.describe()
            self.session.records.keep(memory, taken.digest if taken else "")
        # where none is taken, a thread of the script may have written what was taken some steps ago
        self.session.hear(Saved(path=target, memory=memory, is_of_now=taken is not None))

    @shielded("save")
    def async_save_begins(self, directory: str | Path) -> None:
        """Torch writes the state of now there while the loop goes on; `saved` is called when it is whole."""
        if self.session is None or self.session.off:
            return
        begun = self.session.describe(), threading.get_ident()
        self.session.hear(Saved(memory=begun[0], is_over=False))
        if (taken := self._taken) is not None:
            self._record(taken)
            self._is_written(taken)
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
        step = self.session.step
        if step is not None:
            self.session.hear(Logged(step=step, values=values))

    def lost(self, where: str, problem: Exception) -> None:
        """One of the functions above failed."""
        if self.session is None:
            record_without_session(where, problem)
        else:
            self.session.faults.record(where, problem)

    # ---- the state of the optimizer is taken, and written ----------------------------------------------------------

    def _on_save(self, optimizer: Any, state: dict[str, Any]) -> None:
        if self.session.off:
            return
        digest = state_digest(state)
        taken = self._taken
        if taken is None or taken.digest != digest or taken.memory is not None:
            training, seen = self.session.training, self.session.data.position
            self._last = Taken(digest=digest, at=training.num_begun, seen=seen, thread=threading.get_ident())
            if self._unseen < MOST_UNSEEN:
                self._record(self._last)
                self._unseen += 1

    def _save_failed(self, problem: Exception) -> None:
        self.session.faults.record("save", problem)

    @shielded("save")
    def writes(self, written: Any) -> None:
        """Torch writes this object now. Where it holds the optimizer's state, that state is saved."""
        if self.session is None or self.session.off:
            return
        digests = [state_digest(state) for state in optimizer_states(written)]
        taken = self._taken
        if taken is not None and taken.digest in digests and taken.thread == threading.get_ident():
            self._record(taken)
            self._is_written(taken)
            return
        for digest in filter(None, digests):  # a copy, or another thread writes while training goes on
            if digest in self._recorded:
                self._is_written(self._recorded[digest])

    @property
    def _taken(self) -> Taken | None:
        """What was taken since the last step; what was taken before is not described any more."""
        last = self._last
        return last if last is not None and last.at == self.session.training.num_begun else None

    def _record(self, taken: "Taken") -> None:
        """Keep the description of memory now, which is that of the taken state."""
        if taken.memory is not None:
            return
        # a load will overwrite what is taken before the first step: nothing has been trained yet
        training = self.session.training
        taken.is_first = not training.has_stepped and not training.has_stepped_unseen
        taken.memory = self._describe(taken)
        self.session.records.keep(taken.memory, taken.digest, replaces=not taken.is_first)
        self._recorded[taken.digest] = taken
        if len(self._recorded) > MOST_BEGUN:
            del self._recorded[next(iter(self._recorded))]

    def _describe(self, taken: "Taken") -> Memory:
        """Memory now; the position in the data is that of the moment when the state was taken."""
        try:
            return self.session.describe(taken.seen)  # type: ignore[no-any-return]
        except Exception as problem:
            if raised_by_script(problem):
                raise
            last_resort(self._save_failed, problem)
            return Memory(unknown={WHOLE: f"the guard failed: {reason_of(problem)}"})

    def _is_written(self, taken: "Taken") -> None:
        """This state is being written: the journal knows that something was saved."""
        memory = taken.memory
        if memory is None or taken.is_first or taken.is_written:
            return
        taken.is_written = True
        self._unseen -= 1
        self.session.hear(Saved(memory=memory, digest=taken.digest))

    def _on_load(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._last = None  # what was taken before is overwritten
        if self.session.training.retired:
            return  # the session that took over reads the record
        memory = self.session.records.of_state(state_digest(state))
        why = memory.unknown.get(WHOLE, "") if memory else NOT_RECORDED
        self.session.hear(Loaded(memory=None if why else memory, why=why))

    def _before_load(self, optimizer: Any, state: dict[str, Any]) -> None:
        self.session.reference.options.before_load((optimizer,))

    def _after_load(self, optimizer: Any) -> None:
        self.session.reference.options.after_load((optimizer,))

    def _load_failed(self, problem: Exception) -> None:
        self.session.faults.record("load", problem)

    def _observe(self) -> LiveState:
        ranks, dtype = self.session.ranks.world_size, dtype_of(self._live.models[:1])
        size = getattr(self._live.feed, "batch_size", None)
        topology: dict[str, Any] = {"world_size": ranks, **split_of(size, self._accumulation or 1, ranks)}
        if dtype:
            topology["dtype"] = dtype
        if self._accumulation is not None:
            topology["accumulation"] = self._accumulation
        return replace(self._live, topology=topology)


class _Unguarded(AttachedRun):
    """What `attach` returns when the guard itself failed: a run without one, which is said and recorded."""

    gave_up = True

    def __init__(self, problem: Exception, run: Any) -> None:
        record_without_session("attach", problem, run)


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


def _many(thing: Any) -> tuple[Any, ...]:
    if thing is None:
        return ()
    return tuple(thing) if isinstance(thing, Iterable) and not hasattr(thing, "state_dict") else (thing,)
