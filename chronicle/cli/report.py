"""`chronicle report` and `serve`: write the run as HTML or Markdown, or serve it as a live page."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from chronicle.cli.options import (
    IN_RUN,
    CommandResult,
    ExitCode,
    InRun,
    LogsOption,
    RunOption,
    all_runs,
    need_run,
    settings_from,
)
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.paths import RunPaths
from chronicle.report.html import render_html, render_state
from chronicle.report.markdown import LINEAGE_PICTURE, render_markdown
from chronicle.report.markup import write_page
from chronicle.story import Story, read_story
from chronicle.story.read import lost_seconds
from chronicle.story.series import LaunchSeries, read_parent, read_series, with_machine

if TYPE_CHECKING:
    from chronicle.report.index import ServedIndex

OURS = 'name="generator" content="chronicle"'  # in the head of every page that we write


def write_report(
    out: Path | None = None,
    public: Path | None = None,
    markdown: bool = False,
    check: bool = False,
    plots: bool = True,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Write the run as one HTML page, or its story as Markdown.

    The page works offline. The Markdown and its picture lie beside the journal.

    Example: chronicle report -o tr-190.html

    An index of all runs with a page of each: chronicle report --public site

    Options:
      --out, -o: File to write [report.html of the run].
      --public DIR: Write a site of all runs of the logs directory into DIR instead.
      --markdown: Write the story as CHRONICLE.md with one picture instead.
      --check: Write nothing; exit 5 when the Markdown is outdated.
      --plots/--no-plots: Draw the Markdown's picture (needs matplotlib).
    """
    if public is not None and (out is not None or markdown or check or at.run is not None):
        raise UsageProblem("--public with --out, --markdown, --check or --run: the site has all runs of the logs directory")
    if public is not None:
        return _write_site(at.logs, public)
    if markdown and out is not None:
        raise UsageProblem("--markdown with --out: CHRONICLE.md is written into the run's own directory")
    if markdown or check:
        return _write_markdown(at, check=check, plots=plots)
    settings = at.existing()
    story, series, rest = _told(settings.paths, signs_of_life=False)
    page = render_html(story, series, **rest)
    target = out or settings.paths.report_html
    write_page(target, page)
    data = {"run": settings.run, "path": str(target), "bytes": len(page.encode()), "launches": len(story.launches)}
    return CommandResult(raw=str(target), data=data)


def _write_site(logs: Path | None, out: Path) -> CommandResult:
    """The index of all runs and a page of each: files that any web server can serve."""
    from chronicle.report.index import write_site  # reads all runs: only this command
    from chronicle.runs import list_runs

    directory = all_runs(logs)
    if out.exists() and not out.is_dir():
        raise UsageProblem(f"--public {out}: it is a file; name a directory")
    if not list_runs(directory):
        raise UsageProblem(f"no run in `{directory}`", "name the directory of all runs with --logs DIR")
    index = out / "index.html"
    if index.exists() and OURS not in index.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UsageProblem(f"--public {out}: `{index}` is not one of ours and would be replaced", "name another directory")
    rows = write_site(directory, out, page=_page)
    unread = [row for row in rows if row.get("problem")]
    talk = tuple(f"{row['name']} has no page: {row['problem']}" for row in unread)
    data = {"runs": [row["name"] for row in rows], "unreadable": [row["name"] for row in unread]}
    return CommandResult(raw=str(out / "index.html"), data={"path": str(out / "index.html"), **data}, talk=talk)


# --- chronicle report --markdown


def _write_markdown(at: InRun, *, check: bool, plots: bool) -> CommandResult:
    """Write the story of the run as Markdown, with one picture."""
    settings = at.existing()
    paths = settings.paths
    story = read_story(paths, signs_of_life=False)
    picture = any(launch.span.has_steps for launch in story.launches)
    text = render_markdown(story, picture=picture, lost_seconds=lost_seconds(story, paths))
    if check:
        return _check(paths, text)
    write_page(paths.chronicle_md, text)
    talk = _draw(story, paths) if picture and plots else ()
    data = {"run": settings.run, "path": str(paths.chronicle_md), "entries": len(story.entries), "picture": picture}
    return CommandResult(raw=str(paths.chronicle_md), data=data, talk=talk)


def _check(paths: RunPaths, text: str) -> CommandResult:
    try:
        found = paths.chronicle_md.read_text(encoding="utf-8")
    except OSError:
        found = None
    state = "missing" if found is None else "current" if found == text else "stale"
    words = f"{paths.chronicle_md}: {state}" + ("" if state == "current" else ": write it with `chronicle report --markdown`")
    code = ExitCode.DONE if state == "current" else ExitCode.FINDINGS
    return CommandResult(lines=words, data={"path": str(paths.chronicle_md), "state": state}, exit_code=code)


def _draw(story: Story, paths: RunPaths) -> tuple[str, ...]:
    from chronicle.report.lineage_picture import draw_lineage

    numbers = [launch.number for launch in story.launches]
    try:
        draw_lineage(story, read_series(paths, numbers), paths.run_dir / LINEAGE_PICTURE, read_parent(story, paths))
    except ModuleNotFoundError as problem:
        return (f"picture not drawn: {problem.name} is not installed (pip install 'chronicle-ml[report]')",)
    return ()


# --- chronicle serve


def serve(
    port: Annotated[int, Option(help="Port; 0 selects a free one.", min=0, max=65535)] = 8765,
    host: str = "127.0.0.1",
    token: str | None = None,
    run: RunOption = None,
    logs: LogsOption = None,
) -> CommandResult:
    """Serve the run's page on 127.0.0.1 until Ctrl-C.

    Where no run is named and the logs directory holds several, it serves an index of all of them, with a page of each.
    The page is loaded once; new points and entries are sent to it, and zoom and choices stay. From another machine use
    `ssh -L 8765:127.0.0.1:8765 host`.

    Example: chronicle serve --port 8765

    Behind a token: chronicle serve --host 0.0.0.0 --token file:~/.config/chronicle/token; also on 127.0.0.1, where others
    of this machine must not read it.

    Options:
      --host: Address to serve on; any but 127.0.0.1 needs --token.
      --token WHERE: Where the token stands that a reader needs: env:NAME or file:PATH.
    """
    from chronicle.credentials import secret_of
    from chronicle.report.server import LiveServer, Makers

    if token is not None and not token.startswith(("env:", "file:")):
        raise UsageProblem("--token: a secret does not belong on a command line", "say where it stands: env:NAME or file:PATH")
    secret = None if token is None else secret_of(token)
    makers, many = Makers(_page, _state, _status), _many_runs(run, logs)
    runs = need_run(settings_from(run, logs)).paths if many is None else many.runs
    index = None if many is None else many.page
    try:
        server = LiveServer(runs, port, makers=makers, index=index, host=host, token=secret)
    except OSError as problem:
        raise ChronicleError(
            f"cannot serve on {host}:{port}: {problem.strerror or problem}", "name another port with --port N, or 0"
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


def _many_runs(run: str | None, logs: Path | None) -> "ServedIndex | None":
    """The index of all runs, where none is named and there are several; else None."""
    from chronicle.report.index import ServedIndex
    from chronicle.report.server import fingerprint, mark_of
    from chronicle.settings import load_settings

    try:
        load_settings(Path.cwd(), os.environ, run=run, logs=logs)
        return None  # a run is named, here or in the settings, or there is one only
    except UsageProblem:
        index = ServedIndex(all_runs(logs), lambda paths: mark_of(fingerprint(paths)))
    return index if run is None and len(index.runs()) > 1 else None


def _page(paths: RunPaths, mark: str | None = None) -> str:
    """The page; `mark`: of a served one, what the run was like."""
    story, series, rest = _told(paths)
    return render_html(story, series, mark=mark, **rest)


def _state(paths: RunPaths, mark: str) -> str:
    """What of the served page changes."""
    story, series, rest = _told(paths)
    return render_state(story, series, mark=mark, **rest)


def _told(paths: RunPaths, *, signs_of_life: bool = True) -> tuple[Story, list[LaunchSeries], dict[str, Any]]:
    story = read_story(paths, signs_of_life=signs_of_life)
    series = with_machine(paths, story, read_series(paths, [launch.number for launch in story.launches]))
    return story, series, {"lost_seconds": lost_seconds(story, paths), "parent": read_parent(story, paths)}


def _status(paths: RunPaths) -> str:
    from chronicle.story.summary import check_lr, summarize

    story = read_story(paths)
    return json_module.dumps(summarize(story, check_lr(story, paths)), default=str)
