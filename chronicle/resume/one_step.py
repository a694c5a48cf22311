"""The batch of one step in words, as only a replay reads it, with the loss of every row.

`CHRONICLE_SHOW` names the step whose batch is shown: rows decoded with the script's tokenizer, and what each row's loss was.
That is known where the script calls a loss function of torch: it is called once more, without its mean or sum. Whether this is
the loss that was logged is compared, not supposed.
"""

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.resume.batch_reader import read_rows
from chronicle.resume.batches import is_call, tensors_of

SHOW_VARIABLE = "CHRONICLE_SHOW"
NUM_ROWS = 256  # of one step and rank
NUM_TOLD = 3
SHOWN_CHARACTERS = 400  # of a row
CLOSE = 1e-4  # relative: the mean of the rows' losses is the logged loss


# ---- the batch -----------------------------------------------------------------------------------------------------------


class StepBatch:
    """What entered the model in the step that was asked for, row by row, with the loss of each row where it can be known."""

    def __init__(self, launch_dir: Path, environ: Mapping[str, str], decoder: Callable[[], Callable[..., str] | None]) -> None:
        asked = environ.get(SHOW_VARIABLE, "")
        self._step = int(asked) if asked.isdecimal() else None
        self._launch_dir, self._decoder = launch_dir, decoder
        self._before: int | None = None  # the newest step that was taken
        self._inputs: list[Any] = []  # micro-batches since then
        self._losses: list[dict[str, Any]] = []
        self._unwrap: list[Callable[[], None]] = []
        self._inside = False
        if self._step is not None:
            self._wrap_losses()

    @property
    def _is_next(self) -> bool:
        return self._step is not None and (self._before is None or self._before + 1 == self._step)

    def enters(self, batch: Any) -> None:
        """A micro-batch is about to enter the model."""
        if self._is_next:
            self._inputs.append(batch)

    def stepping(self, step: int, rank: int) -> None:
        """This step is about to be taken: if it is the one, its batch is written."""
        inputs, losses, self._inputs, self._losses = self._inputs, self._losses, [], []
        self._before = step
        if self._step is None or step < self._step:
            return
        if step == self._step:
            decode = self._decoder()
            told = {"step": step, "micro": [_describe(batch, decode) for batch in inputs], "losses": losses}
            (self._launch_dir / f"shown-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        self.end()

    def end(self) -> None:
        """Collect no more."""
        self._step = None
        for undo in self._unwrap:
            undo()
        self._unwrap = []

    def _wrap_losses(self) -> None:
        """Every loss function of torch: those that have a `reduction`. Modules of torch call them by these names, too."""
        functional = sys.modules["torch"].nn.functional
        for name, function in list(vars(functional).items()):
            try:
                signature = inspect.signature(function) if callable(function) and not name.startswith("_") else None
            except (TypeError, ValueError):
                continue
            if signature is not None and "reduction" in signature.parameters:
                setattr(functional, name, self._seen(name, function, signature))
                self._unwrap.append(functools.partial(setattr, functional, name, function))

    def _seen(self, name: str, function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
        torch = sys.modules["torch"]

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if not torch.compiler.is_compiling() and self._is_next and not self._inside and torch.is_grad_enabled():
                self._inside = True
                try:
                    if torch._C._functorch.peek_interpreter_stack() is not None:
                        raise ValueError("it is computed inside a transform of `torch.func`")
                    self._see_loss(name, function, signature.bind(*args, **kwargs), value)
                except Exception as problem:  # noqa: BLE001 the script's own call is done; this one is only told
                    kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
                    self._losses.append({"name": name, "why": f"{kind}{problem}"[:200]})
                finally:
                    self._inside = False
            return value

        return wrapped

    def _see_loss(self, name: str, function: Callable[..., Any], call: inspect.BoundArguments, value: Any) -> None:
        torch = sys.modules["torch"]
        if getattr(value, "ndim", None) != 0 or not value.requires_grad or not self._inputs:
            return
        target: Any = call.arguments.get("target")
        call.arguments["reduction"] = "none"
        with torch.no_grad():
            each = function(*call.args, **call.kwargs).detach()
        row: dict[str, Any] = {"name": name, "micro": len(self._inputs), "value": float(value.detach())}
        self._losses.append(row)
        num_rows = _num_rows(self._inputs[-1])
        if not num_rows or each.ndim == 0 or each.numel() % num_rows:
            row["why"] = f"{each.numel()} values for {num_rows} rows"
            return
        each = each.reshape(num_rows, -1).double()
        counted = torch.ones_like(each)
        if getattr(target, "dtype", None) == torch.int64 and target.numel() == each.numel():
            counted = (target.reshape(num_rows, -1) != call.arguments.get("ignore_index", -100)).to(each)
            row["targets"] = target.tolist()[:NUM_ROWS] if target.ndim == 1 and target.numel() == num_rows else None
        sums, shares = (each * counted).sum(1), counted.sum(1)
        row["rows"] = [loss if share else None for loss, share in zip((sums / shares).tolist(), shares.tolist(), strict=True)]
        row["rows"] = row["rows"][:NUM_ROWS]  # None: all of it is masked
        row["mean"] = [float(sums.sum()), float(shares.sum())]


def _parts(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A micro-batch as the inputs of a call."""
    if is_call(batch):
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _tensors(batch: Any) -> list[Any]:
    return [tensor for tensor in tensors_of(_parts(batch)) if tensor.ndim]


def _num_rows(batch: Any) -> int:
    tensors = _tensors(batch)
    return int(tensors[0].shape[0]) if tensors else 0


def _describe(batch: Any, decode: Callable[..., str] | None) -> dict[str, Any]:
    """A micro-batch as plain values: for each row its text, or the range of its numbers."""
    rows, _ = read_rows(*_parts(batch), most=NUM_ROWS)
    num_rows = _num_rows(batch)
    if rows:
        words = [f"{len(row.ids)} tokens" for row in rows]
        texts = [decode(row.ids) for row in rows] if decode is not None else []
        return {"rows": num_rows, "words": words, "texts": [_shortened(text) for text in texts]}
    words = [", ".join(_range(tensor[row]) for tensor in _tensors(batch) if len(tensor) == num_rows) for row in range(num_rows)]
    return {"rows": num_rows, "words": words[:NUM_ROWS], "texts": []}


def _range(values: Any) -> str:
    values = values.detach().double().cpu()
    if values.numel() == 1:
        return f"{values.item():.6g}"
    finite = values[values.isfinite()]
    ends = f"{finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else "none finite"
    lost = values.numel() - finite.numel()
    return f"{'×'.join(map(str, values.shape))} numbers, {ends}" + (f", {lost} not finite" if lost else "")


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"


def read_shown(launch_dir: Path) -> dict[int, dict[str, Any]]:
    """By rank: the batch of the step that was asked for."""
    paths = sorted(launch_dir.glob("shown-*.json"))
    return {int(path.stem.rpartition("-")[2]): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def tell_shown(shown: Mapping[int, Mapping[str, Any]], logged: Mapping[int, float]) -> list[str]:
    """The batch in lines: how the losses of its rows lie, and the rows that cost most. `logged`: by rank, NaN if unknown.

    Of several ranks the one with the highest row is told.
    """
    rows = {rank: _loss_rows(told) for rank, told in sorted(shown.items()) if told["micro"]}
    if not rows:
        return []
    rank = max(rows, key=lambda one: max((row.order for row in rows[one]), default=-math.inf))
    told, found = shown[rank], sorted(rows[rank], key=lambda row: row.order, reverse=True)
    on = f" on rank {rank} of {len(shown)}" if len(shown) > 1 else ""
    count, micro = sum(one["rows"] for one in told["micro"]), len(told["micro"])
    parts = f" in {micro} micro-batches" if micro > 1 else ""
    lines = [f"batch of step {told['step']}{on}: {count} rows{parts}"]
    if not found:
        unseen = "the script called no loss function of torch that could be seen"
        why = next((one["why"] for one in told["losses"] if "why" in one), unseen)
        places = range(min(NUM_TOLD, told["micro"][0]["rows"]))
        shown_rows = [f"  row {place + 1}: {_row_words(told['micro'][0], place)}" for place in places]
        return [*lines, f"the loss of each row is not known: {why}", *shown_rows]
    name = next(one["name"] for one in told["losses"] if "rows" in one)
    middle, is_logged = found[len(found) // 2].loss, _is_logged(told, name, logged.get(rank, math.nan))
    lines.append(f"loss of each row ({name}; {is_logged}): median {middle:.4g}, highest {found[0].loss:.4g}")
    for row in found[:NUM_TOLD]:
        of = f" of micro-batch {row.batch + 1}" if micro > 1 else ""
        label = "" if row.target is None else f", target {row.target}"
        words = _row_words(told["micro"][row.batch], row.place)
        lines.append(f"  row {row.place + 1}{of}: loss {row.loss:.4g}{label}: {words}")
    return lines


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a micro-batch whose loss is known."""

    batch: int
    place: int
    loss: float
    target: int | None

    @property
    def order(self) -> float:
        """What is no number is the highest loss."""
        return math.inf if math.isnan(self.loss) else self.loss


def _loss_rows(told: Mapping[str, Any]) -> list[_Row]:
    """The rows of the loss function that was called first in each micro-batch; all of one function."""
    calls = [one for one in told["losses"] if "rows" in one]
    found: list[_Row] = []
    seen: set[int] = set()
    for one in calls:
        if one["name"] != calls[0]["name"] or one["micro"] in seen:
            continue
        seen.add(one["micro"])
        targets = one.get("targets") or [None] * len(one["rows"])
        pairs = enumerate(zip(one["rows"], targets, strict=True))
        found += [_Row(one["micro"] - 1, place, loss, target) for place, (loss, target) in pairs if loss is not None]
    return found


def _is_logged(told: Mapping[str, Any], name: str, logged: float) -> str:
    """Whether the loss function gave what the step logged, in words."""
    if math.isnan(logged):
        return "the logged loss of the step is not known"
    calls = [one for one in told["losses"] if one["name"] == name and "mean" in one]
    total = sum(one["value"] for one in calls)
    each = sum(one["mean"][0] for one in calls) / sum(one["mean"][1] for one in calls)
    if any(math.isclose(value, logged, rel_tol=CLOSE) for value in (total, total / len(calls), each)):
        return "it gave the logged loss"
    return f"its mean {each:.6g} is not the logged {logged:.6g}: one term of several, or another scale"


def _row_words(micro: Mapping[str, Any], place: int) -> str:
    if place < len(micro["texts"]):
        return repr(micro["texts"][place])
    return str(micro["words"][place]) if place < len(micro["words"]) else "not kept"
