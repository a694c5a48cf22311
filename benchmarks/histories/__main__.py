"""Random histories against their truth: `python -m benchmarks.histories --histories 500 --seed 0`.

Launches, refusals, kills, side tries, re-used step numbers, rollbacks, undos, moves, copies and forks.

Prints, per kind of launch record, how many exports, headlines, parents and graphs are equal to the truth.
A history without a guard counts as right when it is equal or says `inferred`. Exit code 5 when one is wrong.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.histories.world import SAVE_EVERY, World


def main() -> int:
    """Run the histories; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="wrong histories to print")
    parser.add_argument("--keep", type=Path, default=None, help="keep wrong histories below this directory")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    shown = foreign = visits = 0
    began = time.perf_counter()
    for number in range(arguments.histories):
        seed = arguments.seed * 1_000_003 + number
        home = Path(tempfile.mkdtemp(prefix="history-"))
        world = tell(home / "project", random.Random(seed))
        wrong = compare(world)
        foreign += len(world.changed_neighbours())
        visits += sum(line.startswith(("copy", "fork", "move")) for line in world.told)
        guarded = all(launch.guarded for launch in world.launches)
        counts["guarded" if guarded else "not guarded"] += 1
        if wrong:
            counts["guarded wrong" if guarded else "not guarded wrong"] += 1
            if shown < arguments.show:
                shown += 1
                print(f"seed {seed}:", *world.told, *wrong, sep="\n  ")
            if arguments.keep is not None:
                shutil.copytree(home, arguments.keep / str(seed), dirs_exist_ok=True)
        shutil.rmtree(home)
    seconds = time.perf_counter() - began
    for kind in ("guarded", "not guarded"):
        total, bad = counts[kind], counts[f"{kind} wrong"]
        print(f"{kind:<12} {total - bad}/{total} histories equal to the truth")
    print(f"{foreign} changes outside the run in {visits} moves, copies and forks")
    print(f"{arguments.histories} histories in {seconds:.0f} s")
    return 5 if foreign or counts["guarded wrong"] or counts["not guarded wrong"] else 0


def tell(home: Path, chance: random.Random) -> World:
    """A random history: resumes, side tries, refusals, kills, re-used step numbers, rollbacks and undos."""
    world = World(home)
    world.create()
    guarded_rate = chance.choice((1.0, 1.0, 1.0, 0.6, 0.0))
    world.launch(None, chance.randint(4, 18), guarded=chance.random() < guarded_rate)
    for _ in range(chance.randint(2, 6)):
        act(world, chance, chance.random() < guarded_rate)
    return world


def act(world: World, chance: random.Random, guarded: bool) -> None:
    """One more thing that happens to the run."""
    names = sorted(world.on_disk)
    kinds = ("resume", "resume", "side", "wrong", "nothing", "scratch", "rollback", "undo", "kill", "move", "copy", "fork")
    what = chance.choice(kinds)
    if not names and what in ("side", "wrong", "rollback", "resume", "nothing", "kill"):
        what = "scratch"
    if what == "resume":
        world.launch(world.newest, chance.randint(3, 14), guarded=guarded, logs_first=chance.random() < 0.5)
    elif what == "kill":
        world.launch(world.newest, chance.randint(1, 9), guarded=guarded, killed=True)
    elif what == "side":
        world.launch(chance.choice(names), chance.randint(2, 12), guarded=guarded, on_purpose=True)
    elif what == "wrong":
        world.launch(chance.choice(names), chance.randint(2, 8), guarded=guarded)
    elif what == "nothing":
        world.launch(chance.choice(names), 0, guarded=guarded, killed=chance.random() < 0.5)
    elif what == "scratch":
        world.launch(None, chance.randint(2, 9), guarded=guarded, on_purpose=True)
    elif what == "rollback":
        world.rollback(chance.choice(names))
    elif what == "undo" and world.undoable:
        world.undo()
    elif what == "move":
        world.move()
    elif what == "copy":
        name = chance.choice(names) if names else "0"
        step = str(world.on_disk[name].step) if names else "0"
        writing = (("undo", "--yes"), ("note", "hello"), ("rollback", "--to", step, "--yes"), ("recover",))
        world.visit_copy(chance.choice(writing))
    elif what == "fork":
        world.fork()


def compare(world: World) -> list[str]:
    """Differences between what chronicle says and the truth; empty when there are none."""
    code, text = world.command("export", "--format", "jsonl")
    if code:
        return [f"export ended with {code}: {text.strip()[:200]}"]
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    code, text = world.command("status", "--json")
    status = json.loads(text[text.index("{") :])
    inferred = bool(status.get("inferred"))
    found = tuple((row["launch"], row["step"]) for row in rows)
    wrong = world.changed_neighbours()
    if found != world.present:
        wrong.append(f"export: {spans(found)}; true: {spans(world.present)}")
    head = world.present[-1] if world.present else (None, 0)
    if (status["launch"], status["step"] or 0) != head:
        wrong.append(f"headline: step {status['step']} of launch {status['launch']}; true: step {head[1]} of {head[0]}")
    drawn = lane_0(world.command("log", "--graph", "-n", "0")[1])
    if drawn != world.present:
        wrong.append(f"graph: {spans(drawn)}; true: {spans(world.present)}")
    if inferred and not world.changed_neighbours() and not all(launch.guarded for launch in world.launches):
        return []
    return wrong


def lane_0(graph: str) -> tuple[tuple[int, int], ...]:
    """The (launch, step) pairs that stand on the graph's first lane as kept, in step order."""
    found: list[tuple[int, int]] = []
    for launch, first, last in re.findall(r"^\*[ |]* launch (\d+) · steps? (\d+)(?:–(\d+))?", graph, re.MULTILINE):
        found += ((int(launch), step) for step in range(int(first), int(last or first) + 1))
    return tuple(sorted(found, key=lambda pair: pair[1]))


def spans(ancestry: tuple[tuple[int, int], ...]) -> str:
    """`1:1-10 2:11-15`: launches and their steps."""
    parts: list[list[int]] = []
    for launch, step in ancestry:
        if parts and parts[-1][0] == launch and parts[-1][2] == step - 1:
            parts[-1][2] = step
        else:
            parts.append([launch, step, step])
    return " ".join(f"{launch}:{first}-{last}" for launch, first, last in parts) or "nothing"


if __name__ == "__main__":
    assert SAVE_EVERY > 1
    sys.exit(main())
