"""What a training moves without a step: found as one difference of flat facts, key by key.

Buffers and the script's own objects stand still between a step and the next batch, so a resume must find them as they were
saved. Some do not: noise that is drawn anew before every batch, a cache, a stream that reads ahead. No name and no class tells
one kind from the other, but every launch shows it: what differs between a step, or a save, and the batch that enters next is
moved by the script itself. `Moving` compares the facts of these moments (the first three steps of a launch and every save). A
checkpoint carries the keys that moved; what they were when the next batch came lies in `<run>/sequels/<state>.<rank>.moved`.
A resume must find each key as it was saved, or as it was then. One that moves and is otherwise is not compared, which is said.

The key of a buffer is its name with `*` for numbers: `blocks.*.noise` are all of them. torch is imported in the functions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.resume.beside import StateFiles
from chronicle.resume.checks.check import Check, compared, failed, not_compared, noted
from chronicle.resume.events import BatchEntered, Gradient, GradientReady, Inputs, Loaded, Saved
from chronicle.resume.fingerprint import LiveState, object_digests, saved_buffers
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.rules import RULES, listed
from chronicle.resume.samples import digest, digest_and_each, is_captured, own_shard
from chronicle.resume.training import Training

Facts = Mapping[str, str]  # key -> a few bits of its value

_NUMBER = re.compile(r"[0-9]+")
VERSION = 1
NUM_KEYS = 64
NUM_STEPS = 3  # of a launch, after which is looked
OBJECT = "object {}"  # key of one of the script's own objects
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
MOVES = "this training changes {} between a step and the next batch"


def facts_of_buffers(models: Sequence[Any]) -> dict[str, str]:
    """The saved buffers of these models as they are now, by key."""
    names, tensors = [], []
    for index, model in enumerate(models):
        for name, buffer in saved_buffers(model):
            place = f"{index}.{name}" if len(models) > 1 else name
            names.append(_NUMBER.sub("*", place))
            tensors.append(own_shard(buffer))
    _, each = digest_and_each(tensors)
    found = dict.fromkeys(names, "")
    for at, name in enumerate(names):
        found[name] += each[4 * at : 4 * at + 4]
    return {name: text if len(text) <= 16 else digest(text.encode()) for name, text in found.items()}


def facts_of(live: LiveState) -> dict[str, str]:
    """Buffers and the script's own objects."""
    return {**facts_of_buffers(live.models), **facts_of_objects(live)}


def facts_of_objects(live: LiveState) -> dict[str, str]:
    """The script's own objects as they are now."""
    return {OBJECT.format(name): digest for name, digest in object_digests(live).items()}


def moved(before: Facts, after: Facts) -> list[str]:
    """Keys that both have, with another value."""
    return [key for key, value in before.items() if after.get(key, value) != value]


class Moving(Observer):
    """Learns, on one rank, which facts this training moves without a step."""

    about = "buffers"

    def __init__(self, training: Training) -> None:
        self._training = training
        directory = None if training.paths is None else training.paths.sequels_dir
        self._files = StateFiles(directory, training.ranks.rank, version=VERSION, ending=".moved")
        self.keys: tuple[str, ...] = ()
        self._looked: Facts = {}
        self._saved: tuple[str, Facts] | None = None  # state, and its facts
        self._steps = 0

    def resumes(self, keys: Sequence[str]) -> None:
        """The training goes on from a state of which these are known to move."""
        self.keys, self._looked, self._saved, self._steps = tuple(keys), {}, None, 0

    def loaded(self, event: Loaded) -> None:
        """What differs now differs for that reason."""
        self._looked, self._saved = {}, None

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """All forward passes of the step are done, unless it has a closure."""
        if self._steps >= NUM_STEPS:
            return RESTS
        if event.gradient is not Gradient.AT_END:
            self._steps += 1
            self._looked = facts_of(self._training.observe())
        return None

    def saved(self, event: Saved) -> None:
        """The facts of the save, which the next batch is compared with."""
        if event.is_of_now and event.memory is not None:
            facts = facts_of(self._training.observe())
            self._saved = (event.memory.state_id, facts) if facts else None

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """What differs from the step or the save before this batch was moved by the script."""
        awaits = bool(self._looked or self._saved)
        if not awaits and self._steps >= NUM_STEPS:
            return RESTS
        if event.kind is Inputs.PASS or not awaits or is_captured():
            return None
        now = facts_of(self._training.observe())
        state, saved = self._saved or ("", {})
        changed = moved(saved, now)
        self.keys = tuple(dict.fromkeys((*self.keys, *moved(self._looked, now), *changed)))[:NUM_KEYS]
        if changed:  # the checkpoint itself cannot say so any more
            self._files.write(state, {"moved": {key: now[key] for key in changed}})
        self._looked, self._saved = {}, None
        return None

    def after(self, state: str) -> Facts:
        """What had moved when the next batch came after this save, and how it was then; {} where nothing is known."""
        return dict(self._files.read(state).get("moved") or {})


# ---- the buffers and objects of a resume -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """What one rank held right after the load, or (a plain loop) when its first batch came.

    Running statistics change with the first forward pass, flags and the script's own objects whenever the script likes. Their
    state at the load is therefore kept, and judged before the first step.
    """

    facts: Facts = field(default_factory=dict)  # buffers when the first batch came, and the script's own objects
    earlier: Facts = field(default_factory=dict)  # buffers right after the load, or before the first forward pass
    passes: int = 0  # forward passes in training mode without gradients, before the first batch
    then: Facts = field(default_factory=dict)  # what had moved when the next batch came in the first pass
    keys: Sequence[str] = ()  # that are known to move
    objects_before: Facts = field(default_factory=dict)  # before the load: as the script made them
    frozen: str = ""
    unregistered: Facts = field(default_factory=dict)

    def explains(self, key: str, saved: str) -> bool:
        """Whether a buffer was as saved before the forward passes, and these may have moved it."""
        return self.earlier.get(key) == saved and bool(self.passes or not key.endswith(RUNNING))


def check_buffers(each: Facts, loaded: LoadedState, where: str) -> Check:
    """Buffers as they were saved, but for those that the script itself changes before a batch."""
    wrong = [key for key in moved(each, loaded.facts) if loaded.facts[key] != loaded.then.get(key)]
    own = [key for key in wrong if key in loaded.keys]
    lost = [key for key in wrong if key not in loaded.keys and not loaded.explains(key, each[key])]
    passes = "forward passes without gradients came before the first batch"
    words = {"expected": "as at the save", "found": listed(wrong) or "equal", "where": where}
    if lost and loaded.passes and all(key.endswith(RUNNING) for key in lost):
        return not_compared("buffers", "M1", f"running statistics were computed anew: {loaded.passes} {passes}", where=where)
    if lost:
        return failed("buffers", "M1", **{**words, "found": f"{listed(lost)} differ"}, cause=RULES["buffers"].cause)
    if own:
        return not_compared("buffers", "M1", f"{MOVES.format(listed(own))}; the others are as saved", where=where)
    if wrong:
        return noted("buffers", "M1", **words, cause=f"as saved after the load; {passes} and moved them")
    return compared("buffers", "M1", True, **words)
