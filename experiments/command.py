"""`chronicle experiment plan | run | status | report`: the command line of studies, mounted through an entry point."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.options import CommandResult, ExitCode, JsonOption, LogsOption
from chronicle.settings import load_settings
from experiments.design import START, StudyPlan
from experiments.files import StudyPaths
from experiments.history import StudyHistory, count_updates

app = typer.Typer(
    name="experiment", add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    help="Controlled studies of what a restart does to a run.")

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
    json: JsonOption = False,
) -> CommandResult:
    """Show what a study would launch, without launching anything.

    Example: chronicle experiment plan restart-impact --profile cpu
    """

    planned = _plan(study, profile, seeds, arms)
    counts = {"launches": planned.num_launches, "updates": planned.num_updates}
    data = {"plan_hash": planned.plan_hash, **counts, **planned.to_json()}
    return CommandResult(text=format_study_plan(planned), data=data)


@app.command()
def run(
    study: StudyArgument = "restart-impact",
    profile: ProfileOption = "cpu",
    seeds: SeedsOption = None,
    arms: ArmsOption = None,
    jobs: Annotated[int, typer.Option(help="Launches side by side, one thread each.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this run, for example B-s3 (repeatable; a task of a job array each).")
    ] = None,
    retry_stopped: Annotated[bool, typer.Option("--retry-stopped", help="Try runs again that were stopped.")] = False,
    name: NameOption = None,
    logs: LogsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Run a study, or go on with it: everything that the journal says is not done yet.

    Example: chronicle experiment run restart-impact --profile ci
    """
    from experiments.runner import ChronicleLauncher, run_study

    planned = _plan(study, profile, seeds, arms)
    for run_name in only or ():
        planned.run(run_name)
    paths = _paths(name or f"{planned.study.name}-{profile}", logs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's TERM ends the launches like Ctrl-C
    outcome = run_study(
        planned, paths, ChronicleLauncher(paths, dict(os.environ)), jobs=max(1, jobs), only=only or (),
        retry_stopped=retry_stopped, say=_say)
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
    from experiments.runner import read_registered

    registered, history = read_registered(_paths(name, logs))
    data = describe_status(registered, history)
    return CommandResult(text=format_status(data), data=data)


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
        built = judge_folder(Path(name))
        return CommandResult(text=built.text, data=built.data)
    paths = _paths(name, logs)
    built = build_report(paths, out or paths.report_dir)
    return CommandResult(text=built.text, data=built.data)


def _plan(study: str, profile: str, seeds: int | None, arms: str | None) -> Any:
    from experiments.definition import find_study
    from experiments.design import plan_study

    chosen = tuple(part.strip() for part in arms.split(",") if part.strip()) if arms else ()
    return plan_study(find_study(study), profile, seeds=seeds, arms=chosen)


def _paths(name: str, logs: Path | None) -> StudyPaths:
    settings = load_settings(Path.cwd(), os.environ, run=name, logs=logs)
    return StudyPaths(settings.paths.run_dir)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- Plan and status as text


def format_study_plan(plan: StudyPlan) -> str:
    """The arms, their launches and the price."""
    profile, study = plan.profile, plan.study
    model = f"model d{profile.d_model} L{profile.num_layers}"
    sizes = f"{model}, windows of {profile.window_bytes} bytes, batch {profile.batch_size}"
    if study.trainer is not None:
        sizes = f"trainer: {shlex.join(study.trainer.command)}"
    starts = f"{profile.starts} starts" if profile.starts > 1 else "start"
    lines = [study.title, f"study {study.name}, profile {profile.name}, plan {plan.plan_hash[:12]}",
             f"{sizes}; {starts} {profile.start_updates} updates, slices of {profile.slice_updates}",
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


def describe_status(plan: StudyPlan, history: StudyHistory) -> dict[str, Any]:
    """State of every run: `done`, `stopped`, or how many launches are finished."""
    runs = []
    for run in plan.runs:
        done = len(history.done.get(run.name, ()))
        state = "done" if done == len(run.legs) else "stopped" if run.name in history.stopped else "open"
        runs.append({"run": run.name, "arm": run.arm, "launches_done": done, "launches": len(run.legs), "state": state,
                     "reason": history.stopped.get(run.name)})
    return {"study": plan.study.name, "profile": plan.profile.name, "plan_hash": plan.plan_hash, "runs": runs,
            "updates_done": count_updates(plan, history), "updates": plan.num_updates}


def format_status(data: Mapping[str, Any]) -> str:
    """One line an arm, then the stopped runs."""
    lines = [f"study {data['study']}, profile {data['profile']}, plan {data['plan_hash'][:12]}: "
             f"{data['updates_done']:,} of {data['updates']:,} updates"]
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for run in data["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    for arm, runs in arms.items():
        done = sum(run["state"] == "done" for run in runs)
        what = "common checkpoint" if arm == START else f"{done} of {len(runs)} seeds"
        lines.append(f"  {arm:<10}{'done' if done == len(runs) else 'open':<6}{what}")
    lines += [f"stopped {run['run']}: {run['reason']}" for run in data["runs"] if run["reason"]]
    return "\n".join(lines)
