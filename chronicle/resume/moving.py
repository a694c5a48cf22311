"""What a training moves without a step: found as one difference of flat facts, key by key.

Buffers and the script's own objects stand still between a step and the next batch, so a resume must find them as they were
saved. Some do not: noise that is drawn anew before every batch, a cache, a stream that reads ahead. No name and no class tells
one kind from the other, but every launch shows it: what differs between a step, or a save, and the batch that enters next is
moved by the script itself. `Moving` compares the facts of these moments (the first three steps of a launch and every save). A
checkpoint carries the keys that moved; what they were when the next batch came lies in `<run>/sequels/<state>.<rank>.moved`.
A resume must find each key as it was saved, or as it was then. One that moves and is otherwise is not compared, which is said.

The key of a buffer is its name with `*` for numbers: `blocks.*.noise` are all of them. torch is imported in the functions.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, compared, not_compared, noted
from chronicle.resume.events import BatchEntered, Gradient, GradientReady, Inputs, Loaded, Saved
from chronicle.resume.fingerprint import LiveState, digest_and_each, object_digests, own_shard, saved_buffers
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.prints import is_captured
from chronicle.resume.training import Training

Facts = Mapping[str, str]  # key -> a few bits of its value

_NUMBER = re.compile(r"[0-9]+")
NUM_KEYS = 64
NUM_STEPS = 3  # of a launch, after which is looked
OBJECT = "object {}"  # key of one of the script's own objects
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
CALIBRATED = 0.05  # so little of the old running statistics is left that their state at the load does not matter any more
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
    return {name: text if len(text) <= 16 else hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in found.items()}


def facts_of(live: LiveState) -> dict[str, str]:
    """Buffers and the script's own objects."""
    objects = {OBJECT.format(name): digest for name, digest in object_digests(live).items()}
    return {**facts_of_buffers(live.models), **objects}


def moved(before: Facts, after: Facts) -> list[str]:
    """Keys that both have, with another value."""
    return [key for key, value in before.items() if after.get(key, value) != value]


class Moving(Observer):
    """Learns, on one rank, which facts this training moves without a step."""

    about = "buffers"

    def __init__(self, training: Training) -> None:
        self._training, self._rank = training, training.ranks.rank
        self._directory = None if training.paths is None else training.paths.sequels_dir
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
        if changed and state and self._directory is not None:  # the checkpoint itself cannot say so any more
            self._directory.mkdir(parents=True, exist_ok=True)
            record = {key: now[key] for key in changed}
            self._path(state).write_text(json.dumps(record) + "\n", encoding="utf-8")
        self._looked, self._saved = {}, None
        return None

    def after(self, state: str) -> Facts:
        """What had moved when the next batch came after this save, and how it was then; {} where nothing is known."""
        try:
            record = json.loads(self._path(state).read_text(encoding="utf-8")) if self._directory and state else {}
        except (OSError, ValueError):
            record = {}
        return record if isinstance(record, dict) else {}

    def _path(self, state: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{state}.{self._rank}.moved"


# ---- forward passes before the first batch -----------------------------------------------------------------------------


def running_shares(models: Iterable[Any]) -> list[float]:
    """Of every module with running statistics in training mode: the share of them that a forward pass leaves as it was."""
    shares = []
    for model in models:
        for module in model.modules():
            if not module.training or getattr(module, "running_mean", None) is None or not hasattr(module, "momentum"):
                continue
            if module.momentum is None:  # the mean over all passes
                passes = int(getattr(module, "num_batches_tracked", None) or 0)
                shares.append(passes / (passes + 1))
            else:
                shares.append(1 - float(module.momentum))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Forward passes without gradients between a load and the first batch: in training mode they move running statistics.

    `first`: the buffers right before the first of them. `left`: the share of the running statistics that is older than these
    passes, in the module that keeps most.
    """

    first: Facts | None = None
    passes: int = 0  # in training mode
    evaluations: int = 0
    left: float = 1.0

    def after_pass(self, live: LiveState, training: bool) -> "Calibration":
        """With one more pass, which is about to begin."""
        shares = running_shares(live.models) if training else []
        if training and not shares:
            return self
        first = facts_of_buffers(live.models) if self.first is None else self.first
        left = self.left * max(shares, default=1.0)
        one = int(training)
        return replace(self, first=first, left=left, passes=self.passes + one, evaluations=self.evaluations + 1 - one)

    @property
    def words(self) -> str:
        """How many passes there were."""
        number = self.passes or self.evaluations
        passes = "one forward pass" if number == 1 else f"{number} forward passes"
        return f"{passes}{' in training mode' if self.passes else ''} without gradients came before the first batch"

    def moved(self, key: str, saved: str) -> bool:
        """Whether a buffer was as saved before these passes, and they may have moved it."""
        return (self.first or {}).get(key) == saved and bool(self.passes or not key.endswith(RUNNING))


# ---- the buffers of a resume -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBuffers:
    """The buffers of a resume when its first batch came: all (`now`), each, and those that are known to move (`keys`).

    `then`: how those that moved were when the next batch came in the first pass.
    """

    now: str = ""
    each: Facts = field(default_factory=dict)
    then: Facts = field(default_factory=dict)
    keys: Sequence[str] = ()
    calibration: Calibration = Calibration()


def check_buffers(saved: str, each: Facts, loaded: LoadedBuffers, where: str) -> Check:
    """Buffers as they were saved (`saved` all, `each` by key), but for those that the script itself changes before a batch."""
    words = {"expected": saved, "found": loaded.now, "where": where}
    if saved == loaded.now:
        return compared("buffers", "M1", True, **words)
    calibration = loaded.calibration
    wrong = [key for key in moved(each, loaded.each) if loaded.each[key] != loaded.then.get(key)]
    lost = [key for key in wrong if key not in loaded.keys and not calibration.moved(key, each[key])]
    own = [key for key in wrong if key in loaded.keys]
    if lost or not each:
        if calibration.passes and calibration.left <= CALIBRATED and all(key.endswith(RUNNING) for key in lost):
            why = f"running statistics were computed anew: {calibration.words}"
            return not_compared("buffers", "M1", why, where=where)
        cause = "running statistics (batch norm) or other buffers were not restored"
        return compared("buffers", "M1", False, cause=cause, **{**words, "found": _named(lost) or loaded.now})
    if own:
        return not_compared("buffers", "M1", f"{MOVES.format(_named(own))}; the others are as saved", where=where)
    if wrong:
        return noted("buffers", "M1", **words, cause=f"as saved after the load; {calibration.words} and moved them")
    return compared("buffers", "M1", True, **{**words, "found": "equal, or as when the next batch came in the first pass"})


def _named(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys[:3]) + (" and others" if len(keys) > 3 else "")
