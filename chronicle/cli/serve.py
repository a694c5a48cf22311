"""`chronicle serve`: the page of `chronicle report`, live, on this machine only."""

import json as json_module
import sys
from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths

__all__ = ["serve"]


def serve(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 8765,
    run: RunOption = None,
    logs: LogsOption = None,
) -> CommandResult:
    """Show the run's page live on 127.0.0.1 until Ctrl-C; from afar use `ssh -L 8765:127.0.0.1:8765 host`.

    Example: chronicle serve --port 8765
    """
    from chronicle.report.html import plotly_script
    from chronicle.report.server import LiveServer

    settings = need_run(settings_from(run, logs))
    paths, script = settings.paths, plotly_script()
    try:
        server = LiveServer(paths, port, page=lambda: _page(paths, script), status=lambda: _status(paths))
    except OSError as problem:
        raise ChronicleError(
            f"cannot serve on 127.0.0.1:{port}: {problem.strerror or problem}", "take another with --port N, or 0"
        ) from problem
    print(f"{server.url}  (read-only; Ctrl-C ends it)", file=sys.stderr, flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.stopping.set()
        server.server_close()
    return CommandResult()


def _page(paths: RunPaths, script: str) -> str:
    from chronicle.story.costs import lost_seconds
    from chronicle.report.html import render_html
    from chronicle.report.study_panels import read_panels
    from chronicle.story import read_story
    from chronicle.story.series import read_series

    story = read_story(paths)
    series = read_series(paths, [launch.number for launch in story.launches])
    lost, panels = lost_seconds(story, paths), read_panels(story, paths)
    return render_html(story, series, script=script, lost_seconds=lost, panels=panels, live=True)


def _status(paths: RunPaths) -> str:
    from chronicle.story import read_story
    from chronicle.story.lr_check import check_lr
    from chronicle.story.summary import summarize

    story = read_story(paths)
    return json_module.dumps(summarize(story, check_lr(story, paths)), default=str)
