"""`chronicle log` lists or draws the journal; `chronicle show` prints one entry."""

import itertools
import json as json_module
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any

from typer import Argument, Option

from chronicle.cli.completion import complete_entries
from chronicle.cli.options import IN_RUN, CommandResult, InRun
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, Journal, read_journal
from chronicle.journal.events import CheckpointSaved, EntryKind, FirstBatchSeen, GuardVerdict
from chronicle.paths import RunPaths
from chronicle.report.graph import GraphLine, draw_graph
from chronicle.story import read_story
from chronicle.story.chapters import BOOKKEEPING
from chronicle.story.plain import Coloured, format_when, lines_of
from chronicle.story.read import points_until
from rollback.channels import Role, value_of

QUIET = tuple(sorted(BOOKKEEPING - {EntryKind.RUN_INIT, EntryKind.RUN_PLACE, EntryKind.GUARD_ATTACHED}))
COLOURS = {
    "kept": "1;32",
    "abandoned": "90",
    EntryKind.INCIDENT: "31",
    EntryKind.ROLLBACK_RECEIPT: "1;33",
    EntryKind.HARDWARE: "35",
    EntryKind.PROPOSAL: "36",
}


def log(
    graph: bool = False,
    kind: list[str] | None = None,
    limit: Annotated[int, Option("-n", "--limit", min=0, help="Print at most this many lines; 0 for all.")] = 200,
    reverse: bool = False,
    every: bool = False,
    only_open: bool = False,
    at: InRun = IN_RUN,
) -> CommandResult:
    """List the journal, newest entry first, or draw it as a graph.

    Example: chronicle log --graph

    Options:
      --graph: Draw launches and rollbacks as a graph.
      --kind: List only entries of this kind (repeatable).
      --reverse: List the oldest entry first.
      --all: List also every checkpoint, intents and batches.
      --open: List only entries without an outcome.
    """
    paths = at.existing().paths
    if graph and not at.json:
        return _graph(paths, limit)
    entries = list(read_journal(paths).entries)
    if only_open:
        story = read_story(paths)
        waiting = {m.entry.id for m in story.open_matters} | {x.entry.id for x in story.interventions if x.open}
        entries = [entry for entry in entries if entry.id in waiting]
    elif kind or not (every or at.json):
        entries = _select(entries, kind or ())
    shown = entries if not limit else entries[-limit:]
    talk = []
    if not entries:
        talk.append("no entries" + (f" of kind {', '.join(kind)}" if kind else "") + f" in run `{paths.run}`")
    elif len(entries) > len(shown):
        talk.append(f"the newest {limit} lines; `-n 0` shows all")
    chosen = shown if reverse else shown[::-1]
    guesses = _guesses(paths, chosen)
    data = [json_module.loads(entry.to_json()) for entry in chosen]
    for row in data:
        if row["kind"] == EntryKind.LAUNCH_START:
            row["inferred"] = row.get("launch") in guesses
    return CommandResult(lines=list(_lines(chosen, guesses)), data=data, talk=talk)


def _select(entries: Sequence[Entry], kinds: Sequence[str]) -> list[Entry]:
    """The entries to list. Of consecutive checkpoints, only the last is listed."""
    if kinds:
        return [one for one in entries if one.kind in kinds]
    chosen = [one for one in entries if one.kind not in QUIET]
    saves = [one.kind == EntryKind.CHECKPOINT for one in chosen]
    return [one for one, *pair in zip(chosen, saves, [*saves[1:], False], strict=True) if not all(pair)]


def _guesses(paths: RunPaths, entries: Sequence[Entry]) -> frozenset[int]:
    """The launches, if any of these entries starts one, whose parent is inferred."""
    if not any(entry.kind == EntryKind.LAUNCH_START for entry in entries):
        return frozenset()
    try:
        lineage = read_story(paths).lineage
    except ChronicleError:  # the list is shown also where the story cannot be told
        return frozenset()
    return frozenset(span.number for span in lineage.launches if lineage.is_guess(span))


def _graph(paths: RunPaths, limit: int) -> CommandResult:
    """The graph of launches."""
    story = read_story(paths)
    rows = list(itertools.islice(draw_graph(story, _loss_reader(paths)), limit + 1 if limit else None))
    talk = [] if story.entries else [f"no entries in run `{paths.run}`"]
    if limit and len(rows) > limit:
        talk, rows = [f"the newest {limit} lines; `-n 0` shows all"], rows[:limit]
    return CommandResult(lines=list(_paint(rows)), talk=talk)


def _lines(entries: Sequence[Entry], guesses: Set[int]) -> Iterator[str]:
    columns, widest = _columns(), max((len(entry.kind) for entry in entries), default=0)
    for entry in entries:
        launch = "" if entry.launch is None else f"L{entry.launch}"
        step = "" if entry.step is None else str(entry.step)
        what = entry.title or CheckpointSaved.view(entry.data).path or GuardVerdict.view(entry.data).verdict
        what += " · inferred" if entry.kind == EntryKind.LAUNCH_START and entry.launch in guesses else ""
        where = f"{launch:>4} {step:>8}"
        kind = f"{entry.kind:<{min(widest, 16)}}"
        yield _fitted(f"{entry.id[-8:]}  {format_when(entry.ts)}  {where}  {kind}  {what}".rstrip(), "", columns)


def _loss_reader(paths: RunPaths) -> Callable[[int, int], float | None]:
    def loss_at(launch: int, step: int) -> float | None:
        for point in reversed(points_until(paths.metrics_path(launch), step)):
            loss = value_of(point.values, Role.LOSS)
            if loss is not None and "train_runtime" not in point.values:  # Trainer's last record: the mean of the run
                return loss
        return None

    return loss_at


def _paint(rows: Sequence[GraphLine]) -> Iterator[str | Coloured]:
    width = min(24, max((len(row.lanes) for row in rows), default=0))
    columns = _columns()
    for row in rows:
        name = f"  {row.entry_id[-8:]}" if row.entry_id else ""
        text = _fitted(f"{row.lanes:<{width}}  {row.text}".rstrip(), name, columns)
        code = COLOURS.get(row.style)
        yield Coloured(code, text) if code else text


def _columns() -> int | None:
    """The width of the terminal; None for a file or a pipe, where lines are not cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _fitted(text: str, name: str, columns: int | None) -> str:
    """The line cut to the width of the terminal; the id at its end is kept."""
    if columns is None or len(text) + len(name) <= columns:
        return text + name
    return text[: max(0, columns - len(name) - 1)] + "…" + name


# --- chronicle show

BATCH = "batch"  # no id: ids are 26 characters, and a shorter one must be the start or end of one


def show(
    entry_id: Annotated[
        str,
        Argument(
            help="Id of the entry, or its unambiguous start or end; `batch`: the first batch of the newest launch.",
            metavar="ID",
            autocompletion=complete_entries,
        ),
    ],
    at: InRun = IN_RUN,
) -> CommandResult:
    """Show one journal entry and the entries it is linked to.

    `chronicle show batch` shows the first batch of the newest launch in words, and the last ones before a NaN.

    Example: chronicle show 7Q2K9XAB
    """
    settings = at.existing()
    journal = read_journal(settings.paths)
    if entry_id == BATCH:
        return _show_batch(journal, settings.paths)
    entry = journal.find(entry_id)
    related = [e for e in journal.entries if entry.id in e.refs]
    data = {"entry": json_module.loads(entry.to_json()), "referred_by": [e.id for e in related]}
    lines = [*_entry_lines(entry, related, journal), *_changed(entry, journal)]
    return CommandResult(lines=lines, data=data)


def _changed(entry: Entry, journal: Journal) -> Iterator[str]:
    """What the launch of an incident has otherwise than the one before it."""
    if entry.kind != EntryKind.INCIDENT or entry.launch is None:
        return
    from chronicle.story.launch_settings import changed_before

    found = changed_before(journal.entries, entry.launch)
    if found is not None:
        yield ""
        yield f"launch {entry.launch} has otherwise than launch {found.launch}:"
        yield from (f"  {one.words}" for one in found.changes)


def _show_batch(journal: Journal, paths: RunPaths) -> CommandResult:
    """The newest batch that the guard has told."""
    entry = next(reversed(list(journal.of_kind(EntryKind.GUARD_FIRST_BATCH))), None)
    if entry is None:
        remedy = "an HF Trainer tells it by itself; elsewhere hand over the tokenizer: guard(…, tokenizer=)"
        raise ChronicleError(f"no first batch with token ids is recorded in run `{paths.run}`", remedy)
    seen = FirstBatchSeen.of(entry)
    launch = "" if entry.launch is None else f"launch {entry.launch} · "
    lines = [f"{launch}step {entry.step} · {format_when(entry.ts)} · {entry.id[-8:]}"]
    lines += lines_of(seen.text)
    lines += [f"{name.replace('_', ' ')}  {value}" for name, value in seen.revisions.items()]
    return CommandResult(lines=lines, data={"entry": json_module.loads(entry.to_json())})


def _entry_lines(entry: Entry, related: list[Entry], journal: Journal) -> Iterator[str]:
    yield f"{entry.kind} {entry.id}"
    yield f"when    {format_when(entry.ts)}"
    if entry.launch is not None or entry.step is not None:
        launch = "" if entry.launch is None else f"launch {entry.launch}"
        step = "" if entry.step is None else f"step {entry.step}"
        yield f"where   {' · '.join(x for x in (launch, step) if x)}"
    yield f"writer  {entry.writer} line {entry.seq + 1}"
    if entry.title:
        yield ""
        yield f"    {entry.title}"
    if entry.data:
        yield ""
        yield from (f"    {line}" for line in _value(entry.data))
    by_id = {e.id: e for e in journal.entries}
    for ref in entry.refs:
        yield f"refers to    {ref} {_brief(by_id.get(ref))}"
    for other in related:
        yield f"referred by  {other.id} {_brief(other)}"


def _brief(entry: Entry | None) -> str:
    return "(not in this journal)" if entry is None else f"{entry.kind} {entry.title}".rstrip()


def _value(value: Any, indent: str = "") -> Iterator[str]:
    """A mapping as indented lines; short values follow their names."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in items:
        name = str(key) if isinstance(value, Mapping) else "-"
        if isinstance(inner, Mapping | list | tuple) and inner:
            yield f"{indent}{name}"
            yield from _value(inner, indent + "  ")
        elif isinstance(inner, str) and "\n" in inner:
            yield f"{indent}{name}"
            yield from (f"{indent}  {line}" for line in lines_of(inner))
        else:
            yield f"{indent}{name}  {inner}"
