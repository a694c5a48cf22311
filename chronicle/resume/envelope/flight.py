"""The envelope of one launch: when it looks, what it does at a step, at a save and at a load; and the structure of its models.

It looks at the first three steps of every optimizer, and then as often as half a percent of the time allows, at the latest
every `MOST_STEPS`. What it finds is told by `BreachLog`. When it fails itself, it says so once and stays out of the way.
"""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.envelope.motion import FULL_LOOKS, Motion, find_orphans
from chronicle.resume.envelope.promises import Promises
from chronicle.resume.envelope.replicas import Replicas, Share
from chronicle.resume.events import Ended, Loaded, StepBegins
from chronicle.resume.faults import Containment
from chronicle.resume.fingerprint import LiveState, groups_of, held_by, names_of, params_of
from chronicle.resume.hub import Observer
from chronicle.resume.rules import listed
from chronicle.resume.samples import DelayedReads, Snapshot
from chronicle.resume.training import Training

SHARE = 0.005  # of the time may be spent on looks
MOST_STEPS = 50  # without a look


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
    """The flight envelope of one process. `share` brings one value of every rank to the main process without waiting."""

    about = "envelope"

    def __init__(self, training: Training, log: BreachLog, replicas: Replicas, share: Share) -> None:
        self._training, self.log, self._replicas, self._share = training, log, replicas, share
        self._later = DelayedReads()
        self._motion = Motion(log, self._later)
        self._promises = Promises(log, self._later, self._owned, self._is_scaled, self.failed)
        self._structure: Structure | None = None
        self._names: dict[int, str] = {}
        self._live: LiveState | None = None
        self._paces: weakref.WeakKeyDictionary[Any, _Pace] = weakref.WeakKeyDictionary()
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # every optimizer of the process that has stepped
        self._sound: int | None = None  # the last step after which the weights were seen to be finite
        self._rearm: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have had no window since the last save
        self._counting: weakref.ref[Any] | None = None  # the optimizer or engine whose steps time the comparison of replicas
        self.share_of_time = SHARE
        self.off = training.off
        self.contained = Containment(self.failed)

    # ---- called by the session -------------------------------------------------------------------------------------

    def at_save(self) -> str:
        """A checkpoint is being saved: look at every weight. Returns what spoils it, "" for nothing."""
        if self.off:
            return ""
        with self.contained:
            self._motion.close_all(self._training.step)
            self._later.run(wait=True)
            self._look_at_weights(self._training.observe(), self._training.step)
            self._rearm.update(self._paces.keys())
        return self.log.spoils()

    def loaded(self, event: Loaded) -> None:
        """What was seen before says nothing about the state that was loaded."""
        self._motion.forget()
        self._promises.end()
        self._structure, self._live, self._counting = None, None, None
        self._paces.clear()
        self._sound = None
        self.log.healed()

    def ended(self, event: Ended) -> None:
        """Watch nothing more."""
        self.end(for_good=event.for_good)

    def end(self, *, for_good: bool = False) -> None:
        """Remove every hook; with `for_good` watch nothing more in this process."""
        self.off = self.off or for_good
        self._promises.end()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def before_step(self, event: StepBegins) -> None:
        """An optimizer is about to step, or an engine as a whole. Few questions; a look where one, or the time, asks for it."""
        is_engine = event.engine is not None
        key = event.engine if is_engine else event.optimizer
        if self._structure is not None and self._structure.has_turned():
            self._begin()
            self._look_at_structure()
        if self._counting is not None and self._counting() is key and self._replicas.due():
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
            self._promises.before_step(key, self._training.step, self._declared(self._begin()))
        is_doubtful = self._motion.in_doubt and BreachKind.GRADIENTS not in self.log.told
        if pace.steps >= pace.wait or key in self._rearm or is_doubtful:
            self._look(key, pace, is_engine)
            return
        pace.steps += 1

    def _look(self, key: Any, pace: _Pace, is_engine: bool) -> None:
        begun = time.perf_counter()
        step, live = self._training.step, self._begin()
        params = [p for model in live.models for p in model.parameters()]
        groups: list[Mapping[str, Any]] = [{"params": params}]
        if not is_engine:
            groups, params = list(key.param_groups), params_of(key)
        self._motion.close(key, step, None if step is None else step - 1)
        if pace.looks == 0 and not is_engine:
            self._look_for_orphans(key, live)
        self._motion.open(key, groups, self._names, step)
        self._look_at_structure()
        if not is_engine:
            if pace.looks == 0 or key in self._rearm:
                self._promises.arm(key, params)
            if self._structure is not None and self._structure.has_new_parameters():
                self._names = names_of(live.models)
                self._look_for_orphans(key, live)
        self._rearm.discard(key)
        pace.looked(begun, time.perf_counter(), self.share_of_time)

    def _begin(self) -> LiveState:
        """The objects in use; recorded at the first step of a launch or after a load."""
        if self._live is not None and self._structure is not None:
            return self._live
        self._live = live = self._training.observe()
        self._names = names_of(live.models)
        self._structure = Structure(live.models)
        return live

    def _is_ours(self, key: Any, is_engine: bool) -> bool:
        """Whether this optimizer is guarded, or steps parameters of a guarded model."""
        live = self._begin()
        if is_engine or any(key is known for known in live.optimizers):
            return True
        return any(id(p) in self._names for p in params_of(key))

    def _owned(self) -> set[int]:
        """Ids of the parameters of every optimizer that is known or has stepped."""
        known = [*self._stepping, *(self._live.optimizers if self._live else ())]
        return set(map(id, params_of(*known)))

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
            if not held.isdisjoint(map(id, params_of(optimizer))):
                stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
                return stage is None or getattr(stage, "name", "") == "READY"
        return False

    # ---- looks -----------------------------------------------------------------------------------------------------

    def _look_for_orphans(self, optimizer: Any, live: LiveState) -> None:
        words = find_orphans(params_of(optimizer), self._owned(), self._names, live.models)
        if words:
            self.log.tell(BreachKind.ORPHANS, words, step=self._training.step)

    def _look_at_structure(self) -> None:
        for kind, words in self._structure.changes() if self._structure else ():
            self.log.tell(kind, words, step=self._training.step)

    def _look_at_weights(self, live: LiveState, step: int | None) -> None:
        """NaN in any weight that is trained, or in its moments, after `step`."""
        import numpy as np

        named = [(name, p) for model in live.models for name, p in model.named_parameters() if p.requires_grad]
        for optimizer, group in groups_of(live.optimizers):
            named += [(f"{key} of {self._names.get(id(p), '?')}", held) for p, key, held in held_by(optimizer, group)]
        rows = Snapshot([p for _, p in named]).rows()
        bad = [name for (name, _), row in zip(named, rows, strict=True) if row is not None and np.isnan(row).any()]
        if bad:
            self.log.tell(BreachKind.POISONED, f"{listed(bad, 1)} holds NaN", step=step, low=self._sound)
        else:
            self._sound = step

    def _begin_counting(self, key: Any) -> None:
        """Time the comparison of replicas by this optimizer, where there are other ranks."""
        if self._counting is not None and self._counting() is not None:
            return
        if self._training.ranks.world_size > 1:
            self._replicas.begin()
            self._counting = weakref.ref(key)
            if self._replicas.due():
                self._compare_now()

    def _compare_now(self) -> None:
        live, step = self._begin(), self._training.step
        before = None if step is None else step - 1  # the weights are those after the step before
        self._replicas.send(live.models, live.topology, before, self._share, self._later)

    def failed(self, problem: Exception) -> None:
        """A step or one of the hooks failed: that is recorded, the envelope is off, and training goes on."""
        self._training.faults.record(self.about, problem)
        self.end(for_good=True)


# ---- the structure of the models: tied weights, training modes, dtypes ------------------------------------------------


class Structure:
    """What a launch begins with and keeps; `changes()` says what is no longer so. Identity and flags: no tensor is read."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = tuple(models)
        self._modules = tuple((name, module) for model in models for name, module in model.named_modules())
        self._modes = [module.training for _, module in self._modules]
        self._params = [p for model in models for p in model.parameters()]
        self._ids = [id(p) for p in self._params]
        self._dtypes = [p.dtype for p in self._params]
        self._ties = tuple(_ties(models))
        self._tied = [(module._parameters, attribute) for group in self._ties for module, attribute, _ in group]
        self._quick: tuple[Any, ...] = ()  # when it was last asked
        self.has_turned()

    def has_new_parameters(self) -> bool:
        """Whether the models hold other parameters than at the beginning: a layer was replaced or added."""
        return [id(p) for model in self._models for p in model.parameters()] != self._ids

    def has_turned(self) -> bool:
        """Whether a whole model changed its mode, tied weights came apart or the dtype changed, since this was last asked.

        Cheap enough for every step.
        """
        modes, tied = [], []
        for model in self._models:
            modes.append(model.training)
        for parameters, attribute in self._tied:
            tied.append(id(parameters.get(attribute)))
        now = modes, tied, self._params[-1].dtype if self._params else None
        if now == self._quick:
            return False
        self._quick = now
        return True

    def changes(self) -> Iterator[tuple[BreachKind, str]]:
        """What differs from the beginning."""
        yield from self._mode_changes()
        if [p.dtype for p in self._params] != self._dtypes:
            was, now = next((d, p.dtype) for p, d in zip(self._params, self._dtypes, strict=True) if p.dtype != d)
            yield BreachKind.DTYPE, f"parameters became {_plain(now)}, they were {_plain(was)}"
        for group in self._ties:
            held = [(name, module._parameters.get(attribute)) for module, attribute, name in group]
            first = held[0][1]
            for name, other in held[1:]:
                if first is not None and other is not None and other is not first and not _same_storage(first, other):
                    yield BreachKind.UNTIED, f"`{held[0][0]}` and `{name}` were one tensor and are two"

    def _mode_changes(self) -> Iterator[tuple[BreachKind, str]]:
        modes = [module.training for _, module in self._modules]
        if modes == self._modes:
            return
        turned = [
            (name, module)
            for (name, module), was, now in zip(self._modules, self._modes, modes, strict=True)
            if was and not now and not _is_norm(module)
        ]
        if any(module is model for _, module in turned for model in self._models):
            yield BreachKind.MODE, "the model trains in evaluation mode: `train()` was not called again after an evaluation"
            return
        for name, module in turned:
            params = list(module.parameters())
            is_trained = not params or any(p.requires_grad for p in params)
            if is_trained and _feels_mode(module):
                yield BreachKind.MODE, f"`{name}` trains in evaluation mode; it was in training mode at the first step"
                return


def _ties(models: Sequence[Any]) -> Iterator[list[tuple[Any, str, str]]]:
    places: dict[int, list[tuple[Any, str, str]]] = {}
    for model in models:
        for prefix, module in model.named_modules():
            for attribute, param in module._parameters.items():
                if param is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    places.setdefault(id(param), []).append((module, attribute, name))
    return (group for group in places.values() if len(group) > 1)


def _same_storage(first: Any, other: Any) -> bool:
    return bool(first.numel() == 0 or other.numel() == 0 or first.data_ptr() == other.data_ptr())


def _is_norm(module: Any) -> bool:
    return "Norm" in type(module).__name__


def _feels_mode(module: Any) -> bool:
    """Whether evaluation mode changes what the module computes."""
    return any(
        (getattr(part, "p", 0) or 0) > 0 if "Dropout" in type(part).__name__ else "BatchNorm" in type(part).__name__
        for part in module.modules()
    )


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


