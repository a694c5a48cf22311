"""How many planted hangs are told in time, with the right rank and line, and how many healthy runs are called hung.

    python -m benchmarks.hangs [--out results.jsonl] [--only KIND] [--at-once 2] [--summary]

Each scenario is a real launch under `chronicle run` (torchrun with gloo, or one process). A hang counts as told when the
incident `stall` is written within three step times + 30 s of the moment it was planted. Results are appended as they come, and
what is in the file is not run again. A launch that ends by itself (gloo noticed a mismatch) is counted apart.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.journal import read_journal
from chronicle.journal.events import Incident, LaunchEnd, events_of
from chronicle.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
ALONE = ("loop", "gil", "gil_in_c", "sleeping", "lock", "two_locks", "fifo", "silent_socket", "dead_thread", "sleeping_loader")
PAIRS = ("loop", "loop_of_tensors", "gil", "gil_in_c", "stopped", "sleeping", "lock", "two_locks", "fifo", "silent_socket",
         "dead_thread", "child", "stopped_loader", "sleeping_loader", "looping_loader")  # fmt: skip
FRESH = ("full_pipe", "lost_task", "forked_lock", "file_lock", "stale_build", "mutex_in_c", "full_queue", "nobody_calls",
         "polls", "polls_with_pauses")  # fmt: skip
COLLECTIVE = ("skipped", "barrier_of_one", "receives", "order")
HEALTHY = ("evaluation", "evaluation_of_one", "save", "many_saves", "compilation", "slow_first_steps", "uneven", "naps",
           "slow_loader", "slow_start", "rare_logs", "tokenises", "export")  # fmt: skip
LONGEST_START = 180.0
LONGEST_HANG = 60.0
LONGEST_HEALTHY = 400.0


class Scenario(NamedTuple):
    """One launch."""

    kind: str
    ranks: int
    guarded: bool
    healthy: bool = False

    @property
    def name(self) -> str:
        """Its key in the results."""
        return f"{self.kind}/{self.ranks}{'g' if self.guarded else 'p'}"


def scenarios() -> Iterator[Scenario]:
    """All of them: hangs first."""
    for guarded in (True, False):
        yield from (Scenario(kind, 2, guarded) for kind in PAIRS)
        yield from (Scenario(kind, 3, guarded) for kind in COLLECTIVE)
    yield from (Scenario(kind, 1, False) for kind in ALONE)
    yield from (Scenario(kind, 2, True) for kind in FRESH)
    for guarded in (False, True):
        yield from (Scenario(kind, 2, guarded, healthy=True) for kind in HEALTHY)


def main() -> int:
    """Run what is missing, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("hangs.jsonl"))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--healthy", action="store_true", help="only the healthy ones")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    done = {row["name"] for row in _rows(arguments.out)}
    wanted = [one for one in scenarios() if one.name not in done and (not arguments.only or one.kind in arguments.only)]
    wanted = [one for one in wanted if one.healthy or not arguments.healthy]
    if not arguments.summary:
        with ThreadPoolExecutor(arguments.at_once) as pool:
            for future in as_completed([pool.submit(play, one) for one in wanted]):
                row = future.result()
                with open(arguments.out, "a") as out:
                    out.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    summarise(_rows(arguments.out))
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(one: Scenario) -> dict[str, Any]:
    """One launch to its stall, or to its end."""
    with tempfile.TemporaryDirectory(prefix="hang-") as name:
        folder = Path(name)
        own = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
        environ = own | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRUTH": name, "GUARDED": "1" if one.guarded else "0",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }  # fmt: skip
        launcher = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", str(one.ranks)]
        command = [*(launcher if one.ranks > 1 else [sys.executable]), str(WORKER), one.kind]
        words = [sys.executable, "-m", "chronicle_ml", "run", "--run", "hang", "--grace", "2", "--", *command]
        with open(folder / "out.txt", "wb") as out:
            run = subprocess.Popen(words, cwd=folder, env=environ, stdout=out, stderr=out)
        try:
            return _watch(one, folder, run)
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(30)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()


def _watch(one: Scenario, folder: Path, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    began, paths, truth = time.time(), RunPaths(folder / "logs" / "hang"), folder / "truth.json"
    row: dict[str, Any] = {"name": one.name, "kind": one.kind, "healthy": one.healthy, "told": False}
    while True:
        time.sleep(1.0)
        planted = json.loads(truth.read_text()) if truth.exists() and truth.stat().st_size else None
        stalls = [
            (entry, event) for entry, event in events_of(read_journal(paths).entries, Incident) if event.kind == "stall"
        ] if paths.journal_dir.is_dir() else []  # fmt: skip
        if stalls:
            entry, event = stalls[0]
            row |= {"told": True, "title": entry.title}
            if planted is not None:
                row |= _compare(planted, entry, event)
            return row
        if run.poll() is not None:
            ends = [end for _, end in events_of(read_journal(paths).entries, LaunchEnd)]
            return row | {"ended": run.returncode, "because": ends[-1].because[:200] if ends else ""}
        since = time.time() - (planted["time"] if planted else began)
        longest = LONGEST_HEALTHY if one.healthy else LONGEST_HANG if planted else LONGEST_START
        if since > longest:
            said = (folder / "out.txt").read_text(errors="replace")[-300:]
            beats = [path.read_text()[-300:] for path in (paths.run_dir / "heartbeats").glob("*.json")]
            return row | {"gave_up_after": round(since), "planted": planted is not None, "last": said, "beat": beats}


def _compare(planted: dict[str, Any], entry: Any, event: Incident) -> dict[str, Any]:
    seconds = datetime.fromisoformat(entry.ts).timestamp() - planted["time"]
    found = dict(event.evidence[0]) if event.evidence else {}
    place = str(found.get("places", {}).get(str(planted["rank"]), ""))
    return {
        "seconds": round(seconds, 1),
        "in_time": seconds <= 30 + 3 * planted["step_seconds"],
        "right_rank": found.get("culprits") == [planted["rank"]],
        "right_line": f"worker.py:{planted['line']} " in place,
        "culprits": found.get("culprits"),
        "looked": found.get("looked"),
        "planted": planted,
    }


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print the counts that the issue asks for."""
    hangs = [row for row in rows if not row["healthy"] and "ended" not in row]
    healthy = [row for row in rows if row["healthy"]]
    told = [row for row in hangs if row["told"]]
    count = len(hangs)
    print(f"planted hangs: {count}; told {len(told)}, in time {sum(bool(row.get('in_time')) for row in hangs)}, "
          f"right rank {sum(bool(row.get('right_rank')) for row in hangs)}, "
          f"right line {sum(bool(row.get('right_line')) for row in hangs)}")  # fmt: skip
    ended = [row["name"] for row in rows if not row["healthy"] and "ended" in row]
    print(f"ended by themselves, not counted: {len(ended)} {' '.join(ended)}")
    print(f"healthy launches: {len(healthy)}; alarms {sum(row['told'] for row in healthy)}; "
          f"not at their end: {sum('ended' not in row and not row['told'] for row in healthy)}")  # fmt: skip
    for row in rows:
        if row["told"] if row["healthy"] else not (row.get("in_time") and row.get("right_rank") and row.get("right_line")):
            print("  ", json.dumps(row)[:600])


if __name__ == "__main__":
    sys.exit(main())
