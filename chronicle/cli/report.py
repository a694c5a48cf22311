"""`chronicle report`: the whole run as one self-contained HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.story.costs import lost_seconds
from chronicle.report.html import plotly_script, render_html
from chronicle.report.study_panels import read_panels
from chronicle.report.writing import write_page
from chronicle.story import read_story
from chronicle.story.series import read_series

__all__ = ["report"]


def report(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write [report.html of the run].")] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write the run as one HTML page that opens anywhere, without network.

    Example: chronicle report -o tr-190.html
    """
    settings = need_run(settings_from(run, logs))
    paths, script = settings.paths, plotly_script()
    story = read_story(paths, signs_of_life=False)
    series = read_series(paths, [launch.number for launch in story.launches])
    lost, panels = lost_seconds(story, paths), read_panels(story, paths)
    page = render_html(story, series, script=script, lost_seconds=lost, panels=panels)
    target = out or paths.report_html
    write_page(target, page)
    data = {"run": settings.run, "path": str(target), "bytes": len(page.encode()), "launches": len(story.launches)}
    return CommandResult(text=str(target), data=data)
