"""The gradient of the first step after a save, and after its resume: equal state and batch give an equal gradient.

Weights, configuration and batches do not show what is outside the model: the loss function, its weights and masks, labels
that are no input of the model, clipping, a teacher, a factor that another parallel layout leaves out. The gradient shows
them all. A launch that goes on after a save therefore keeps a sample of its next gradient
(`<run>/gradients/<state>.<rank>`, some 10 KB, one a save, the newest 64 of a launch). A resume of that state compares its
own first gradient with it, right before its first step.

It is compared only where it must be equal: every micro-batch of the step was the same, as many ranks began with the batches
that followed the save, all of them, and nothing was random. That is so where no generator moved in the first launch between
the save and this gradient, or where those that moved stood equally in a single process when the first micro-batch entered
the model. Anything else is no finding. Where the first pass went wrong in this very step (an incident is on record), another
gradient is only noted. Kernels, hardware and orders of summation change the last digits: only a larger difference is refused.

An engine (DeepSpeed) takes gradients away as they come. In this one step hooks sample those of every micro-batch before.

What happens inside the step shows at the batch after it. Where gradient and LR were equal, or the gradient cannot be reached
(ZeRO-3), the weights must move alike, and averages that the script named must follow alike. So the update is kept beside the
gradient. Nothing is refused because of it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.resume.beside import StateFiles
from chronicle.resume.checks.check import Check, Outcome, compared, not_compared, noted
from chronicle.resume.compiled import on_gradient
from chronicle.resume.contract import Expectation
from chronicle.resume.data import DataWatch
from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.events import BatchEntered, GradientReady, Inputs, Loaded, Saved
from chronicle.resume.fingerprint import names_of, params_of, rng_digests
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.rules import listed
from chronicle.resume.samples import Snapshot, part_of
from chronicle.resume.training import Training

VERSION = 4
NAME = "gradient"
DRAWN = "random numbers are drawn in this step (dropout), and the generators do not stand as in the first pass"
DRAWN_ON_RANKS = "random numbers are drawn in this step, and how the generators of the other ranks stand is not known here"
CAUSE = "the loss, labels that are no input of the model, clipping, or a scale of the gradient is another one"
NUM_TENSORS = 128
NUM_AVERAGED = 24
QUIET = 1e-4  # of the largest: a tensor with so small a gradient is rounding alone
LOUD = 1e-2  # of the largest: a tensor that is compared by itself
ALONE = 0.2  # relative difference of one such tensor, float32 on a CPU
# Relative difference of the median tensor: above the first it is said, above the second it is refused.
TOLD = 0.002  # there: an incident, which refuses nothing
EXACT = (0.0005, 0.02)  # float32 on a CPU, measured below 1e-4 for fused, compiled, checkpointed and other attention
ROUGH = (0.1, 0.3)  # half precision, or an accelerator with its own reduced products

Rows = Sequence[Sequence[float] | None]  # samples, one row a tensor


class FirstGradient(Observer):
    """Keeps and compares first gradients of one rank. `log` hears of a step that is another one."""

    about = "gradient"

    def __init__(self, training: Training, log: BreachLog, data: DataWatch) -> None:
        self._training, self._log, self._data = training, log, data
        directory = None if training.paths is None else training.paths.gradients_dir
        self._files = StateFiles(directory, training.ranks.rank, version=VERSION)
        self._seen = 0  # micro-batches since the last step, near a save or a load
        self._autocast = False  # whether a micro-batch of this step entered under it
        self._state = ""  # identity of the state whose next gradient is to be kept
        self._at_save: Mapping[str, str] = {}
        self._entered: Mapping[str, str] = {}  # generators when the first micro-batch entered
        self._wanted = True  # the first step of a launch is compared
        self._looks = self._files.keeps  # at the step that comes
        self._expected: dict[str, Any] | None = None  # the record of the step that is about to be taken, which it should repeat
        self._update: _Update | None = None  # of the step that was taken, until the next batch
        self._by_hooks = False  # an engine takes the gradients away: they are sampled as they come
        self._sums: _Sums | None = None

    # ---- what happens -------------------------------------------------------------------------------------------

    def come_by_hooks(self) -> None:
        """An engine takes the gradients away: sample them as they come."""
        self._by_hooks = True

    def saved(self, event: Saved) -> None:
        """The gradient after it is to be kept; in the middle of an accumulation it says nothing."""
        if event.is_of_now and event.memory is not None:
            is_amid, self._state = self._data.is_amid_step, ""
            if not is_amid:
                self._state, self._seen = event.memory.state_id, 0
            self._at_save = event.memory.ranks[0].rng
            self._entered = {}
            self._looks = self._files.keeps and bool(self._state or self._wanted)

    def loaded(self, event: Loaded) -> None:
        """The next step is a first one."""
        self._update = None
        self._reset(wanted=True)

    def _reset(self, *, wanted: bool) -> None:
        self._state, self._wanted = "", wanted
        self._seen, self._entered = 0, {}
        if self._sums is not None:
            self._sums.remove()
        self._sums = None
        self._looks = self._files.keeps and wanted

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """How the generators stand when the first micro-batch of a step enters."""
        if event.kind is Inputs.PASS:
            return None
        if self._update is not None:
            self._settle_update()
        if not self._looks:
            return RESTS
        self._seen += 1
        self._autocast = (self._autocast and self._seen > 1) or _autocast()
        if self._seen > 1:
            return None
        try:
            self._entered = rng_digests()
        except RuntimeError:  # a generator that cannot be read now (a graph is being captured): nothing is compared
            self._state, self._wanted, self._looks = "", False, False
        if self._by_hooks and self._sums is None:
            self._sums = _Sums(_params(None, self._models()), self._failed)
        return None

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """Keep the gradient, or compare it, near a save or a load."""
        if not self._looks:
            return RESTS
        place, optimizer, lrs = self._training.place_of(event.optimizer), event.optimizer, list(event.lrs)
        record, self._expected, state = self._expected, None, ""
        if self._state and self._entered:
            state = self._state
            record = self._keep(state, place, optimizer, lrs)
        if record is not None and record["exact"] and record["lrs"] == lrs:
            weights = _params(optimizer, self._models())
            moved = {"update": weights, "averages": _averaged(self._training.observe().averages)}
            before = {name: (tensors, Snapshot(tensors)) for name, tensors in moved.items()}
            self._update = _Update(record, state, before, rng_digests())
        self._reset(wanted=False)
        return None

    # ---- what it knows of the training ------------------------------------------------------------------------------

    def _num_ranks(self) -> int:
        return self._training.ranks.world_size

    def _models(self) -> Sequence[Any]:
        return self._training.observe().models

    def _failed(self, problem: Exception) -> None:
        """A hook of this failed."""
        self._training.faults.record(self.about, problem)

    def _moved_otherwise(self, words: str) -> None:
        """The first step of this launch is another one than in the first pass."""
        step = self._training.start.start_step
        self._log.tell(BreachKind.UPDATE, words, step=None if step is None else step + 1, seen=self._training.step)

    def _went_wrong(self, identity: Mapping[str, Any]) -> str:
        """Which incident the first step after the save of this state belongs to, in words; "" for none.

        The gradient of that step lies in this run's directory, so the launch is one of this journal.
        """
        step = identity.get("step")
        if not isinstance(step, int):
            return ""
        incident = self._training.journal.read().incident_at(identity.get("launch"), step + 1)
        return "" if incident is None else f"belongs to an incident ({incident.kind} since step {incident.onset_step})"

    # ---- keep one --------------------------------------------------------------------------------------------------

    def _keep(self, state: str, place: int, optimizer: Any, lrs: list[Any]) -> dict[str, Any] | None:
        """Write the record of this step; None where there is nothing that a resume could be held to."""
        record = self._describe(place, optimizer, lrs)
        if record is None:
            return None
        if not any(row is not None and any(row) for row in record["rows"]):
            record["rows"] = []
            if place >= 0:  # no gradient
                return None
        self._files.write(state, record)
        return record

    def _settle_update(self) -> None:
        """The batch after the step enters: keep how far the step moved, or compare that."""
        update, self._update = self._update, None
        found = {} if update is None else update.distances()
        if update is None or not found:
            return
        if not update.state:
            if words := _judge_update(update.record, found):
                self._moved_otherwise(f"the first step {words}")
        elif self._files.read(update.state):  # else somebody removed the run's directory
            self._files.write(update.state, {**update.record, **{name: _short(rows) for name, rows in found.items()}})

    def _describe(self, place: int, optimizer: Any, lrs: list[Any]) -> dict[str, Any] | None:
        """This step's batches, generators and gradient; None where the gradient cannot be read."""
        self._data.batches.settle()
        batches = self._data.of_step
        if not batches or self._seen != len(batches):
            return None
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return None  # scaled until the step itself
        chosen = _params(optimizer, self._models())
        rows = [] if self._sums is None else self._sums.rows()
        if place >= 0:  # an engine takes its gradients away
            rows = Snapshot([p.grad for p in chosen]).rows()
        are_plain = all(p.device.type == "cpu" and str(p.dtype) == "torch.float32" for p in chosen)
        return {
            "optimizer": place,
            "ranks": self._num_ranks(),
            "batches": [f"{digest:016x}" for digest in batches],
            "entered": dict(self._entered),
            "seed": _seed(),
            "drawn": sorted(name for name, now in rng_digests().items() if self._at_save.get(name) != now),
            "exact": are_plain and not self._autocast,
            "rows": _short(rows),
            "lrs": lrs,
        }

    # ---- compare the first one -------------------------------------------------------------------------------------

    def _read(self, expected: Expectation | None) -> dict[str, Any]:
        """The record of the step after the save of this state; empty where none is known."""
        return {} if expected is None or expected.memory is None else self._files.read(expected.memory.state_id)

    def seeded_alike(self, expected: Expectation | None) -> bool:
        """Whether torch was seeded as when this state was saved; unknown is False. A script without a seed draws others."""
        return self._read(expected).get("seed") == _seed()

    def compare(self, expected: Expectation | None, place: int, optimizer: Any) -> Iterator[Check]:
        """The gradient of the first step after a load against the one that was kept; nothing where it may differ."""
        kept = self._read(expected) if self._wanted else {}
        if not kept or expected is None:
            return
        own = self._describe(place, optimizer, [])
        if own is None:
            if kept.get("ranks") == self._num_ranks():
                yield not_compared(NAME, "M6", "the gradient of this step cannot be read before it")
            return
        if not _comparable(kept, own):
            if _is_same_step(kept, own):  # other batches have a check of their own
                yield not_compared(NAME, "M6", DRAWN if own["ranks"] == 1 else DRAWN_ON_RANKS)
            return
        if kept["exact"] and own["exact"] and not expected.accepted and expected.contract is None:
            self._expected = None if _one_is_none(kept["rows"], own["rows"]) else kept
        found = _Difference.between(kept, own)
        if found is not None:
            check = self._judge(found, optimizer, expected)
            self._expected = self._expected if check.outcome is Outcome.EQUAL else None
            yield check

    def _judge(self, found: "_Difference", optimizer: Any, expected: Expectation) -> Check:
        if not found.is_another and found.median <= found.bounds[0] and not found.odd:
            return compared(NAME, "M6", True, expected="as after the save", found="equal")
        assert expected.memory is not None
        told = found.words(_params(optimizer, self._models()), self._models())
        where = f"{found.num} parameters, {self._seen} micro-batches equal to those of the first pass"
        words = {"expected": "as after the save", "found": told, "where": where}
        may = expected.accepts(NAME)
        wrong = self._went_wrong(expected.memory.identity) if found.is_another else ""
        if wrong:  # what went wrong then is no measure
            return noted(NAME, "M6", **words, cause=f"{told}, and not held against it: this step of the first pass {wrong}")
        if found.is_another and not may:
            return compared(NAME, "M6", False, **words, cause=f'{CAUSE}; if that is intended, accept "{NAME}: why"')
        if found.exact and found.median > TOLD and not may:
            self._moved_otherwise(f"the gradient of the first step is not as after the save: {told}; {CAUSE}")
        return noted(NAME, "M6", **words, cause=f"{told}: {CAUSE}, or the arithmetic is less exact")


@dataclass(frozen=True, slots=True)
class _Difference:
    """Two gradients of one step: how far apart the median tensor is, and which single tensors are far apart."""

    median: float
    odd: list[int]
    num: int
    exact: bool

    @classmethod
    def between(cls, kept: Mapping[str, Any], own: Mapping[str, Any]) -> "_Difference | None":
        """That of two records; None where they hold no gradient, or those of other tensors.

        Odd are tensors that are not small and far apart by themselves; a gradient that is gone is one, or one that came.
        """
        sizes = _sizes_of(kept["rows"], own["rows"])
        median = _median_of(sizes)
        if median is None:
            return None
        largest = max(size for size, _ in sizes)
        odd = [i for i, (size, apart) in enumerate(sizes) if size > LOUD * largest and apart > ALONE * size]
        return cls(median, odd, len(sizes), bool(kept["exact"] and own["exact"]))

    @property
    def bounds(self) -> tuple[float, float]:
        """Above the first the median is said, above the second it is refused."""
        return EXACT if self.exact else ROUGH

    @property
    def is_another(self) -> bool:
        """Whether one of them is another gradient."""
        return self.median > self.bounds[1] or bool(self.odd and self.exact)

    def words(self, params: Sequence[Any], models: Sequence[Any]) -> str:
        """The difference for a person; it names the first odd one of the parameters."""
        if not self.odd or self.median > self.bounds[1]:
            return f"{_percent(self.median)} apart in the median parameter"
        known = names_of(models)
        odd = [params[place] for place in self.odd]
        names = [known.get(id(param), f"parameter of shape {tuple(param.shape)}") for param in odd]
        return f"another one in {listed(names, 1)} of {self.num} parameters"


@dataclass(slots=True)
class _Update:
    """A step whose update is awaited: samples before it of the weights, and of the averages that follow them.

    `state`: whose record it is; "": it should move as the record says.
    """

    record: dict[str, Any]
    state: str
    before: Mapping[str, tuple[Sequence[Any], Snapshot]]
    generators: Mapping[str, str]

    def distances(self) -> dict[str, list[Any]]:
        """How far each sample has moved, one array per tensor: of the weights, and of the averages. {} where it was random."""
        is_random = True
        with contextlib.suppress(RuntimeError):  # a generator that cannot be read now
            is_random = rng_digests() != self.generators
        return {} if is_random else {name: _distance(*one) for name, one in self.before.items()}


def _distance(params: Sequence[Any], before: Snapshot) -> list[Any]:
    pairs = zip(before.rows(), Snapshot(params).rows(), strict=True)
    return [None if a is None or b is None or len(a) != len(b) else b - a for a, b in pairs]


def _judge_update(kept: Mapping[str, Any], update: Mapping[str, Sequence[Any]]) -> str:
    """How weights and averages moved otherwise than in the record, in words; "" where they did not."""
    equal = "batch, LR and gradient are equal" if kept["rows"] else "batch and LR are equal"
    for what, name in (("weights", "update"), ("averages", "averages")):
        apart = difference(kept[name], update[name]) if kept.get(name) else None
        if apart is not None and apart > EXACT[1]:
            words = f"moved the {what} otherwise than after the save ({_percent(apart)} apart in the median parameter)"
            return f"{words}, although {equal}: the loss, or something inside the step or after it is another"
    return ""


class _Sums:
    """Samples of the gradients of some parameters, added up over the backward passes of a step as they come."""

    def __init__(self, params: Sequence[Any], lost: Callable[[Exception], None]) -> None:
        self._lost = lost
        half = any(str(p.dtype) == "torch.float16" for p in params)  # multiplied by a loss scale that may be another one
        known = params if not half and not any(hasattr(p, "ds_id") for p in params) else ()  # ZeRO-3 gathers its shards
        self._found: list[Any] = [None] * len(known)
        self._handles = [p.register_hook(self._hook(place)) for place, p in enumerate(known) if p.is_leaf]

    def _hook(self, place: int) -> Any:
        def see(gradient: Any) -> None:
            part = part_of(gradient)
            if part is not None:
                before = self._found[place]
                self._found[place] = part.clone() if before is None else before + part

        def lose(problem: Exception) -> None:
            self.remove()
            self._found = [None] * len(self._found)
            self._lost(problem)

        return on_gradient(see, lose)

    def rows(self) -> list[Any]:
        """One row a parameter, as of a gradient that is there; nothing where none can come."""
        return Snapshot(self._found).rows()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _averaged(averages: Mapping[str, Any]) -> list[Any]:
    """Some parameters of averaged copies of the model; objects that are no modules are not looked into."""
    every = [p for one in averages.values() if callable(getattr(one, "parameters", None)) for p in one.parameters()]
    return _thinned([p for p in every if hasattr(p, "numel")], NUM_AVERAGED)


def _params(optimizer: Any, models: Sequence[Any]) -> list[Any]:
    """The parameters whose gradient and update are sampled; of an engine (None) those of the models."""
    if optimizer is None:
        every = [p for model in models for p in model.parameters() if p.requires_grad]
    else:
        every = [p for p in params_of(optimizer) if p.requires_grad]
    return _thinned(every, NUM_TENSORS)


def _thinned(every: list[Any], most: int) -> list[Any]:
    return every[:: max(1, math.ceil(len(every) / most))]


def _short(rows: Sequence[Any]) -> list[list[float] | None]:
    return [None if row is None else [float(f"{value:.7g}") for value in row] for row in rows]


def _percent(apart: float) -> str:
    return f"{apart:.0%}" if apart >= 0.0095 else f"{apart:.2%}"


def _one_is_none(kept: Rows, own: Rows) -> bool:
    """Whether a gradient is zero in one pass and missing in the other: no difference to the loss, and one to most optimizers.

    `zero_grad(set_to_none=False)` leaves zeros behind, and a fresh process has none until a parameter is first used. A step
    without any gradient is another matter.
    """
    if not all(any(any(row or ()) for row in rows) for rows in (kept, own)):
        return False
    return any((a is None) != (b is None) and not any(a or b or ()) for a, b in zip(kept, own, strict=False))


def _is_same_step(kept: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether both gradients are of one optimizer and of the same batches, on as many ranks."""
    return all(kept.get(name) == own[name] for name in ("batches", "optimizer", "ranks"))


def _comparable(kept: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether both are of the same step, and of the same random numbers if any."""
    if not _is_same_step(kept, own):
        return False
    drawn = kept["drawn"]  # generators that moved between the save and this step: the others had no part in it
    stood_alike = all(kept["entered"].get(name, "") == own["entered"].get(name) for name in drawn)
    return not drawn or (own["ranks"] == 1 and stood_alike)


def difference(one: Rows, other: Rows) -> float | None:
    """Relative difference of the median tensor, 0 for equal, at most 2; None where the samples are not of the same tensors."""
    return _median_of(_sizes_of(one, other))


def _median_of(sizes: Sequence[tuple[float, float]]) -> float | None:
    largest = max((size for size, _ in sizes), default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return None
    parts = sorted(apart / size for size, apart in sizes if size > QUIET * largest)
    return parts[len(parts) // 2] if parts else None


def _sizes_of(one: Rows, other: Rows) -> list[tuple[float, float]]:
    """(larger size, size of the difference) per tensor; no gradient counts as zero. Empty where they are other tensors."""
    found: list[tuple[float, float]] = []
    if len(one) != len(other):
        return found
    for a, b in zip(one, other, strict=True):
        a, b = [0.0] * len(b or ()) if a is None else a, [0.0] * len(a or ()) if b is None else b
        if len(a) != len(b):
            return []
        found.append((max(_size(a), _size(b)), _size([x - y for x, y in zip(a, b, strict=True)])))
    return found


def _size(values: Sequence[float]) -> float:
    """Root of the mean square."""
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))


def _seed() -> str:
    """The seed of torch's generator, in words: a script that never sets one has another in every launch."""
    import torch

    return f"{torch.initial_seed():x}"


def _autocast() -> bool:
    import torch

    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
