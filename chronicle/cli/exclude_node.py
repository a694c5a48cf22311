"""`chronicle exclude-node HOST`: take a node out of use for this run; `chronicle run` refuses to start on it."""

from typing import Annotated, Any

import typer

from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import UsageProblem
from chronicle.launch.nodes import EXCLUDE, READMIT, find_excluded
from chronicle.journal import JournalWriter, read_journal

__all__ = ["exclude_node"]


def exclude_node(
    host: Annotated[str | None, typer.Argument(help="The node; without it the excluded ones are listed.")] = None,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    readmit: Annotated[bool, typer.Option("--readmit", help="Bring it back into use.")] = False,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Exclude a node, bring one back, or print the excluded ones as SLURM's --exclude wants them.

    Example: chronicle exclude-node ip-26-0-147-135 --reason "Xid 64"
    """
    paths = settings_from(run, logs).paths
    excluded = find_excluded(read_journal(paths).entries)
    if host is None:
        return CommandResult(text=",".join(excluded), data={"excluded": excluded})
    if readmit and host not in excluded:
        raise UsageProblem(f"`{host}` is not excluded", "`chronicle exclude-node` lists the nodes that are")
    data: dict[str, Any] = {"action": READMIT if readmit else EXCLUDE, "host": host, "reason": reason}
    words = f"{'readmitted' if readmit else 'excluded'} {host}" + (f": {reason}" if reason else "")
    with JournalWriter(paths) as writer:
        entry = writer.append("hardware", title=words, data=data)
    return CommandResult(text=f"{entry.id}  {words}", data={"id": entry.id, **data})
