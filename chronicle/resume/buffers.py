"""Buffers: what a module keeps beside its weights, and which of it a script changes without a training step.

Running statistics stand still between a step and the next batch, so a resume must find them as they were saved. Other buffers
do not: noise that is drawn anew before every batch, a random mask, a cache, the statistics of a second model that is called
first. Nothing in a name or a class tells one kind from the other, but every launch shows it: what differs between a step, or
a save, and the batch that enters next is changed by the script itself. `OwnBuffers` looks at these moments (the first three
steps of a launch and every save), and a checkpoint carries what it learnt: the names, and a digest of all the others. A resume
compares the others; of those that move it says that they are not compared.

Buffers of one name count together: `blocks.*.noise` are all of them. torch is imported inside the functions.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, compared, not_compared, noted
from chronicle.resume.fingerprint import own_shard, sample_of, saved_buffers
from chronicle.resume.memory import RankDigest

_NUMBER = re.compile(r"[0-9]+")
NUM_NAMES = 64
NUM_STEPS = 3  # of a launch, after which the buffers are looked at
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
CALIBRATED = 0.05  # so little of the old running statistics is left that their state at the load does not matter any more
OWN = "this training changes {} between a step and the next batch"


BufferSample = list[tuple[str, Any]]  # (name, sample) of every saved buffer at one moment, still on its device


def sample_buffers(models: Sequence[Any]) -> BufferSample:
    """A sample of the saved buffers of these models as they are now."""
    samples = []
    for index, model in enumerate(models):
        for name, buffer in saved_buffers(model):
            place = f"{index}.{name}" if len(models) > 1 else name
            samples.append((_NUMBER.sub("*", place), sample_of(own_shard(buffer)).clone()))
    return samples


def digest_of(samples: BufferSample, without: Collection[str] = ()) -> str:
    """64 bits of the buffers whose name is not in `without`; "" where none is left."""
    import torch

    total, any_left = hashlib.sha256(), False
    for name, sample in samples:
        if name not in without:
            any_left = True
            total.update(f"{name}:{sample.numel()}:{sample.dtype}".encode())
            total.update(sample.cpu().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16] if any_left else ""


def moved_between(before: BufferSample, after: BufferSample) -> tuple[str, ...]:
    """Names of the buffers that are others later on; what only one of the two has did not move."""
    import torch

    found = []
    for (name, sample), (name_now, sample_now) in zip(before, after, strict=False):
        is_same = name == name_now and (sample.shape, sample.dtype) == (sample_now.shape, sample_now.dtype)
        if is_same and sample.device == sample_now.device and not torch.equal(sample, sample_now):
            found.append(name)
    return tuple(dict.fromkeys(found))


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


# ---- what a training moves itself ------------------------------------------------------------------------------------


class OwnBuffers:
    """Learns, on one rank, which buffers this training changes without a step. `directory` None: it keeps nothing on disk."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self.names: tuple[str, ...] = ()
        self._looked: BufferSample | None = None
        self._saved: tuple[str, BufferSample, tuple[str, ...]] | None = None  # state, its buffers, the names known then
        self._steps = 0

    def resumes(self, names: Sequence[str]) -> None:
        """The training goes on from a state that was saved with these names."""
        self.names, self._looked, self._saved, self._steps = tuple(names), None, None, 0

    def loaded(self) -> None:
        """Another state is in memory: it differs for that reason."""
        self._looked = self._saved = None

    @property
    def looks_at_steps(self) -> bool:
        """Whether `stepping` is to be told of the next step."""
        return self._steps < NUM_STEPS

    @property
    def awaits_batch(self) -> bool:
        """Whether `enters` is to be told of the next batch."""
        return bool(self._looked) or self._saved is not None

    def stepping(self, models: Sequence[Any]) -> None:
        """A step is about to be taken; all forward passes that it uses are done."""
        self._steps += 1
        self._looked = sample_buffers(models)

    def saved(self, state: str, models: Sequence[Any]) -> None:
        """A checkpoint with this identity was written."""
        sample = sample_buffers(models)
        self._saved = (state, sample, self.names) if sample else None

    def enters(self, models: Sequence[Any]) -> None:
        """A batch of the training is about to enter the model."""
        now = sample_buffers(models)
        for before in (self._looked, self._saved[1] if self._saved else None):
            found = moved_between(before, now) if before else ()
            self.names = tuple(dict.fromkeys((*self.names, *found)))[:NUM_NAMES]
        if self._saved is not None and self._directory is not None:
            state, sample, known = self._saved
            if state and self.names != known:  # the checkpoint itself cannot say so any more
                self._directory.mkdir(parents=True, exist_ok=True)
                record = {"names": list(self.names), "fixed": digest_of(sample, self.names)}
                self._path(state).write_text(json.dumps(record) + "\n", encoding="utf-8")
        self._looked = self._saved = None

    def fixed(self, models: Sequence[Any]) -> str:
        """Digest of the buffers that stand still; "" where none is known to move."""
        return digest_of(sample_buffers(models), self.names) if self.names else ""

    def of(self, state: str, saved: RankDigest) -> tuple[tuple[str, ...], str]:
        """What is known to move of a saved state, and the digest of its other buffers."""
        try:
            record = json.loads(self._path(state).read_text(encoding="utf-8")) if self._directory and state else None
        except (OSError, ValueError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("names"), list):
            return tuple(str(name) for name in record["names"]), str(record.get("fixed") or "")
        return tuple(saved.own_buffers), saved.fixed_buffers

    def _path(self, state: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{state}.{self._rank}.buffers"


# ---- the buffers of a resume -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Calibration:
    """Forward passes without gradients between a load and the first batch: in training mode they move running statistics.

    `before`: digests of the buffers right before such passes and right after a load. `left`: the share of the running
    statistics that is older than these passes, in the module that keeps most.
    """

    before: set[str] = field(default_factory=set)
    passes: int = 0  # in training mode
    evaluations: int = 0
    left: float = 1.0
    looked: bool = False  # at the buffers before the first pass after the load
    at_evaluation: BufferSample | None = None  # before the first one
    moved: tuple[str, ...] = ()  # by evaluations; no running statistics, which only training mode moves

    def evaluated(self, now: BufferSample) -> None:
        """The first batch comes: what evaluations before it moved."""
        if self.at_evaluation is not None:
            moved = moved_between(self.at_evaluation, now)
            self.moved = () if any(name.endswith(RUNNING) for name in moved) else moved

    @property
    def words(self) -> str:
        """How many passes there were."""
        number = self.passes or self.evaluations
        passes = "one forward pass" if number == 1 else f"{number} forward passes"
        return f"{passes}{' in training mode' if self.passes else ''} without gradients came before the first batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBuffers:
    """The buffers of a resume when its first batch came, and what is known of them: `own` ones move, `fixed` ones do not."""

    now: str = ""
    own: tuple[str, ...] = ()
    fixed_saved: str = ""
    fixed_now: str = ""
    calibration: Calibration | None = None


def check_buffers(saved: str, loaded: LoadedBuffers, where: str) -> Check:
    """Buffers as they were saved, but for those that the script itself changes before its first batch."""
    words = {"expected": saved, "found": loaded.now, "where": where}
    calibration = loaded.calibration
    if saved != loaded.now and loaded.own and loaded.fixed_saved == loaded.fixed_now:
        some = ", ".join(f"`{name}`" for name in loaded.own[:3]) + (" and others" if len(loaded.own) > 3 else "")
        return not_compared("buffers", "M1", OWN.format(some) + "; the others are as saved", where=where)
    if saved != loaded.now and calibration is not None and (calibration.passes or calibration.moved):
        if saved in calibration.before:
            return noted("buffers", "M1", **words, cause=f"as saved after the load; {calibration.words} and moved them")
        if calibration.passes and calibration.left <= CALIBRATED:
            why = f"running statistics were computed anew: {calibration.words}"
            return not_compared("buffers", "M1", why, where=where)
    cause = "running statistics (batch norm) or other buffers were not restored"
    return compared("buffers", "M1", saved == loaded.now, cause=cause, **words)
