"""`chronicle experiment plan | run | status | report`: the command line of studies, mounted through an entry point."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.options import JsonOption, LogsOption
from chronicle.cli.result import CommandResult, ExitCode
from chronicle.settings import load_settings
from experiments.files import StudyPaths

__all__ = ["app"]

app = typer.Typer(
    name="experiment", add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="Controlled studies of what a restart does to a run.")  # fmt: skip

StudyArgument = Annotated[str, typer.Argument(help="A study (`restart-impact`) or a YAML file of your own.")]
ProfileOption = Annotated[str, typer.Option(help="Sizes: ci, cpu, cpu-1m, gpu.", metavar="NAME")]
SeedsOption = Annotated[int | None, typer.Option(help="How many paired seeds, instead of the profile's.")]
ArmsOption = Annotated[
    str | None, typer.Option(help="Arms, separated by commas, instead of the profile's.", metavar="A,B")
]
NameOption = Annotated[str | None, typer.Option(help="Name of this study's run [STUDY-PROFILE].", metavar="NAME")]


@app.command()
def plan(
    study: StudyArgument = "restart-impact",
    profile: ProfileOption = "cpu",
    seeds: SeedsOption = None,
    arms: ArmsOption = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a SLURM array script for the same plan.")] = False,
    name: NameOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Show what a study would launch, without launching anything.

    Example: chronicle experiment plan restart-impact --profile cpu
    """
    from experiments.plan_text import format_plan, format_slurm

    planned = _plan(study, profile, seeds, arms)
    if slurm:
        paths = _paths(name or f"{planned.study.name}-{profile}", logs)
        return CommandResult(text=format_slurm(planned, study, paths.study_dir))
    counts = {"launches": planned.num_launches, "updates": planned.num_updates}
    data = {"plan_hash": planned.plan_hash, **counts, **planned.to_json()}
    return CommandResult(text=format_plan(planned), data=data)


@app.command()
def run(
    study: StudyArgument = "restart-impact",
    profile: ProfileOption = "cpu",
    seeds: SeedsOption = None,
    arms: ArmsOption = None,
    jobs: Annotated[int, typer.Option(help="Launches side by side, one thread each.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this run, for example B-s3 (repeatable; SLURM arrays).")
    ] = None,
    retry_stopped: Annotated[bool, typer.Option("--retry-stopped", help="Try runs again that were stopped.")] = False,
    name: NameOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Run a study, or go on with it: everything that the journal says is not done yet.

    Example: chronicle experiment run restart-impact --profile ci
    """
    from experiments.launching import ChronicleLauncher
    from experiments.runner import run_study

    planned = _plan(study, profile, seeds, arms)
    for run_name in only or ():
        planned.run(run_name)
    paths = _paths(name or f"{planned.study.name}-{profile}", logs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's TERM ends the launches like Ctrl-C
    outcome = run_study(
        planned, paths, ChronicleLauncher(paths, dict(os.environ)), jobs=max(1, jobs), only=only or (),
        retry_stopped=retry_stopped, say=_say)  # fmt: skip
    lines = [f"study `{paths.study_dir.name}`: {len(outcome.complete)} of {len(planned.runs)} runs complete"]
    lines += [f"stopped {run_name}: {reason}" for run_name, reason in outcome.stopped.items()]
    if outcome.open:
        lines.append(f"open: {', '.join(outcome.open)}")
    else:
        lines.append(f"next: chronicle experiment report {paths.study_dir.name}")
    data = {
        "complete": outcome.complete,
        "stopped": outcome.stopped,
        "open": outcome.open,
        "directory": str(paths.study_dir),
    }
    code = ExitCode.FINDINGS if outcome.stopped else ExitCode.DONE
    return CommandResult(text="\n".join(lines), data=data, exit_code=code)


@app.command()
def status(
    name: Annotated[str, typer.Argument(help="Name of the study's run.")] = "restart-impact-cpu",
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Show how far a study is: runs done, under way, stopped with their reasons.

    Example: chronicle experiment status restart-impact-cpu
    """
    from experiments.plan_text import describe_status, format_status
    from experiments.runner import read_registered

    registered, history = read_registered(_paths(name, logs))
    data = describe_status(registered, history)
    return CommandResult(text=format_status(data), data=data)


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="Name of the study's run.")] = "restart-impact-cpu",
    out: Annotated[
        Path | None, typer.Option(help="Where to write it [the study's own report/].", metavar="DIR")
    ] = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Answer the study's questions: verdicts, plots and tables, refused where its own controls failed.

    Example: chronicle experiment report restart-impact-cpu
    """
    from experiments.report import build_report

    paths = _paths(name, logs)
    built = build_report(paths, out or paths.report_dir)
    return CommandResult(text=built.text, data=built.data)


def _plan(study: str, profile: str, seeds: int | None, arms: str | None) -> Any:
    from experiments.design import plan_study
    from experiments.reading import find_study

    chosen = tuple(part.strip() for part in arms.split(",") if part.strip()) if arms else ()
    return plan_study(find_study(study), profile, seeds=seeds, arms=chosen)


def _paths(name: str, logs: Path | None) -> StudyPaths:
    settings = load_settings(Path.cwd(), os.environ, run=name, logs=logs)
    return StudyPaths(settings.paths.run_dir)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
