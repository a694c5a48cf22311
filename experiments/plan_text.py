"""A plan and its state in words: the table of runs, the SLURM array, the status. Pure text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.design import START, StudyPlan
from experiments.history import History
from experiments.progress import count_updates

__all__ = ["describe_status", "format_plan", "format_slurm", "format_status"]

SLURM = """#!/bin/bash
# {num} runs of one registered plan, one array task each; tasks share nothing but the file system.
# First: sbatch --array=0 THIS      then: sbatch --dependency=afterok:JOBID --array=1-{last} THIS
#SBATCH --job-name={job}
#SBATCH --output={job}-%A-%a.out
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
#SBATCH --cpus-per-task=1
runs=({runs})
exec chronicle experiment run {arguments} --jobs 1 --only "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


def format_plan(plan: StudyPlan) -> str:
    """The arms, their launches and the price."""
    profile, study = plan.profile, plan.study
    seeds = {name: sum(run.arm == name for run in plan.runs) for name in plan.arm_names}
    lines = [
        f"{study.title}",
        f"study {study.name}, profile {profile.name}, plan {plan.plan_hash[:12]}",
        f"model d{profile.d_model} L{profile.num_layers}, windows of {profile.window_bytes} bytes, batch {profile.batch_size}; "
        f"start {profile.start_updates} updates, slices of {profile.slice_updates}",
        f"primary outcome: {study.primary}; margin ±{study.margin_bpb:g} bits per byte",
        "",
        f"{'arm':<10}{'seeds':>6}{'launches':>10}  what",
    ]
    for name in plan.arm_names:
        legs = next(run.legs for run in plan.runs if run.arm == name)
        lines.append(f"{name:<10}{seeds[name]:>6}{len(legs):>10}  {study.arm(name).says}")
    lines += ["", "contrasts: " + "; ".join(f"{c.name} = {c.plus} − {c.minus}{' (main)' if c.family == 'main' else ''}"
                                            for c in study.contrasts if {c.plus, c.minus} <= set(plan.arm_names))]  # fmt: skip
    lines.append(f"{len(plan.runs)} runs, {plan.num_launches} launches, {plan.num_updates:,} updates")
    return "\n".join(lines)


def format_slurm(plan: StudyPlan, study: str, study_dir: Path) -> str:
    """An sbatch script with one array task a run; the start first, the rest after it."""
    named = str(Path(study).resolve()) if Path(study).suffix in (".yaml", ".yml") else study
    arguments = [named, "--profile", plan.profile.name, "--seeds", str(plan.profile.seeds), "--name", study_dir.name,
                 "--logs", str(study_dir.parent.resolve())]  # fmt: skip
    own = plan.study.profile(plan.profile.name)
    chosen = [name for name in plan.arm_names if name not in plan.study.gate[1:]]
    if set(plan.arm_names) != {*own.arms, *own.once, *plan.study.gate}:
        arguments += ["--arms", ",".join(chosen)]
    return SLURM.format(
        num=len(plan.runs), last=len(plan.runs) - 1, job=study_dir.name,
        runs=" ".join(run.name for run in plan.runs), arguments=shlex.join(arguments))  # fmt: skip


def describe_status(plan: StudyPlan, history: History) -> dict[str, Any]:
    """State of every run: `done`, `stopped`, or how many launches are finished."""
    runs = []
    for run in plan.runs:
        done = len(history.done.get(run.name, ()))
        state = "done" if done == len(run.legs) else "stopped" if run.name in history.stopped else "open"
        runs.append({"run": run.name, "arm": run.arm, "launches_done": done, "launches": len(run.legs), "state": state,
                     "reason": history.stopped.get(run.name)})  # fmt: skip
    return {"study": plan.study.name, "profile": plan.profile.name, "plan_hash": plan.plan_hash, "runs": runs,
            "updates_done": count_updates(plan, history), "updates": plan.num_updates}  # fmt: skip


def format_status(data: Mapping[str, Any]) -> str:
    """One line an arm, then the stopped runs."""
    lines = [f"study {data['study']}, profile {data['profile']}, plan {data['plan_hash'][:12]}: "
             f"{data['updates_done']:,} of {data['updates']:,} updates"]  # fmt: skip
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for run in data["runs"]:
        arms.setdefault(run["arm"], []).append(run)
    for arm, runs in arms.items():
        done = sum(run["state"] == "done" for run in runs)
        what = "common checkpoint" if arm == START else f"{done} of {len(runs)} seeds"
        lines.append(f"  {arm:<10}{'done' if done == len(runs) else 'open':<6}{what}")
    lines += [f"stopped {run['run']}: {run['reason']}" for run in data["runs"] if run["reason"]]
    return "\n".join(lines)
