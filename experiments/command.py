"""`chronicle experiment plan | run | report`: the command line of studies, mounted through an entry point."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import CommandResult, ExitCode, JsonOption, LogsOption
from chronicle.settings import load_settings
from experiments.design import StudyPlan
from experiments.files import StudyPaths

app = typer.Typer(
    name="experiment", add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="Controlled studies of what a restart does to a run.")

StudyArgument = Annotated[str, typer.Argument(help="A study (`restart-impact`) or a YAML file of your own.")]
ProfileOption = Annotated[str, typer.Option(help="A profile of the study: its sizes.", metavar="NAME")]
NameOption = Annotated[str | None, typer.Option(help="Name of this study's run [STUDY-PROFILE].", metavar="NAME")]


@app.command()
def plan(
    study: StudyArgument = "restart-impact",
    profile: ProfileOption = "cpu",
    json: JsonOption = False,
) -> CommandResult:
    """Show what a study would launch, without launching anything.

    Example: chronicle experiment plan restart-impact --profile cpu
    """

    planned = _plan(study, profile)
    data = {"plan_hash": planned.plan_hash, "launches": planned.num_launches, "updates": planned.num_updates}
    return CommandResult(lines=format_study_plan(planned), data=data | planned.to_json())


@app.command()
def run(
    study: StudyArgument = "restart-impact",
    profile: ProfileOption = "cpu",
    jobs: Annotated[int, typer.Option(help="Launches side by side, one thread each.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this run, for example B-s3 (repeatable; a task of a job array each).")
    ] = None,
    name: NameOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Run a study, or go on with it: everything that the journal says is not done yet.

    Example: chronicle experiment run restart-impact --profile ci
    """
    from experiments.runner import ChronicleLauncher, run_study

    planned = _plan(study, profile)
    for run_name in only or ():
        planned.run(run_name)
    paths = _paths(name or f"{planned.study.name}-{profile}", logs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's TERM ends the launches like Ctrl-C
    outcome = run_study(
        planned, paths, ChronicleLauncher(paths, dict(os.environ)), jobs=max(1, jobs), only=only or (), say=_say)
    lines = [f"study `{paths.study_dir.name}`: {len(outcome.complete)} of {len(planned.runs)} runs complete"]
    lines += [f"stopped {run_name}: {reason}" for run_name, reason in outcome.stopped.items()]
    if outcome.open:
        lines.append(f"open: {', '.join(outcome.open)}")
    else:
        lines.append(f"next: chronicle experiment report {paths.study_dir.name}")
    code = ExitCode.FINDINGS if outcome.stopped else ExitCode.DONE
    return CommandResult(lines=lines, data={**asdict(outcome), "directory": str(paths.study_dir)}, exit_code=code)


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="Name of the study's run, or the folder of its report.")] = "restart-impact-cpu",
    out: Annotated[
        Path | None, typer.Option(help="Where to write it [the study's own report/].", metavar="DIR")
    ] = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Answer the study's questions: verdicts, plots and tables, refused where its own controls failed.

    The folder of a report is judged again from its own raw files: chronicle experiment report docs/results/restart-impact-cpu

    Example: chronicle experiment report restart-impact-cpu
    """
    from experiments.report import MEASURED, build_report, judge_folder

    if (Path(name) / MEASURED).is_file():
        return judge_folder(Path(name))
    paths = _paths(name, logs)
    return build_report(paths, out or paths.study_dir / "report")


def _plan(study: str, profile: str) -> StudyPlan:
    from experiments.definition import find_study
    from experiments.design import plan_study

    return plan_study(find_study(study), profile)


def _paths(name: str, logs: Path | None) -> StudyPaths:
    return StudyPaths(load_settings(Path.cwd(), os.environ, run=name, logs=logs).paths.run_dir)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- Plan and status as text


def format_study_plan(plan: StudyPlan) -> str:
    """The arms, their launches and the price."""
    profile, study = plan.profile, plan.study
    starts = f"{profile.starts} starts" if profile.starts > 1 else "start"
    lines = [study.title, f"study {study.name}, profile {profile.name}, plan {plan.plan_hash[:12]}",
             f"trainer: {shlex.join(study.trainer.command)}",
             f"{starts} of {profile.start_updates} updates, slices of {profile.slice_updates}",
             f"primary outcome: {study.primary}; margin ±{study.margin_bpb:g} {study.unit}; "
             f"independent units: {' × '.join(f'{kind}s' for kind in plan.unit_kinds)}", "",
             f"{'arm':<10}{'seeds':>6}{'launches':>10}  what"]
    for name in plan.arm_names:
        own = [run for run in plan.runs if run.arm == name]
        lines.append(f"{name:<10}{len(own):>6}{len(own[0].legs):>10}  {study.arm(name).says}")
    contrasts = []
    for c in study.contrasts:
        if {c.plus, c.minus} <= set(plan.arm_names):
            contrasts.append(f"{c.name} = {c.plus} − {c.minus}{' (main)' if c.family == 'main' else ''}")
    lines += ["", f"contrasts: {'; '.join(contrasts)}"]
    lines.append(f"{len(plan.runs)} runs, {plan.num_launches} launches, {plan.num_updates:,} updates")
    return "\n".join(lines)
