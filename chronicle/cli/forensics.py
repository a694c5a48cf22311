"""`chronicle forensics [DIR]`: reconstructs launches without a journal: timeline, contradictions, a draft report."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.audit.postmortem import find_contradictions, infer_launches, list_timeline, list_unknowns, write_draft
from chronicle.audit.traces import scan_directory
from chronicle.cli.options import CommandResult, JsonOption
from chronicle.errors import UsageProblem

__all__ = ["forensics"]


def forensics(
    directory: Annotated[Path | None, typer.Argument(help="Directory of the run [here].", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Write a post-mortem draft to this file.", metavar="FILE")] = None,
    json: JsonOption = False,
) -> CommandResult:
    """Reconstruct the launches of an unrecorded run from its files.

    Files, logs and processes are read. The result distinguishes observed, inferred and unknown facts.

    Example: chronicle forensics /data/run7 --out POSTMORTEM.md
    """
    place = directory or Path.cwd()
    if not place.is_dir():
        raise UsageProblem(f"`{place}` is not a directory: expected the directory of a run")
    scan = scan_directory(place)
    launches = infer_launches(scan.observations)
    contradictions = find_contradictions(launches, scan.observations, scan.scripts)
    unknowns = list_unknowns(launches)
    draft = write_draft(scan, launches, contradictions, unknowns)
    talk: tuple[str, ...] = ()
    if out is not None:
        out.write_text(draft, encoding="utf-8")
        talk = (f"draft: {out}",)
    data = {
        "directory": str(place),
        "launches": [
            {"number": one.number, "source": one.source, "started": one.started, "reached": one.reached} for one in launches
        ],
        "contradictions": [{"text": one.text, "from": list(one.follows_from)} for one in contradictions],
        "unknown": list(unknowns),
        "timeline": [{"time": time, "place": where, "what": what} for time, where, what in list_timeline(scan, launches)],
        "processes": [{"pid": one.pid, "started": one.started, "orphan": one.orphan} for one in scan.processes],
    }
    return CommandResult(text=draft, data=data, talk=talk)
