"""`chronicle render`: write `CHRONICLE.md` and its picture; `--check` says whether the committed file is stale."""

from typing import Annotated

import typer

from chronicle.cli.existing import need_run
from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult, ExitCode
from chronicle.paths import RunPaths
from chronicle.story.costs import lost_seconds
from chronicle.report.markdown import LINEAGE_PICTURE, render_markdown
from chronicle.report.writing import write_page
from chronicle.story import Story, read_story

__all__ = ["render"]


def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 5 when the file is stale.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the picture (needs matplotlib).")] = True,
    run: RunOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write the chronicle of the run as Markdown, with one picture of its whole life.

    Example: chronicle render --check
    """
    settings = need_run(settings_from(run, logs))
    paths = settings.paths
    story = read_story(paths, signs_of_life=False)
    picture = any(launch.span.has_steps for launch in story.launches)
    text = render_markdown(story, picture=picture, lost_seconds=lost_seconds(story, paths))
    if check:
        return _check(paths, text)
    write_page(paths.chronicle_md, text)
    talk = _draw(story, paths) if picture and plots else ()
    data = {"run": settings.run, "path": str(paths.chronicle_md), "entries": len(story.entries), "picture": picture}
    return CommandResult(text=str(paths.chronicle_md), data=data, talk=talk)


def _check(paths: RunPaths, text: str) -> CommandResult:
    try:
        found = paths.chronicle_md.read_text(encoding="utf-8")
    except OSError:
        found = None
    state = "missing" if found is None else "current" if found == text else "stale"
    words = f"{paths.chronicle_md}: {state}" + ("" if state == "current" else ": `chronicle render` writes it anew")
    code = ExitCode.DONE if state == "current" else ExitCode.FINDINGS
    return CommandResult(text=words, data={"path": str(paths.chronicle_md), "state": state}, exit_code=code)


def _draw(story: Story, paths: RunPaths) -> tuple[str, ...]:
    from chronicle.report.lineage_picture import draw_lineage
    from chronicle.story.series import read_series

    numbers = [launch.number for launch in story.launches]
    try:
        draw_lineage(story, read_series(paths, numbers), paths.run_dir / LINEAGE_PICTURE)
    except ModuleNotFoundError as problem:
        return (f"picture not drawn: {problem.name} is not installed (pip install 'chronicle-ml[report]')",)
    return ()
