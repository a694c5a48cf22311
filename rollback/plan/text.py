"""A plan as a person reads it: what changes from what to what, what moves away, what follows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rollback.lr.effect import FieldEdit
from rollback.plan.plan import Plan
from rollback.plan.request import Source

_SHOWN_STEPS = 5
_SHOWN_GROUPS = 3


def format_plan(plan: Plan) -> str:
    """The whole plan, one fact a line; ends without a newline."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    launch = "" if plan.launch is None else f" of launch {plan.launch}"
    yield f"rollback of run {plan.run} to step {plan.step}{launch}"
    yield ""
    yield _row("checkpoint", f"{PurePath(plan.root) / plan.entry}  ({plan.format})")
    if plan.source != str(PurePath(plan.root) / plan.entry):
        yield _row("bring back", plan.source)
        if plan.displaces:
            yield _row("", f"the {plan.entry} that is there now goes to abandoned/")
    yield from _edits(plan)
    for name in plan.copies:
        yield _row("copy", f"{name} becomes a copy of {plan.entry}; what lies there now goes to abandoned/")
    if plan.has_manifest and plan.edits:
        yield _row("manifest", "digests of the edited files and the LRs in memory follow")
    for pointer in plan.pointers:
        yield _row("pointer", f"{pointer.path}: {pointer.before.strip()} → {pointer.after.strip()}")
    if plan.abandon:
        yield _row("abandon", f"{_count(plan.abandon, 'later checkpoint')}, moved to abandoned/, not deleted:")
        yield from (_row("", line) for line in _wrapped([later.name for later in plan.abandon]))
    yield _row("LR", _lr_sentence(plan))
    yield from (_row("", line) for line in _forecast(plan))
    yield from (_row("data", line) for line in _data(plan))
    cost = _cost(plan)
    if cost:
        yield _row("cost", cost)
    yield from (_row("note", note) for note in plan.notes)
    yield _row("plan", plan.digest[:12])


def _row(label: str, text: str) -> str:
    return f"  {label:<12}{text}".rstrip()


def _edits(plan: Plan) -> Iterator[str]:
    all_edits = (*plan.edits, *plan.config_edits)
    files = dict.fromkeys(edit.file for edit in all_edits)
    for file in files:
        what = plan.classes.get(file) or ("DeepSpeed config of the next launch" if file.startswith("/") else "")
        yield _row("edit", file + (f"  ({what})" if what else ""))
        edits = [edit for edit in all_edits if edit.file == file]
        rows = _merged(edits)
        width = max(len(name) for name, _, _ in rows)
        for name, before, after in rows:
            yield _row("", f"  {name:<{width}}  {_number(before)} → {_number(after)}")


def _merged(edits: Sequence[FieldEdit]) -> list[tuple[str, float | int, float | int]]:
    """One row for neighbours that change alike: `base_lrs.0-3`, `param_groups.0-1.lr`."""
    groups: dict[tuple[str, float | int, float | int], list[int]] = {}
    for edit in edits:
        index = next((i for i, key in reversed(list(enumerate(edit.keys))) if isinstance(key, int)), None)
        pattern = ".".join("#" if i == index else str(key) for i, key in enumerate(edit.keys))
        position = edit.keys[index] if index is not None else -1
        groups.setdefault((pattern, edit.before, edit.after), []).append(int(position))
    return [
        (pattern.replace("#", _span(indices)), before, after) for (pattern, before, after), indices in groups.items()
    ]


def _span(indices: Sequence[int]) -> str:
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return str(first)
    return f"{first}-{last}" if last - first + 1 == len(indices) else ",".join(map(str, indices))


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _lr_sentence(plan: Plan) -> str:
    ratio = plan.expected.ratio
    if ratio is None:
        return "set field by field; see the edits above"
    if ratio == 1.0:
        return "unchanged"
    classes = ", ".join(dict.fromkeys(text.split(",")[0] for text in plan.classes.values())) or "the optimizer alone"
    return f"× {ratio:.10g} from the first step on, proved for {classes}"


def _forecast(plan: Plan) -> Iterator[str]:
    expected = plan.expected
    if expected.next_lrs is None:
        yield f"LRs of the next steps unknown: {expected.reason}"
        yield f"first step: {_lrs(expected.lrs)}; the guard checks it"
        return
    source = {
        Source.COMPUTED: "computed from the checkpoint",
        Source.CONFIGURED: f"computed from the recorded arguments, {expected.reason}",
    }.get(expected.source, "recorded at save")
    yield f"next steps ({source}):"
    rows = expected.next_lrs
    for number, row in enumerate(rows[:_SHOWN_STEPS], start=1):
        yield f"  +{number:<3} {_lrs(row)}"
    if len(rows) > _SHOWN_STEPS:
        yield f"  +{len(rows):<3} {_lrs(rows[-1])}"


def _lrs(row: Sequence[float]) -> str:
    if len(set(row)) == 1:
        return f"{row[0]:.6g}" + (f" in all {len(row)} groups" if len(row) > 1 else "")
    shown = "  ".join(f"{lr:.6g}" for lr in row[:_SHOWN_GROUPS])
    return shown + (f"  … {len(row)} groups" if len(row) > _SHOWN_GROUPS else "")


def _data(plan: Plan) -> Iterator[str]:
    request = plan.request
    if request.warmup_steps:
        yield f"LR warms up again over {request.warmup_steps} steps (carried out by the next launch)"
    if request.skip_batches:
        yield f"{request.skip_batches} batches after the checkpoint are skipped (carried out by the next launch)"
    if request.reshuffle:
        yield "data after the checkpoint comes in another order (carried out by the next launch)"


def _cost(plan: Plan) -> str:
    if plan.cost.steps is None:
        return ""
    hours = "" if plan.cost.hours is None else f", {plan.cost.hours:.1f} h of training"
    return f"{plan.cost.steps} steps{hours}"


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _wrapped(names: Sequence[str], width: int = 90) -> Iterator[str]:
    line = ""
    for name in names:
        if line and len(line) + len(name) > width:
            yield line
            line = ""
        line += f"  {name}"
    yield line
