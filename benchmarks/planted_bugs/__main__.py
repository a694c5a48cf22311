"""`python -m benchmarks.planted_bugs [--rig RIG …] [--bare/--no-bare] [--json FILE]`: play everything, print the tables.

Single-process rigs run here, two-rank rigs under torchrun. Exit code 1 when a cause that leaves a trace was missed, or
a healthy resume was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.planted_bugs.catalogue import causes, healthy_causes
from benchmarks.planted_bugs.plan import Acts, Cause
from benchmarks.planted_bugs.play import RIGS, Outcome, Result, play, say, workplace

ROOT = Path(__file__).parents[2]
TWO_RANKS = ("ddp", "zero")
STOPPED = (Outcome.BEFORE, Outcome.ACTING, Outcome.FRAMEWORK)


def main() -> int:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_bugs", description=__doc__)
    parser.add_argument("--rig", action="append", choices=sorted(RIGS), help="only these adapters (repeatable)")
    parser.add_argument("--no-bare", action="store_true", help="leave out the table without the guard")
    parser.add_argument("--json", type=Path, help="also write all results here, one JSON object")
    arguments = parser.parse_args()
    rigs = tuple(arguments.rig or RIGS)
    results = play_all(rigs, bare=not arguments.no_bare)
    print(format_report(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    return 1 if find_defects(results) else 0


def play_all(rigs: Sequence[str], *, bare: bool = True) -> list[Result]:
    """Causes with the guard, without it, and the healthy resumes with it, in the order of the causes files."""
    everything = (*causes(), *healthy_causes())
    results: list[Result] = []
    for rig in rigs:
        for guarded in (True, False) if bare else (True,):
            wanted = [
                (index, cause)
                for index, cause in enumerate(everything)
                if cause.rig == rig and (guarded or cause.source != "healthy")
            ]
            if wanted:
                say(f"{rig}, {'with' if guarded else 'without'} the guard: {len(wanted)} launches")
                results += play_on_ranks(rig, wanted, guarded) if rig in TWO_RANKS else play_here(rig, wanted, guarded)
    return results


def play_here(rig: str, wanted: Sequence[tuple[int, Cause]], guarded: bool) -> list[Result]:
    """In this process, one after another."""
    if rig == "deepspeed":
        from benchmarks.planted_bugs.rig_deepspeed import prepare_environment

        prepare_environment()
        return play_in_child(rig, wanted, guarded)
    out = []
    for _, cause in wanted:
        with workplace() as folder:
            out.append(judged(cause, play(cause, guarded=guarded, folder=folder)))
    return out


def play_in_child(rig: str, wanted: Sequence[tuple[int, Cause]], guarded: bool) -> list[Result]:
    """A process group of one would stay with this process: give it one of its own."""
    command = [sys.executable, "-m", "benchmarks.planted_bugs.single"]
    return _run(command, rig, wanted, guarded)


def play_on_ranks(rig: str, wanted: Sequence[tuple[int, Cause]], guarded: bool, *, num_ranks: int = 2) -> list[Result]:
    """Under torchrun; without the guard, a cause in which one rank fails alone needs a launch (and a timeout) of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={num_ranks}",
        "-m",
        "benchmarks.planted_bugs.worker",
    ]
    together = [item for item in wanted if guarded or not item[1].alone]
    out = _run(command, rig, together, guarded) if together else []
    for item in wanted:
        if item not in together:
            out += _run(command, rig, [item], guarded, timeout_seconds=90)
    return out


def _run(
    command: Sequence[str], rig: str, wanted: Sequence[tuple[int, Cause]], guarded: bool, timeout_seconds: float = 900
) -> list[Result]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with workplace() as folder:
        words = [*command, str(folder), "guarded" if guarded else "bare", rig, *(str(index) for index, _ in wanted)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, env=environment, timeout=timeout_seconds, check=False
            )
            text, tail = done.stdout, done.stderr[-1500:]
        except subprocess.TimeoutExpired as problem:
            text, tail = (problem.stdout or b"").decode(), "a rank failed, the other waited for ever"
    lines = [Result.from_line(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT ")]
    by_name = {(result.name, result.source): result for result in lines}
    out = []
    for _, cause in wanted:
        found = by_name.get((cause.name, cause.source))
        if found is None:  # the process group died of it: loud, but after how long
            found = Result(
                rig=rig,
                name=cause.name,
                source=cause.source,
                acts=str(cause.acts),
                guarded=guarded,
                outcome=Outcome.FRAMEWORK,
                detail=tail.strip().splitlines()[-1] if tail.strip() else "",
            )
        out.append(judged(cause, found))
    return out


def judged(cause: Cause, result: Result) -> Result:
    """A healthy resume is judged the other way round."""
    if cause.source != "healthy":
        return result
    stopped = result.outcome in STOPPED
    return replace(result, outcome=Outcome.FALSE_ALARM if stopped else Outcome.HEALTHY)


def find_defects(results: Sequence[Result]) -> list[Result]:
    """Missed causes that leave a trace, and false alarms."""
    return [
        result
        for result in results
        if result.outcome is Outcome.FALSE_ALARM
        or (result.guarded and result.acts != Acts.NEVER_SEEN and result.outcome in (Outcome.MISSED, Outcome.LOG))
    ]


def format_report(results: Sequence[Result]) -> str:
    """The tables."""
    bare = {(result.rig, result.name): result for result in results if not result.guarded}
    planted = [result for result in results if result.guarded and result.source != "healthy"]
    lines = [f"{'adapter':<13}{'planted cause':<62}{'with the guard':<46}{'without':<18}source"]
    for result in planted:
        without = bare.get((result.rig, result.name))
        place = f"{result.outcome}" + (f" {result.step}" if result.outcome is Outcome.ACTING else "")
        place = f"{place} ({result.detail[:28]})" if result.detail else place
        lines.append(
            f"{result.rig:<13}{result.name[:60]:<62}{place[:44]:<46}"
            f"{without.outcome if without else '-':<18}{result.source}"
        )
    lines += ["", _summary("with the guard", planted), _summary("without", list(bare.values()))]
    healthy = [result for result in results if result.source == "healthy"]
    alarms = [result for result in healthy if result.outcome is Outcome.FALSE_ALARM]
    lines.append(f"healthy resumes: {len(healthy)}, false alarms: {len(alarms)}")
    lines += [f"  FALSE ALARM {result.rig}: {result.name}: {result.detail}" for result in alarms]
    return "\n".join(line for line in lines if line is not None)


def _summary(title: str, results: Sequence[Result]) -> str:
    if not results:
        return f"{title}: not played"
    at_load = [result for result in results if result.acts == Acts.AT_LOAD]
    later = [result for result in results if result.acts == Acts.LATER]
    unseen = [result for result in results if result.acts == Acts.NEVER_SEEN]
    before = sum(result.outcome in (Outcome.BEFORE, Outcome.FRAMEWORK) for result in at_load)
    acting = sum(result.outcome in (Outcome.BEFORE, Outcome.ACTING) for result in later)
    log = sum(result.outcome is Outcome.LOG for result in results)
    allowed = [result for result in results if result.acts == Acts.ALLOWED]
    said = sum(result.outcome is Outcome.SAID for result in allowed)
    missed = sum(result.outcome is Outcome.MISSED for result in (*at_load, *later, *allowed))
    return (
        f"{title}: {len(results)} causes; wrong at the load: {before} of {len(at_load)} stopped before step 1; "
        f"acting later: {acting} of {len(later)} stopped when they act; "
        f"allowed: {said} of {len(allowed)} said; only in the log: {log}; missed: {missed}; "
        f"without a trace: {len(unseen)}"
    )


if __name__ == "__main__":
    sys.exit(main())
