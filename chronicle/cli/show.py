"""`chronicle show ID`: one entry in full, what refers to it, and what it refers to."""

import json as json_module
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from chronicle.cli.completion import complete_entries
from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.journal import Entry, Journal, read_journal
from chronicle.story.plain import plain, plain_block

__all__ = ["show"]


def show(
    entry_id: Annotated[
        str,
        typer.Argument(
            help="Id of the entry, or an unambiguous beginning or end of it.", metavar="ID", autocompletion=complete_entries
        ),
    ],
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Show one entry in full, with what it refers to and what refers to it.

    Example: chronicle show 7Q2K9XAB
    """
    settings = need_run(settings_from(run, logs))
    journal = read_journal(settings.paths)
    entry = journal.find(entry_id)
    related = [e for e in journal.entries if entry.id in e.refs]
    data = {"entry": json_module.loads(entry.to_json()), "referred_by": [e.id for e in related]}
    return CommandResult(text="\n".join(_lines(entry, related, journal)), data=data)


def _lines(entry: Entry, related: list[Entry], journal: Journal) -> Iterator[str]:
    yield f"{plain(entry.kind)} {plain(entry.id)}"
    yield f"when    {plain(entry.ts)}"
    if entry.launch is not None or entry.step is not None:
        launch = "" if entry.launch is None else f"launch {entry.launch}"
        step = "" if entry.step is None else f"step {entry.step}"
        yield f"where   {' · '.join(x for x in (launch, step) if x)}"
    yield f"writer  {plain(entry.writer)} line {entry.seq + 1}"
    if entry.title:
        yield f"\n    {plain(entry.title)}"
    if entry.data:
        yield ""
        yield from (f"    {line}" for line in _value(entry.data))
    by_id = {e.id: e for e in journal.entries}
    for ref in entry.refs:
        yield f"refers to    {plain(ref)} {_brief(by_id.get(ref))}"
    for other in related:
        yield f"referred by  {plain(other.id)} {_brief(other)}"


def _brief(entry: Entry | None) -> str:
    return "(not in this journal)" if entry is None else f"{plain(entry.kind)} {plain(entry.title)}".rstrip()


def _value(value: Any, indent: str = "") -> Iterator[str]:
    """A mapping as indented lines; short leaves on the line of their name."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in items:
        name = plain(key) if isinstance(value, Mapping) else "-"
        if isinstance(inner, Mapping | list | tuple) and inner:
            yield f"{indent}{name}"
            yield from _value(inner, indent + "  ")
        elif isinstance(inner, str) and "\n" in inner:
            yield f"{indent}{name}"
            yield from (f"{indent}  {line}" for line in plain_block(inner).split("\n"))
        else:
            yield f"{indent}{name}  {plain(inner)}"
