"""The sections of the scoreboard: each plays a fixed selection and returns rows, `name -> figure or words`.

`python -m benchmarks.scoreboard.sections NAME FILE` plays one in this process and writes `{"rows": …, "texts": …}`. What is
selected depends on names alone (`is_in_third`), or stands here as a list. A figure that differs from play to play by its nature
is left out, or has a tolerance in `TOLERANCES`.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = dict[str, str | int | float]
ROOT = Path(__file__).resolve().parents[2]
# by section and the beginning of the row: how far a figure may be off without being another one
TOLERANCES = {("guard-cost", "CPU ratio"): 0.25, ("guard-cost", "f"): 0.1, ("crashes", "points"): 0.1}
ALWAYS_PLANTED = (
    ("lightning", "statistics of the batch norm start again"),
    ("torch", "LR halved in the script, the file wins"),
)  # red on 28 November 2026
SCRIPTS = (
    "gan-with-average",
    "fully-sharded",
    "accelerate-language-model",
    "hf-trainer-packed",
    "lightning-weight-averaging",
    "fabric-rate-by-hand",
    "zero1",
    "lightning-manual",
    "memory-bank",
    "schedule-by-phase",
)
EVERY_CELL, EVERY_CRASH = 4, 8
HANGS = ("loop/2g", "sleeping/2g", "lock/2p", "stopped/2p", "fifo/1p", "skipped/3g", "evaluation/2g", "slow_loader/2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What is played, how many seconds it may take, and what a row of it means."""

    play: Callable[[], Rows]
    limit_seconds: float
    meaning: str


def is_in_third(name: str, third: int = 0) -> bool:
    """Whether a case belongs to this third of all cases: by the digest of its name, wherever it stands."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == third


def play_verbs() -> Rows:
    """Exit code and digest of what each verb says of each stored run."""
    from benchmarks.scoreboard import stored

    rows, texts = stored.rows()
    TEXTS.update(texts)
    return dict(rows)


def play_planted() -> Rows:
    """What stops each planted bug of the third, by its code, and when; healthy resumes are passed or falsely stopped."""
    from benchmarks.planted_bugs.__main__ import TWO_RANKS, play_here, play_on_ranks
    from benchmarks.planted_bugs.catalogue import causes, healthy_causes
    from benchmarks.planted_bugs.play import RIGS, Outcome

    everything = list(enumerate((*causes(), *healthy_causes())))
    rows: Rows = {}
    for rig in RIGS:
        wanted = []
        for index, cause in everything:
            is_chosen = is_in_third(f"{rig} {cause.name}") or (rig, cause.name) in ALWAYS_PLANTED
            if cause.rig == rig and is_chosen:
                wanted.append((index, cause))
        if not wanted:
            continue
        play = play_on_ranks if rig in TWO_RANKS else play_here
        for result in play(rig, wanted, True):
            kind = "healthy" if result.source == "healthy" else result.acts
            code = result.detail[:2] if result.outcome in (Outcome.BEFORE, Outcome.ACTING) else ""
            rows[f"{rig}: {result.name} ({kind})"] = f"{result.outcome} {code}".strip()
    return rows


def play_scripts() -> Rows:
    """What each of three resumes after a kill came to, for ten scripts of others."""
    from benchmarks.scripts_of_others.play import OFFLINE, list_scripts, play

    os.environ.update(OFFLINE)
    rows: Rows = {}
    for name in SCRIPTS:
        (script,) = [one for one in list_scripts() if one.name == name]
        folder = Path(tempfile.mkdtemp(prefix="script-"))  # no TemporaryDirectory: a fork that ends would remove it
        cycles = play(script, folder.resolve())
        shutil.rmtree(folder, ignore_errors=True)
        rows[name] = ", ".join(str(cycle.outcome) for cycle in cycles)
        rows[f"{name}: faults of the guard"] = sum(cycle.faults for cycle in cycles)
    return rows


def play_cells() -> Rows:
    """Whether one recorded step of a cell of the trainer is taken again to the bit."""
    from benchmarks.replay.cells import SAVES, cells, play

    rows: Rows = {}
    for ranks, cell in list(cells())[::EVERY_CELL][:15]:
        with tempfile.TemporaryDirectory() as name:
            good, why, is_whole = play(ranks, cell, (SAVES + 3,), Path(name).resolve())
        verdict = "reproduced" if good else f"not reproduced: {without_numbers(why)[:120]}"
        rows[f"{ranks} × {' '.join(map(str, cell))}"] = verdict if is_whole else f"{verdict}; the run changed"
    return rows


def play_crashes() -> Rows:
    """Every 8th system call of five commands is killed or failed: how many points, and what was left in a bad state."""
    from benchmarks.crash_sweep import sweep

    said: list[str] = []
    bad = sweep(EVERY_CRASH, say=said.append)
    rows: Rows = {"bad": len(bad)}
    for line in said:
        if found := re.match(r"(\w+) +\d+ calls, +(\d+) points", line):
            rows[f"points of {found[1]}"] = int(found[2])
    for number, line in enumerate(sorted(bad)):
        rows[f"bad {number + 1}"] = line.splitlines()[0][:200]
    return rows


def play_detector() -> Rows:
    """Every cell of the detector benchmark's tables, but for times."""
    from benchmarks.detector.__main__ import main

    rows: Rows = {}
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        path = Path(name) / "tables.json"
        main(["--quick", "--json", str(path)])
        tables = json.loads(path.read_text(encoding="utf-8"))
    if "recall" not in tables:
        rows["labelled curves"] = "could not run: `../shared/data/curves` is not on this machine"
    for table, lines in tables.items():
        for line in lines:
            cells = list(line.items())
            for column, value in cells[1:]:
                if "µs" not in column and "CPU" not in column:
                    rows[f"{table}: {cells[0][1]}: {column}"] = value
    return rows


def play_authorities() -> Rows:
    """Whether an edited LR was the one that 50 steps used, was refused with the right line, or was silently wrong."""
    from benchmarks.authorities.__main__ import judge
    from benchmarks.authorities.configs import CONFIGS
    from benchmarks.authorities.writers import CASES, NotInstalled

    rows: Rows = {}
    for case in (*CASES, *CONFIGS):
        if not is_in_third(case.name):
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                rows[case.name] = judge(case)[0]
        except NotInstalled as missing:
            rows[case.name] = f"could not run: {missing}"
        except Exception as problem:  # noqa: BLE001 the writer's own code failed: that is its row
            rows[case.name] = f"could not run: {type(problem).__name__}: {str(problem)[:80]}"
    return rows


def play_hangs() -> Rows:
    """Whether a planted hang is told with the right rank and line, and whether a healthy launch is left alone."""
    from benchmarks.hangs.__main__ import play, scenarios

    chosen = [one for one in scenarios() if one.name in HANGS]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(play, chosen))
    rows: Rows = {}
    for one, result in zip(chosen, results, strict=True):
        if not result["told"]:
            rows[one.name] = f"ended with {result['ended']}" if "ended" in result else "not told"
        elif one.healthy:
            rows[one.name] = "FALSE ALARM"
        else:
            rank = "right rank" if result.get("right_rank") else "wrong rank"
            line = "right line" if result.get("right_line") else "wrong line"
            rows[one.name] = f"told, {rank}, {line}"
    return rows


def play_slurm() -> Rows:
    """Two nodes of a real SLURM: what a preempted and a killed job came to."""
    from benchmarks.slurm.__main__ import play_all
    from benchmarks.slurm.cluster import why_not

    if reason := why_not():
        return {"two nodes": f"could not run: {reason}"}
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as name:
        for row in play_all(("usr1_in_a_save", "supervisor_killed"), 1, Path(name).resolve(), nodes=2):
            facts = {key: row[key] for key in ("went_on", "cut_saves", "wrong_resumes", "false_causes", "completed")}
            rows[str(row["kind"])] = json.dumps(facts)
    return rows


def play_guard_cost() -> Rows:
    """Functions and files of ours in one steady step under the guard, and CPU against the bare loop, in turns."""
    import torch

    import chronicle

    torch.set_num_threads(1)

    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made.append((model, optimizer))
        rows = torch.randn(32, 256)

        def step() -> None:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    made: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
    bare, guarded = make(), make()
    with tempfile.TemporaryDirectory() as name:
        with contextlib.redirect_stderr(io.StringIO()):
            chronicle.attach(Path(name) / "logs" / "r", *made[1])
        for step in (bare, guarded):
            for _ in range(200):
                step()
        ratios = []
        for _ in range(30):
            seconds = [cpu_seconds(step) for step in (bare, guarded)]
            ratios.append(seconds[1] / seconds[0])
        functions = our_functions(guarded)
    return {
        "functions of one step": len(functions),
        "files of one step": len({file for file, _ in functions}),
        "CPU ratio": round(statistics.median(ratios), 2),
    }


def cpu_seconds(step: Callable[[], None], times: int = 20) -> float:
    """Processor time of some steps."""
    begun = time.process_time()
    for _ in range(times):
        step()
    return time.process_time() - begun


def our_functions(step: Callable[[], None], times: int = 9) -> set[tuple[str, str]]:
    """(file, function) of ours that each of these steps called: what only every tenth step does is no part of a steady one."""
    seen: list[set[tuple[str, str]]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and re.search(r"/(chronicle|rollback)/", file.removeprefix(str(ROOT))):
            seen[-1].add((file, frame.f_code.co_qualname))

    for _ in range(times):
        seen.append(set())
        sys.setprofile(note)
        step()
        sys.setprofile(None)
    return set.intersection(*seen)


def play_size() -> Rows:
    """Lines and tokens of each room, and how full its lines are: from `scripts/house.py`."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import house  # type: ignore[import-not-found]

    rows: Rows = {}
    for room, figures in house.room_figures(ROOT).items():
        for figure, value in figures.items():
            rows[f"{room}: {figure}"] = value
    return rows


def without_numbers(text: str) -> str:
    """A message whose numbers, paths and addresses are no part of what it says."""
    return re.sub(r"0x[0-9a-f]+|/\S+|\d+(\.\d+)?", "N", text)


def differences(before: Rows, now: Rows, section: str) -> Iterable[tuple[str, object, object]]:
    """(row, before, now) of the rows of a section that are not the same."""
    for row in sorted(before.keys() | now.keys()):
        one, other = before.get(row, "absent"), now.get(row, "absent")
        if one != other and not is_within(one, other, section, row):
            yield row, one, other


def is_within(one: object, other: object, section: str, row: str) -> bool:
    """Whether two figures differ by no more than the tolerance of their row."""
    if isinstance(one, str) or isinstance(other, str):
        return False
    for (name, beginning), share in TOLERANCES.items():
        if name == section and row.startswith(beginning):
            return abs(float(one) - float(other)) <= share * abs(float(one))  # type: ignore[arg-type]
    return False


TEXTS: dict[str, str] = {}  # by digest: the outputs behind the rows of `verbs`
SECTIONS = {
    "size": Section(play=play_size, limit_seconds=60, meaning="lines, tokens and density of each room"),
    "guard-cost": Section(play=play_guard_cost, limit_seconds=120, meaning="one steady step under the guard"),
    "verbs": Section(play=play_verbs, limit_seconds=420, meaning="`--json` of each verb over the stored runs"),
    "planted": Section(play=play_planted, limit_seconds=900, meaning="a third of `benchmarks.planted_bugs`"),
    "scripts": Section(play=play_scripts, limit_seconds=600, meaning="ten scripts of others, three resumes each"),
    "cells": Section(play=play_cells, limit_seconds=900, meaning="one step of 15 cells of the trainer, taken again"),
    "crashes": Section(play=play_crashes, limit_seconds=600, meaning="every 8th point of `benchmarks.crash_sweep`"),
    "detector": Section(play=play_detector, limit_seconds=420, meaning="`benchmarks.detector --quick`"),
    "authorities": Section(play=play_authorities, limit_seconds=420, meaning="a third of `benchmarks.authorities`"),
    "hangs": Section(play=play_hangs, limit_seconds=600, meaning="eight of `benchmarks.hangs`"),
    "slurm": Section(play=play_slurm, limit_seconds=420, meaning="two nodes of `benchmarks.slurm`"),
}


def main(arguments: Sequence[str]) -> int:
    """Play one section and write what it found."""
    name, path = arguments
    rows = SECTIONS[name].play()
    Path(path).write_text(json.dumps({"rows": rows, "texts": TEXTS}, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
