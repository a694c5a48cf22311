"""`chronicle log [--graph]`: the journal, newest first, as lines or as the tree of launches that it is."""

import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from chronicle.commands.existing import need_run
from chronicle.commands.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.commands.result import CommandResult
from chronicle.journal import Entry
from chronicle.paths import RunPaths
from chronicle.report.graph import GraphLine, draw_graph
from chronicle.story import Story, read_story
from chronicle.story.assemble import loss_of
from chronicle.story.measurements import points_until
from chronicle.story.plain import format_when, plain

__all__ = ["log"]

QUIET = ("launch.step", "rollback.intent", "undo.intent")
COLOURS = {"kept": "1;32", "abandoned": "90", "incident": "31", "rollback.receipt": "1;33", "hardware": "35", "proposal": "36"}


def log(
    graph: Annotated[bool, typer.Option("--graph", help="Draw launches and rollbacks as a tree.")] = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only entries of this kind (repeatable).")] = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, help="At most this many lines, newest.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Oldest first.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also single checkpoints and intents.")] = False,
    only_open: Annotated[bool, typer.Option("--open", help="Only what still asks for an outcome.")] = False,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """List the journal, newest first.

    Example: chronicle log --graph
    """
    settings = need_run(settings_from(run, logs))
    story = read_story(settings.paths)
    entries = _selected(story, kind, every=every or json, only_open=only_open)
    chosen = entries if reverse else entries[::-1]
    chosen = chosen if limit is None else (chosen[-limit:] if reverse else chosen[:limit])
    if graph:
        lines = _paint(draw_graph(story, _loss_reader(settings.paths)), limit)
    else:
        lines = _lines(chosen)
    talk = () if story.entries else (f"no entries yet in run `{settings.run}`",)
    return CommandResult(text="\n".join(lines), data=[json_module.loads(e.to_json()) for e in chosen], talk=talk)


def _selected(story: Story, kinds: Sequence[str] | None, *, every: bool, only_open: bool) -> list[Entry]:
    entries = [e for e in story.entries if (e.kind in kinds if kinds else every or e.kind not in QUIET)]
    if only_open:
        wanted = {m.entry.id for m in story.open_matters} | {x.entry.id for x in story.interventions if x.open}
        entries = [e for e in entries if e.id in wanted]
    if every or kinds or only_open:
        return entries
    return [e for i, e in enumerate(entries) if not (e.kind == "checkpoint" and _is_checkpoint(entries, i + 1))]


def _is_checkpoint(entries: Sequence[Entry], index: int) -> bool:
    """A checkpoint followed by another is left out: the last of each row stands for it."""
    return index < len(entries) and entries[index].kind == "checkpoint"


def _lines(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        launch = "" if entry.launch is None else f"L{entry.launch}"
        step = "" if entry.step is None else str(entry.step)
        what = plain(entry.title) or plain(entry.data.get("path") or entry.data.get("verdict") or "")
        where = f"{launch:>4} {step:>8}"
        yield f"{plain(entry.id[-8:])}  {format_when(entry.ts)}  {where}  {plain(entry.kind):<16}  {what}".rstrip()


def _loss_reader(paths: RunPaths) -> Callable[[int, int], float | None]:
    def loss_at(launch: int, step: int) -> float | None:
        for point in reversed(points_until(paths.metrics_path(launch), step)):
            loss = loss_of(point.values)
            if loss is not None:
                return loss
        return None

    return loss_at


def _paint(lines: Iterator[GraphLine], limit: int | None) -> Iterator[str]:
    rows = list(lines)[:limit]
    width = min(24, max((len(row.lanes) for row in rows), default=0))
    colour = _wants_colour()
    for row in rows:
        text = f"{row.lanes:<{width}}  {row.text}".rstrip()
        code = COLOURS.get(row.style) if colour else None
        yield f"\x1b[{code}m{text}\x1b[0m" if code else text


def _wants_colour() -> bool:
    """https://no-color.org; never into a file or a pipe unless FORCE_COLOR says so."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
