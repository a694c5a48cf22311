"""The envelope of one launch: when it looks, and what it does at a step, at a save and at a load.

It looks at the first three steps of every optimizer, and then as often as half a percent of the time allows, at the latest
every `MOST_STEPS`. What it finds is told by `BreachLog`. When it fails itself, it says so once and stays out of the way.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from chronicle.resume.envelope.breach import Breach, BreachKind, BreachLog
from chronicle.resume.envelope.motion import FULL_LOOKS, Motion, find_orphans
from chronicle.resume.envelope.promises import Promises
from chronicle.resume.envelope.samples import (
    DelayedReads,
    Replicas,
    Snapshot,
    are_replicas,
    differing_ranks,
    say_difference,
)
from chronicle.resume.envelope.structure import Structure
from chronicle.resume.events import Ended, Loaded, StepBegins
from chronicle.resume.fingerprint import LiveState, groups_of, held_by
from chronicle.resume.hub import Observer
from chronicle.resume.memory import RankDigest
from chronicle.resume.training import Training

SHARE = 0.005  # of the time may be spent on looks
MOST_STEPS = 50  # without a look
Share = Callable[[str, str, Callable[[Sequence[RankDigest]], None]], None]


class _Pace:
    """When the next look at one optimizer is due."""

    __slots__ = ("ended", "looks", "steps", "wait")

    def __init__(self) -> None:
        self.looks = self.steps = self.wait = 0
        self.ended = 0.0

    def looked(self, begun: float, ended: float, share: float) -> None:
        """Plan the next look from what this one cost."""
        self.looks += 1
        per_step = (begun - self.ended) / max(1, self.steps) if self.ended else 0.0
        self.ended, self.steps = ended, 0
        if self.looks < FULL_LOOKS:
            self.wait = 0
        else:
            self.wait = MOST_STEPS if per_step <= 0 else min(MOST_STEPS, int((ended - begun) / (share * per_step)))


class Envelope(Observer):
    """The flight envelope of one process.

    `share(topic, value, write)` brings one value of every rank to the main process without waiting. `way_out(breach)`: the
    line to type.
    """

    about = "envelope"

    def __init__(
        self,
        training: Training,
        *,
        share: Share,
        way_out: Callable[[Breach], str],
    ) -> None:
        self._observe, self._ranks, self._contained = training.observe, training.ranks, training.contained
        self._step: Callable[[], int | None] = lambda: training.step
        self._share = share
        self.log = BreachLog(training.journal, way_out)
        self._later = DelayedReads()
        self._motion = Motion(self.log.tell, self._later)
        self._promises = Promises(self.log.tell, self._later, self._owned, self._is_scaled, self.failed)
        self._structure: Structure | None = None
        self._names: dict[int, str] = {}
        self._live: LiveState | None = None
        self._paces: weakref.WeakKeyDictionary[Any, _Pace] = weakref.WeakKeyDictionary()
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # every optimizer of the process that has stepped
        self._sound: int | None = None  # the last step after which the weights were seen to be finite
        self._rearm: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have had no window since the last save
        self._replicas: Replicas | None = None
        self._equal_at: int | None = None  # the last step after which the ranks were equal
        self._counting: weakref.ref[Any] | None = None  # the optimizer or engine whose steps time the comparison of replicas
        self.share_of_time = SHARE
        self.off = training.off

    # ---- called by the session -------------------------------------------------------------------------------------

    def at_save(self) -> str:
        """A checkpoint is being saved: look at every weight. Returns what spoils it, "" for nothing."""
        if self.off:
            return ""
        with self._flying():
            self._motion.close_all(self._step())
            self._later.run(wait=True)
            self._look_at_weights(self._observe(), self._step())
            self._rearm.update(self._paces.keys())
        return self.log.spoils()

    def loaded(self, event: Loaded) -> None:
        """What was seen before says nothing about the state that was loaded."""
        self._motion.forget()
        self._promises.end()
        self._structure, self._live, self._replicas, self._counting = None, None, None, None
        self._paces.clear()
        self._sound = None
        for kind in (BreachKind.POISONED, BreachKind.REPLICAS):
            self.log.healed(kind)

    def compare_replicas(self, digests: Sequence[RankDigest], topology: Mapping[str, Any], step: int | None) -> str:
        """The main process has the digests of the ranks at a save: which differ, in words; "" when none does."""
        if self.off or len(digests) < 2:
            return ""
        ranks = differing_ranks(digests) if are_replicas(self._observe().models, topology) else ()
        if not ranks:
            self._equal_at = step
            return ""
        words = say_difference(ranks, len(digests))
        self._tell(BreachKind.REPLICAS, words, step, self._equal_at)
        return f"{BreachKind.REPLICAS.value} {self.log.told[BreachKind.REPLICAS].since}: {words}"

    def ended(self, event: Ended) -> None:
        """Watch nothing more."""
        self.end(for_good=event.for_good)

    def end(self, *, for_good: bool = False) -> None:
        """Remove every hook; with `for_good` watch nothing more in this process."""
        self._promises.end()
        self.off = self.off or for_good

    # ---- a step ----------------------------------------------------------------------------------------------------

    def before_step(self, event: StepBegins) -> None:
        """An optimizer is about to step, or an engine as a whole. Few questions; a look where one, or the time, asks for it."""
        is_engine = event.engine is not None
        key = event.engine if is_engine else event.optimizer
        if self._structure is not None and self._structure.has_turned():
            self._begin()
            self._look_at_structure()
        if self._counting is not None and self._counting() is key and self._replicas is not None and self._replicas.due():
            self._compare_now()
        pace = self._paces.get(key)
        if pace is None:
            self._stepping.add(key)
            if not self._is_ours(key, is_engine):
                return
            pace = self._paces[key] = _Pace()
            self._begin_counting(key)
        if self._later.waiting:
            self._later.run()
        if self._promises.windows and not is_engine:
            self._promises.before_step(key, self._step(), self._declared(self._begin()))
        is_doubtful = self._motion.in_doubt and BreachKind.GRADIENTS not in self.log.told
        if pace.steps >= pace.wait or key in self._rearm or is_doubtful:
            self._look(key, pace, is_engine)
            return
        pace.steps += 1

    def _look(self, key: Any, pace: _Pace, is_engine: bool) -> None:
        begun = time.perf_counter()
        step, live = self._step(), self._begin()
        params = [p for model in live.models for p in model.parameters()]
        groups: list[Mapping[str, Any]] = [{"params": params}]
        if not is_engine:
            groups = list(key.param_groups)
            params = [p for group in groups for p in group["params"]]
        self._motion.close(key, step, None if step is None else step - 1)
        if pace.looks == 0 and not is_engine:
            self._look_for_orphans(key, live)
        self._motion.open(key, groups, self._names, step)
        self._look_at_structure()
        if not is_engine:
            if pace.looks == 0 or key in self._rearm:
                self._promises.arm(key, params)
            if self._structure is not None and self._structure.has_new_parameters():
                self._names = {id(p): name for model in live.models for name, p in model.named_parameters()}
                self._look_for_orphans(key, live)
        self._rearm.discard(key)
        pace.looked(begun, time.perf_counter(), self.share_of_time)

    def _begin(self) -> LiveState:
        """The objects in use; recorded at the first step of a launch or after a load."""
        if self._live is not None and self._structure is not None:
            return self._live
        self._live = live = self._observe()
        self._names = {id(p): name for model in live.models for name, p in model.named_parameters()}
        self._structure = Structure(live.models)
        return live

    def _is_ours(self, key: Any, is_engine: bool) -> bool:
        """Whether this optimizer is guarded, or steps parameters of a guarded model."""
        live = self._begin()
        if is_engine or any(key is known for known in live.optimizers):
            return True
        return any(id(p) in self._names for group in key.param_groups for p in group["params"])

    def _owned(self) -> set[int]:
        """Ids of the parameters of every optimizer that is known or has stepped."""
        known = [*self._stepping, *(self._live.optimizers if self._live else ())]
        return {id(p) for one in known for group in getattr(one, "param_groups", ()) for p in group["params"]}

    def _declared(self, live: LiveState) -> int | None:
        """Backward passes per step, where the trainer announced it and an epoch has as many batches."""
        declared = live.topology.get("accumulation")
        try:
            batches = len(live.reading) if live.reading is not None else None
        except TypeError:
            batches = None
        return declared if isinstance(declared, int) and (batches is None or batches >= declared) else None

    def _is_scaled(self, params: Sequence[Any]) -> bool:
        """Whether a loss scaler has not unscaled the gradients of these parameters yet."""
        scaler = self._live.scaler if self._live else None
        states = getattr(scaler, "_per_optimizer_states", None)
        if scaler is None or states is None or not scaler.is_enabled():
            return False
        held = {id(p) for p in params}
        for optimizer in self._live.optimizers if self._live else ():
            if any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
                stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
                return stage is None or getattr(stage, "name", "") == "READY"
        return False

    # ---- looks -----------------------------------------------------------------------------------------------------

    def _look_for_orphans(self, optimizer: Any, live: LiveState) -> None:
        words = find_orphans(optimizer.param_groups, self._owned(), self._names, live.models)
        if words:
            self._tell(BreachKind.ORPHANS, words)

    def _look_at_structure(self) -> None:
        for kind, words in self._structure.changes() if self._structure else ():
            self._tell(kind, words)

    def _look_at_weights(self, live: LiveState, step: int | None) -> None:
        """NaN in any weight that is trained, or in its moments, after `step`."""
        import numpy as np

        named = [(f"`{name}`", p) for model in live.models for name, p in model.named_parameters() if p.requires_grad]
        for optimizer, group in groups_of(live.optimizers):
            named += [(f"`{key}` of `{self._names.get(id(p), '?')}`", held) for p, key, held in held_by(optimizer, group)]
        rows = Snapshot([p for _, p in named]).rows()
        bad = [name for (name, _), row in zip(named, rows, strict=True) if row is not None and np.isnan(row).any()]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            words = f"{bad[0]}{more} holds NaN"
            self._tell(BreachKind.POISONED, words, step, self._sound)
        else:
            self._sound = step

    def _begin_counting(self, key: Any) -> None:
        """Time the comparison of replicas by this optimizer, where there are other ranks."""
        if self._counting is not None and self._counting() is not None:
            return
        if self._ranks.world_size > 1:
            self._replicas, self._counting = Replicas(self._share, self._later, self._tell_replicas), weakref.ref(key)
            if self._replicas.due():
                self._compare_now()

    def _compare_now(self) -> None:
        if self._replicas is not None:
            live, step = self._begin(), self._step()
            before = None if step is None else step - 1  # the weights are those after the step before
            self._replicas.send(live.models, live.topology, before)

    def _tell_replicas(self, ranks: Sequence[int], step: int | None, name: str) -> None:
        if not ranks:
            self._equal_at = step
            return
        self._tell(BreachKind.REPLICAS, f"{say_difference(ranks, self._ranks.world_size)} (`{name}`)", step, self._equal_at)

    def _tell(self, kind: BreachKind, words: str, step: int | None = None, low: int | None = None) -> None:
        """Something is no longer so at `step`, or now; at `low` it still was, if that is earlier."""
        step = self._step() if step is None else step
        low = low if step is not None and low is not None and low < step else None
        self.log.tell(Breach(kind=kind, step=step, words=words, seen=step, low=low))

    def failed(self, problem: Exception) -> None:
        """A step or one of the hooks failed: recorded, or raised again where it is the script's."""
        with self._flying():
            raise problem

    @contextmanager
    def _flying(self) -> Iterator[None]:
        """An error of the envelope is recorded once; it is then off, and training goes on."""
        with self._contained("envelope"):
            try:
                yield
            except Exception:
                self.off = True
                self.end()
                raise
