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

Anything else is no finding. Where the first pass went wrong in this very step (an incident is on record), another gradient
is what one hopes for, and is only noted. A launch that ended at its save has left no such gradient, and nothing is compared
then. Different kernels, hardware and orders of summation change the last digits: only a difference that is larger than
those is refused.

An engine (DeepSpeed) takes gradients away as they come. In this one step hooks sample those of every micro-batch before.

What happens inside the step itself is seen right after it: where the gradient was equal, or cannot be reached (ZeRO-3, whose
shards are gathered), and the LR was the same, the weights must move alike. So the first update is kept beside the gradient. A
resume that moves its weights otherwise is told so: a hook that changes weights or LR inside the step, another optimizer.
Averages that the script named are part of the update: they must follow as they did.

The steps after the first one are done again, too. Of `NUM_NEXT` of them a smaller sample is kept, one line of JSON each. A
single rank compares them as long as everything was equal in the step before. So the first step that is another one is told:
labels, clipping, a layer or the weights themselves that change in the middle of a launch. Nothing is refused because of it.
"""

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, Outcome, compared, not_compared, noted
from chronicle.resume.compiled import outside_graphs
from chronicle.resume.contract import Expectation
from chronicle.resume.envelope.samples import Snapshot, part_of
from chronicle.resume.faults import shield
from chronicle.resume.feed import LENGTH, ROWS
from chronicle.resume.fingerprint import fresh_seed, rng_digests

VERSION = 1
NAME = "gradient"
DRAWN = "random numbers are drawn in this step (dropout), and the generators do not stand as in the first pass"
NUM_TENSORS = 128
NUM_KEPT = 64  # files of one launch and rank
NUM_RANKS = 8
NUM_BATCHES = 64  # micro-batches of one step that are compared
QUIET = 1e-4  # of the largest: a tensor with so small a gradient is rounding alone
NUM_NEXT, NEXT_TENSORS = 7, 24  # steps after the first, and how many tensors of each
AS_ALIKE = 1e-3  # what two equal steps may differ by, so that the one after them is still compared
LOUD = 1e-2  # of the largest: a tensor that is compared by itself
ALONE = 0.2  # relative difference of one such tensor, float32 on a CPU
# Relative difference of the median tensor: above the first it is said, above the second it is refused.
TOLD = 0.002  # there: an incident, which refuses nothing
EXACT = (0.0005, 0.02)  # float32 on a CPU, measured below 1e-4 for fused, compiled, checkpointed and other attention
ROUGH = (0.1, 0.3)  # half precision, or an accelerator with its own reduced products

Rows = Sequence[Sequence[float] | None]  # samples, one row a tensor


class FirstGradient:
    """Keeps and compares first gradients of one rank. `directory` None: nothing is done."""

    def __init__(
        self,
        directory: Path | None,
        rank: int,
        num_ranks: Callable[[], int] = lambda: 1,
        models: Callable[[], Sequence[Any]] = tuple,
        averages: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._kept_in, self._directory = directory, directory if rank < NUM_RANKS else None
        self._num_ranks, self._models, self._averages = num_ranks, models, averages
        self.moved_otherwise: Callable[[str, int], None] = lambda words, after: None  # told of a step that is another one
        # which incident the first step after this save belongs to, in words; "" for none
        self.went_wrong: Callable[[Mapping[str, Any]], str] = lambda identity: ""
        self._moving: _Moving | None = None  # the step whose update is awaited
        self._rank = rank
        self._batches: list[str] = []  # since the last step
        self._seen = 0
        self._autocast = False  # whether a micro-batch of this step entered under it
        self._state = ""  # identity of the state whose next gradient is to be kept
        self._at_save: Mapping[str, str] = {}
        self._entered: Mapping[str, str] = {}  # generators when the first micro-batch entered
        self._wanted = True  # the first step of a launch is compared
        self._expected: Mapping[str, Any] | None = None  # the record whose update this step should repeat
        self._following: _Following | None = None  # the steps after the first one
        self._lrs_then: list[Any] = []  # of the first pass, from the first step after this load on
        self._seeds: tuple[int | None, int | None] = (None, None)  # seeds beside which the last two steps began
        self._kept: list[Path] = []
        self.by_hooks = False  # an engine takes the gradients away: they are sampled as they come
        self.lost: Callable[[Exception], None] = lambda problem: None  # told of an error of such a hook
        self._sums: _Sums | None = None

    # ---- what happens -------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether the next step's gradient is to be kept, or compared with one that was kept."""
        return bool(self._state) or self._following is not None

    @property
    def _looks(self) -> bool:
        return self._directory is not None and (self.is_awaited or self._wanted)

    def saved(self, state: str, generators: Mapping[str, str]) -> None:
        """The state of this identity was saved. In the middle of an accumulation its next gradient says nothing."""
        self._state, self._at_save = ("" if self._seen else state), generators
        self._entered = {}

    def loaded(self) -> None:
        """Another state is in memory: the next step is a first one."""
        self._state, self._wanted, self._moving, self._following, self._lrs_then = "", True, None, None, []
        self._batches, self._seen, self._entered = [], 0, {}
        self._let_go()

    def _let_go(self) -> None:
        if self._sums is not None:
            self._sums.remove()
        self._sums = None

    def enters(self) -> None:
        """A micro-batch is about to enter the model."""
        self._seen += 1
        self._autocast = (self._autocast and self._seen > 1) or _autocast()
        for moving in (self._moving, None if self._following is None else self._following.moving):
            if moving is not None and not moving.over:
                self._step_is_over(moving)
        if self._seen == 1 and self._looks:
            try:
                self._entered = rng_digests()
            except RuntimeError:  # a generator that cannot be read now (a graph is being captured): nothing is compared
                self._state, self._wanted, self._following = "", False, None
            if self._wanted or self._following is not None:
                self._seeds = (self._seeds[1], fresh_seed())
            if self.by_hooks and self._sums is None:
                self._sums = _Sums(_params(None, self._models()), self.lost)

    def batch(self, digest: int) -> None:
        """The digest of a micro-batch, in their order."""
        if self._looks and len(self._batches) < NUM_BATCHES:
            self._batches.append(f"{digest:016x}")

    def stepping(self, place: int, optimizer: Any, lrs: Sequence[Any] = ()) -> None:
        """The guarded optimizer at this place is about to step: keep its gradient if it is the first since a save."""
        if self._moving is not None and self._moving.place == place:
            moving, self._moving = self._moving, None
            self._moved(moving)
        if self._state and self._entered and self._directory is not None:
            self._keep(place, optimizer, list(lrs))
        elif self._expected is not None and self._moving is None:
            self._moving = _Moving(place, self._expected, self._moved_by(optimizer), list(lrs))
            self._following = _Following(place, expected=self._expected["next"])
        elif self._following is not None and self._following.place == place:
            self._follow(self._following, optimizer, list(lrs))
        self._expected = None
        self._state, self._wanted = "", False
        self._batches, self._seen, self._entered = [], 0, {}
        self._let_go()

    # ---- the update -----------------------------------------------------------------------------------------------

    def _step_is_over(self, moving: "_Moving") -> None:
        """The batch after the step enters: what the optimizer drew at random, if anything, has moved the generators."""
        try:
            moving.over = True
            moving.still = rng_digests() == moving.generators
        except RuntimeError:
            moving.still = False

    def _moved(self, moving: "_Moving") -> None:
        """The next step begins: keep how far the weights moved, or compare it with what was kept."""
        if not moving.still:
            return
        rows, averages = moving.update()
        if moving.path is not None:
            moving.record.update(update=_short(rows), averages=_short(averages), lrs=moving.lrs)
            moving.path.write_text(_line(moving.record), encoding="utf-8")
        elif moving.record.get("lrs") == moving.lrs and (words := _judge_update(moving.record, rows, averages)):
            self._following = None
            self.moved_otherwise(f"the first step {words}", 0)

    def _moved_by(self, optimizer: Any) -> tuple[list[Any], list[Any]]:
        """The parameters that a step moves, and those of the averages that follow it."""
        return _params(optimizer, self._models()), _averaged(self._averages())

    def used_lrs(self, num: int) -> Sequence[Any] | None:
        """The LRs that the first pass used in this step after the save, the first is 1; None where it is not known."""
        return self._lrs_then[num - 1] if 0 < num <= len(self._lrs_then) else None

    # ---- the steps after the first ------------------------------------------------------------------------------

    def _follow(self, following: "_Following", optimizer: Any, lrs: list[Any]) -> None:
        """One more step of those that follow a save: keep it, or compare it with what was kept."""
        words = following.settle()
        if words:
            self.moved_otherwise(f"this step {words}", following.num)
        if words or following.ended or self._num_ranks() > 1 or not self._entered:
            self._following = None
            return
        following.num += 1
        own = self._describe(following.place, optimizer, still=rng_digests() == dict(self._at_save), most=NEXT_TENSORS)
        kept = own if following.path is not None or own is None else self._as_expected(following, optimizer, own, lrs)
        if kept is None:
            self._following = None
            return
        moved = _params(optimizer, self._models(), NEXT_TENSORS), _averaged(self._averages())
        following.moving = _Moving(following.place, {**kept, "lrs": lrs}, moved, lrs)

    def _as_expected(
        self, following: "_Following", optimizer: Any, own: Mapping[str, Any], lrs: list[Any]
    ) -> Mapping[str, Any] | None:
        """What was kept of this step, as far as its gradient is equal; None where it is not, or cannot be compared."""
        kept = following.expected.popleft()
        if kept.get("lrs") != lrs or _one_is_none(kept["rows"], own["rows"]):
            return None
        if not _comparable(kept, own):
            away, seed = self._seeds
            if away is None and seed is not None and kept["batches"] == own["batches"] and kept["entered"] != own["entered"]:
                effect = "dropout and orders that are drawn repeat what followed that seed before"
                text = f"torch was seeded with {seed} right before this step, and not so in the first pass: {effect}"
                self.moved_otherwise(text, following.num)
            return None
        exact = bool(kept["exact"] and own["exact"])
        apart = difference(kept["rows"], own["rows"]) or 0.0
        odd = odd_tensors(kept["rows"], own["rows"]) if exact else []
        said, told = EXACT if exact else ROUGH
        if apart <= told and not odd:
            return kept if apart <= (AS_ALIKE if exact else said) else None
        names = _names(_params(optimizer, self._models(), NEXT_TENSORS), self._models())
        words = f"{_percent(apart)} apart in the median parameter" if apart > told else f"another one in {names[odd[0]]}"
        equal = "batch, LR and the steps since the save are equal"
        text = f"the gradient of this step is not as in the first pass ({words}), although {equal}"
        self.moved_otherwise(f"{text}: the loss, labels, clipping or the model is another from here on", following.num)
        return None

    # ---- keep -----------------------------------------------------------------------------------------------------

    def _keep(self, place: int, optimizer: Any, lrs: list[Any]) -> None:
        now = rng_digests()
        record = self._describe(place, optimizer, still=now == dict(self._at_save))
        if record is None or self._directory is None:
            return
        if not any(row is not None and any(row) for row in record["rows"]):
            record["rows"] = []
            if place >= 0:  # no gradient: nothing that a resume could be held to
                return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._state}.{self._rank}"
        path.write_text(_line(record), encoding="utf-8")
        if record["exact"]:
            self._moving = _Moving(place, record, self._moved_by(optimizer), lrs, path)
        self._following = _Following(place, path=path)
        self._kept.append(path)
        if len(self._kept) > NUM_KEPT:
            self._kept.pop(0).unlink(missing_ok=True)

    def _describe(
        self, place: int, optimizer: Any, *, still: bool, most: int = NUM_TENSORS
    ) -> dict[str, Any] | None:
        """This step's batches, generators and gradient; None where the gradient cannot be read."""
        if not self._batches or self._seen != len(self._batches) or self._seen > NUM_BATCHES:
            return None
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return None  # scaled until the step itself
        chosen = _params(optimizer, self._models(), most)
        rows = [] if self._sums is None else _thinned(self._sums.rows(), most)
        if place >= 0:  # an engine takes its gradients away
            rows = Snapshot([None if p.grad is None or p.grad.is_sparse else p.grad for p in chosen]).rows()
        return {
            "v": VERSION,
            "optimizer": place,
            "ranks": self._num_ranks(),
            "batches": list(self._batches),
            "entered": dict(self._entered),
            "seed": _seed(),
            "still": still,
            "exact": all(p.device.type == "cpu" and str(p.dtype) == "torch.float32" for p in chosen)
            and not self._autocast,
            "rows": _short(rows),
        }

    def entered_alike(self, expected: Expectation | None) -> bool:
        """Whether the first batch of this launch met the generators that the first pass had there; unknown is False."""
        if expected is None or expected.memory is None or self._directory is None or not self._entered:
            return False
        kept = _read(self._directory / f"{expected.memory.identity.get('id') or ''}.{self._rank}")
        return kept is not None and kept.get("entered") == dict(self._entered)

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
        """Those that this rank kept, or rank 0 where this one did not save."""
        assert self._kept_in is not None
        own = self._kept_in / f"{state}.{self._rank}.sizes"
        try:
            known = json.loads((own if own.exists() else self._kept_in / f"{state}.0.sizes").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    # ---- compare ----------------------------------------------------------------------------------------------------

    def seeded_alike(self, expected: Expectation | None) -> bool:
        """Whether torch was seeded as when this state was saved; unknown is False. A script without a seed draws others."""
        if expected is None or expected.memory is None or self._directory is None:
            return False
        kept = _read(self._directory / f"{expected.memory.identity.get('id') or ''}.{self._rank}")
        return kept is not None and kept.get("seed") == _seed()

    def settle_sizes(self, checks: Sequence[Check], expected: Expectation | None) -> list[Check]:
        """The checks of a first step; a batch that is as large as those after the save were is the run's own plan."""
        state = "" if expected is None or expected.memory is None else expected.memory.state_id
        known = self._sizes(state) if state and self._kept_in is not None else {}
        cause = "so were the batches after this save in the first pass"
        return [
            replace(check, outcome=Outcome.NOTED, cause=cause)
            if check.name in (ROWS, LENGTH) and check.found == str(known.get(check.name))
            else check
            for check in checks
        ]

    def compare(self, expected: Expectation | None, place: int, optimizer: Any) -> Iterator[Check]:
        """The gradient of the first step after a load against the one that was kept; nothing where it may differ."""
        if not self._wanted or expected is None or expected.memory is None or self._directory is None:
            return
        state = expected.memory.state_id
        kept = _read(self._directory / f"{state}.{self._rank}") if state else None
        own = None if kept is None else self._describe(place, optimizer, still=False)
        if kept is None:
            return
        if own is None:
            if kept.get("ranks") == self._num_ranks():
                yield not_compared(NAME, "M6", "the gradient of this step cannot be read before it")
            return
        if not _comparable(kept, own):
            # other batches have a check of their own; what the generators of other ranks do is not known here
            if _is_same_step(kept, own) and kept["entered"] != own["entered"]:
                yield not_compared(NAME, "M6", DRAWN)
            return
        self._lrs_then = [kept.get("lrs"), *(one.get("lrs") for one in kept["next"])]
        exact = bool(kept["exact"] and own["exact"])
        self._expected = kept if exact and not expected.accepted and expected.contract is None else None
        if _one_is_none(kept["rows"], own["rows"]):
            self._expected = None
        if kept["rows"] and own["rows"]:
            num, may, identity = len(own["batches"]), expected.accepts(NAME), expected.memory.identity
            yield from self._judge(kept["rows"], own["rows"], optimizer, exact, num_batches=num, may=may, identity=identity)

    def _judge(
        self, kept: Rows, own: Rows, optimizer: Any, exact: bool, *, num_batches: int, may: bool, identity: Mapping[str, Any]
    ) -> Iterator[Check]:
        apart = difference(kept, own)
        if apart is None:
            return
        said, refused = EXACT if exact else ROUGH
        found = f"{_percent(apart)} apart in the median parameter"
        odd = odd_tensors(kept, own)
        if odd and apart <= refused:
            names = _names(_params(optimizer, self._models()), self._models())
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            found = f"another one in {names[odd[0]]}{more} of {len(own)} parameters"
        where = f"{len(own)} parameters, {num_batches} micro-batches equal to those of the first pass"
        words = {"expected": "as after the save", "found": found, "where": where}
        cause = "the loss, labels that are no input of the model, clipping, or a scale of the gradient is another one"
        is_another = apart > refused or bool(odd and exact)
        if is_another and (wrong := self.went_wrong(identity)):  # what went wrong then is no measure
            self._expected = None
            yield noted(NAME, "M6", **words, cause=f"{found}, and not held against it: this step of the first pass {wrong}")
        elif is_another and not may:
            self._expected = None
            yield compared(NAME, "M6", False, **words, cause=f'{cause}; if that is intended, accept "{NAME}: why"')
        elif apart > said or odd:
            self._expected = None
            if exact and apart > TOLD and not may:
                self.moved_otherwise(f"the gradient of the first step is not as after the save: {found}; {cause}", 0)
            yield noted(NAME, "M6", **words, cause=f"{words['found']}: {cause}, or the arithmetic is less exact")
        else:
            yield compared(NAME, "M6", True, expected=words["expected"], found="equal")


class _Moving:
    """A step whose update is awaited: samples before it of the weights, and of the averages that follow them."""

    def __init__(
        self,
        place: int,
        record: Mapping[str, Any],
        moved: tuple[Sequence[Any], Sequence[Any]],
        lrs: list[Any],
        path: Path | None = None,
    ) -> None:
        self.place, self.record, self.lrs, self.path = place, dict(record), lrs, path
        self._weights, self._averages = ((params, Snapshot(params)) for params in moved)
        self.generators = rng_digests()
        self.over = self.still = False

    def update(self) -> tuple[list[Any], list[Any]]:
        """How far each sample has moved, one array per tensor: of the weights, and of the averages."""
        return _distance(*self._weights), _distance(*self._averages)


def _distance(params: Sequence[Any], before: Snapshot) -> list[Any]:
    pairs = zip(before.rows(), Snapshot(params).rows(), strict=True)
    return [None if a is None or b is None or len(a) != len(b) else b - a for a, b in pairs]


def _judge_update(kept: Mapping[str, Any], weights: Sequence[Any], averages: Sequence[Any]) -> str:
    """How weights and averages moved otherwise than in the record, in words; "" where they did not."""
    equal = "batch, LR and gradient are equal" if kept["rows"] else "batch and LR are equal"
    for what, was, now in (("weights", kept.get("update"), weights), ("averages", kept.get("averages"), averages)):
        apart = difference(was, now) if was else None
        if apart is not None and apart > EXACT[1]:
            words = f"moved the {what} otherwise than after the save ({_percent(apart)} apart in the median parameter)"
            return f"{words}, although {equal}: the loss, or something inside the step or after it is another"
    return ""


class _Following:
    """The steps after the first one: kept at the end of `path`, or compared with `expected`, the lines that are there."""

    def __init__(self, place: int, *, path: Path | None = None, expected: Sequence[Mapping[str, Any]] = ()) -> None:
        self.place, self.path, self.expected = place, path, deque(expected)
        self.num = 0  # steps after the first
        self.moving: _Moving | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to keep or to compare."""
        return self.num >= NUM_NEXT or (self.path is None and not self.expected)

    def settle(self) -> str:
        """The next step begins: keep how far the last one moved, or return in words what is another."""
        moving, self.moving = self.moving, None
        if moving is None:
            return ""
        weights, averages = moving.update() if moving.still else ([], [])
        if self.path is None:
            return _judge_update(moving.record, weights, averages)
        if moving.record["exact"]:
            moving.record.update(update=_short(weights), averages=_short(averages))
        if self.path.exists():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(moving.record))
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

        hook = outside_graphs(shield(see, lose))
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning when the model is saved whole
        return hook

    def rows(self) -> list[Any]:
        """One row a parameter, as of a gradient that is there; nothing where none can come."""
        return Snapshot(self._found).rows()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def _averaged(averages: Mapping[str, Any]) -> list[Any]:
    """Some parameters of averaged copies of the model; objects that are no modules are not looked into."""
    every = [p for one in averages.values() if callable(getattr(one, "parameters", None)) for p in one.parameters()]
    return _thinned([p for p in every if hasattr(p, "numel")], NEXT_TENSORS)


def _params(optimizer: Any, models: Sequence[Any], most: int = NUM_TENSORS) -> list[Any]:
    """The parameters whose gradient and update are sampled; of an engine (None) those of the models."""
    if optimizer is None:
        every = [p for model in models for p in model.parameters() if p.requires_grad]
    else:
        every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return _thinned(_thinned(every, NUM_TENSORS), most)


def _thinned(every: list[Any], most: int) -> list[Any]:
    return every[:: max(1, math.ceil(len(every) / most))]


def _names(params: Sequence[Any], models: Sequence[Any]) -> list[str]:
    known = {id(p): name for model in models for name, p in model.named_parameters()}
    return [f"`{known[id(p)]}`" if id(p) in known else f"a parameter of shape {tuple(p.shape)}" for p in params]


def _short(rows: Sequence[Any]) -> list[list[float] | None]:
    return [None if row is None else [float(f"{value:.7g}") for value in row] for row in rows]


def _read(path: Path) -> Mapping[str, Any] | None:
    """The record of the first step, with those of the steps after it as `next`; None where there is none."""
    found = list[Any]()
    with contextlib.suppress(OSError, ValueError):  # the last line may be cut
        found.extend(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    if not found or not all(isinstance(one, dict) and one.get("v") == VERSION for one in found):
        return None
    return {**found[0], "next": found[1:]}


def _percent(apart: float) -> str:
    return f"{apart:.0%}" if apart >= 0.01 else f"{apart:.2%}"


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
    return bool(kept["still"] or (own["ranks"] == 1 and kept["entered"] == own["entered"] and kept["entered"]))


def difference(one: Rows, other: Rows) -> float | None:
    """Relative difference of the median tensor, 0 for equal, at most 2; None where the samples are not of the same tensors."""
    sizes = _sizes_of(one, other)
    largest = max((size for size, _ in sizes), default=0.0)
    if not sizes or not math.isfinite(largest) or largest == 0.0:
        return None
    parts = sorted(apart / size for size, apart in sizes if size > QUIET * largest)
    return parts[len(parts) // 2] if parts else None


def odd_tensors(one: Rows, other: Rows) -> list[int]:
    """Places of tensors that are not small and far apart by themselves; a gradient that is gone is one, or one that came."""
    sizes = _sizes_of(one, other)
    largest = max((size for size, _ in sizes), default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return []
    return [i for i, (size, apart) in enumerate(sizes) if size > LOUD * largest and apart > ALONE * size]


def _sizes_of(one: Rows, other: Rows) -> list[tuple[float, float]]:
    """(larger size, size of the difference) per tensor; no gradient counts as zero. Empty where they are other tensors."""
    if len(one) != len(other) or any(
        a is not None and b is not None and len(a) != len(b) for a, b in zip(one, other, strict=True)
    ):
        return []
    found = []
    for a, b in zip(one, other, strict=True):
        a, b = [0.0] * len(b or ()) if a is None else a, [0.0] * len(a or ()) if b is None else b
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
