"""The gradient of the first step after a save, and after its resume: equal state and batch give an equal gradient.

Weights, configuration and batches do not show what is outside the model: the loss function, its weights and masks, labels that
are no input of the model, clipping, a teacher, a factor that another parallel layout leaves out. The gradient shows them all. A
launch that goes on after a save therefore keeps a sample of its next gradient (`<run>/gradients/<state>.<rank>`, some 10 KB,
one a save, the newest 64 of a launch). A resume of that state compares its own first gradient with it, right before its first
step.

It is compared only where it must be equal:
- every micro-batch of the step was the same (`batches.py` digests what enters the model), and as many ranks began with the
  batches that followed the save, all of them: the gradient is the mean of theirs;
- nothing was random: no generator moved in the first launch between the save and this gradient, or the generators stood
  equally when the first micro-batch entered the model (one rank knows that of itself only, so this counts for a single one).

Anything else is no finding. A launch that ended at its save has left no such gradient, and nothing is compared then. Different
kernels, hardware and orders of summation change the last digits: only a difference that is larger than those is refused.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, Outcome, compared, noted
from chronicle.resume.contract import Expectation
from chronicle.resume.envelope.samples import Snapshot
from chronicle.resume.feed import LENGTH, ROWS
from chronicle.resume.fingerprint import rng_digests

__all__ = ["NAME", "FirstGradient"]

VERSION = 1
NAME = "gradient"
NUM_TENSORS = 128
NUM_KEPT = 64  # files of one launch and rank
NUM_RANKS = 8
NUM_BATCHES = 64  # micro-batches of one step that are compared
QUIET = 1e-4  # of the largest: a tensor with so small a gradient is rounding alone
# Relative difference of the median tensor: above the first it is said, above the second it is refused.
EXACT = (0.01, 0.05)  # float32 on a CPU, measured below 1e-4 for fused, compiled, checkpointed and other attention
ROUGH = (0.1, 0.3)  # half precision, or an accelerator with its own reduced products


class FirstGradient:
    """Keeps and compares first gradients of one rank. `directory` None: nothing is done."""

    def __init__(self, directory: Path | None, rank: int, num_ranks: Callable[[], int] = lambda: 1) -> None:
        self._directory = directory if rank < NUM_RANKS else None
        self._num_ranks = num_ranks
        self._rank = rank
        self._batches: list[str] = []  # since the last step
        self._seen = 0
        self._state = ""  # identity of the state whose next gradient is to be kept
        self._at_save: Mapping[str, str] = {}
        self._entered: Mapping[str, str] = {}  # generators when the first micro-batch entered
        self._wanted = True  # the first step of a launch is compared
        self._kept: list[Path] = []

    # ---- what happens -------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether the next step's gradient is to be kept."""
        return bool(self._state)

    def saved(self, state: str, generators: Mapping[str, str]) -> None:
        """The state of this identity was saved. In the middle of an accumulation its next gradient says nothing."""
        self._state, self._at_save = ("" if self._seen else state), generators
        self._entered = {}

    def loaded(self) -> None:
        """Another state is in memory: the next step is a first one."""
        self._state, self._wanted = "", True
        self._batches, self._seen, self._entered = [], 0, {}

    def enters(self) -> None:
        """A micro-batch is about to enter the model."""
        self._seen += 1
        if self._seen == 1 and (self._state or self._wanted) and self._directory is not None:
            try:
                self._entered = rng_digests()
            except RuntimeError:  # a generator that cannot be read now (a graph is being captured): nothing is compared
                self._state, self._wanted = "", False

    def batch(self, digest: int) -> None:
        """The digest of a micro-batch, in their order."""
        if (self._state or self._wanted) and len(self._batches) < NUM_BATCHES:
            self._batches.append(f"{digest:016x}")

    def stepping(self, place: int, optimizer: Any) -> None:
        """The guarded optimizer at this place is about to step: keep its gradient if it is the first since a save."""
        if self._state and self._entered and place >= 0 and self._directory is not None:
            self._keep(place, optimizer)
        self._state, self._wanted = "", False
        self._batches, self._seen, self._entered = [], 0, {}

    # ---- keep -----------------------------------------------------------------------------------------------------

    def _keep(self, place: int, optimizer: Any) -> None:
        now = rng_digests()
        record = self._describe(place, optimizer, still=now == dict(self._at_save))
        if record is None or self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._state}.{self._rank}"
        path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        self._kept.append(path)
        if len(self._kept) > NUM_KEPT:
            self._kept.pop(0).unlink(missing_ok=True)

    def _describe(self, place: int, optimizer: Any, *, still: bool) -> dict[str, Any] | None:
        """This step's batches, generators and gradient; None where the gradient cannot be read."""
        if not self._batches or self._seen != len(self._batches) or self._seen > NUM_BATCHES:
            return None
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return None  # scaled until the step itself
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        chosen = params[:: max(1, math.ceil(len(params) / NUM_TENSORS))]
        gradients = [None if p.grad is None or p.grad.is_sparse else p.grad for p in chosen]
        rows = Snapshot(gradients).rows()
        if not any(row is not None and row.any() for row in rows):
            return None
        return {
            "v": VERSION,
            "optimizer": place,
            "ranks": self._num_ranks(),
            "batches": list(self._batches),
            "entered": dict(self._entered),
            "still": still,
            "exact": all(p.device.type == "cpu" and str(p.dtype) == "torch.float32" for p in chosen) and not _autocast(),
            "rows": [None if row is None else [float(f"{value:.7g}") for value in row] for row in rows],
        }

    def keep_size(self, state: str, name: str, value: int) -> None:
        """The batches after the save of this state had another size than those before it: a size that grows as planned."""
        if self._directory is not None and state:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._sizes_of(state)
            path.write_text(json.dumps({**self._sizes(state), name: value}) + "\n", encoding="utf-8")

    def _sizes_of(self, state: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{state}.{self._rank}.sizes"

    def _sizes(self, state: str) -> dict[str, Any]:
        try:
            known = json.loads(self._sizes_of(state).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    # ---- compare ----------------------------------------------------------------------------------------------------

    def settle_sizes(self, checks: Sequence[Check], expected: Expectation | None) -> list[Check]:
        """The checks of a first step; a batch that is as large as those after the save were is the run's own plan."""
        state = "" if expected is None or expected.memory is None else str(expected.memory.identity.get("id") or "")
        known = self._sizes(state) if state and self._directory is not None else {}
        cause = "so were the batches after this save in the first pass"
        return [
            replace(check, outcome=Outcome.NOTED, cause=cause)
            if check.name in (ROWS, LENGTH) and check.found == str(known.get(check.name))
            else check
            for check in checks
        ]

    def compare(self, expected: Expectation | None, place: int, optimizer: Any) -> Iterator[Check]:
        """The gradient of the first step after a load against the one that was kept; nothing where it may differ."""
        if not self._wanted or place < 0 or expected is None or expected.memory is None or self._directory is None:
            return
        state = str(expected.memory.identity.get("id") or "")
        kept = _read(self._directory / f"{state}.{self._rank}") if state else None
        own = None if kept is None else self._describe(place, optimizer, still=False)
        if kept is None or own is None or not _comparable(kept, own):
            return
        apart = difference(kept["rows"], own["rows"])
        if apart is None:
            return
        said, refused = EXACT if kept["exact"] and own["exact"] else ROUGH
        where = f"{len(own['rows'])} parameters, {len(own['batches'])} micro-batches equal to those of the first pass"
        words = {"expected": "as after the save", "found": f"{apart:.0%} apart in the median parameter", "where": where}
        cause = "the loss, labels that are no input of the model, clipping, or a scale of the gradient is another one"
        if apart > refused and not expected.accepts(NAME):
            yield compared(NAME, "M6", False, **words, cause=f'{cause}; if that is intended, accept "{NAME}: why"')
        elif apart > said:
            yield noted(NAME, "M6", **words, cause=f"{words['found']}: {cause}, or the arithmetic is less exact")
        else:
            yield compared(NAME, "M6", True, expected=words["expected"], found="equal")


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("v") == VERSION else None


def _comparable(kept: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether both gradients are of one optimizer, of the same batches, and of the same random numbers if any."""
    if any(kept.get(name) != own[name] for name in ("batches", "optimizer", "ranks")):
        return False
    return bool(kept["still"] or (own["ranks"] == 1 and kept["entered"] == own["entered"] and kept["entered"]))


def difference(one: Sequence[Sequence[float] | None], other: Sequence[Sequence[float] | None]) -> float | None:
    """Relative difference of the median tensor, 0 for equal, at most 2; None where the samples are not of the same tensors."""
    if [None if row is None else len(row) for row in one] != [None if row is None else len(row) for row in other]:
        return None
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    sizes = [max(_size(a), _size(b)) for a, b in pairs]
    largest = max(sizes, default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return None
    parts = sorted(
        _size([x - y for x, y in zip(a, b, strict=True)]) / size
        for (a, b), size in zip(pairs, sizes, strict=True)
        if size > QUIET * largest
    )
    return parts[len(parts) // 2] if parts else None


def _size(values: Sequence[float]) -> float:
    """Root of the mean square."""
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))


def _autocast() -> bool:
    import torch

    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
