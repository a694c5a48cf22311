"""`python -m benchmarks.scripts_of_others [--only NAME …] [--no-guard] [--keep DIR] [--json FILE]`.

Plays the scripts of `scripts.toml` and prints one row a script: what each of three resumes after a kill came to. Every false
refusal and every line that a person cannot read is printed below the table. Exit code 1 with more than one false refusal.
`--no-guard` plays the same without the guard, to tell a fault of the script from one of ours. A script whose library is not
installed is broken, and says so.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.scripts_of_others.play import OFFLINE, Cycle, Outcome, list_scripts, play

ALLOWED = 1


def main() -> int:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts_of_others", description=__doc__)
    parser.add_argument("--only", action="append", help="only this script (repeatable)")
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep each script's folder below this one")
    parser.add_argument("--json", type=Path, help="also write all results here")
    arguments = parser.parse_args()
    os.environ.update(OFFLINE)  # before anything of Hugging Face is imported
    results: dict[str, Sequence[Cycle]] = {}
    for script in list_scripts():
        if arguments.only and script.name not in arguments.only:
            continue
        folder = arguments.keep / script.name if arguments.keep else Path(tempfile.mkdtemp(prefix="script-"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        cycles = play(script, folder.resolve(), guarded=not arguments.no_guard)
        results[script.name] = cycles
        print(format_row(script.name, cycles, time.monotonic() - began), flush=True)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(format_summary(results))
    if arguments.json:
        rows = {name: [asdict(cycle) for cycle in cycles] for name, cycles in results.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    refusals = sum(cycle.outcome is Outcome.FALSE_REFUSAL for cycles in results.values() for cycle in cycles)
    return 1 if refusals > ALLOWED else 0


def format_row(name: str, cycles: Sequence[Cycle], seconds: float) -> str:
    """One line of the table, and a line for everything wrong."""
    row = f"{name:<28}" + "".join(f"{cycle.outcome:<16}" for cycle in cycles) + f"{seconds:5.0f} s"
    for number, cycle in enumerate(cycles, 1):
        if cycle.outcome in (Outcome.FALSE_REFUSAL, Outcome.BROKEN):
            row += f"\n    {number}: {cycle.detail[:600]}"
        if cycle.faults:
            row += f"\n    {number}: {cycle.faults} faults of the guard recorded"
        row += "".join(f"\n    {number}: unreadable: {line[:300]}" for line in cycle.unreadable)
    return row


def format_summary(results: Mapping[str, Sequence[Cycle]]) -> str:
    """The counts."""
    cycles = [cycle for found in results.values() for cycle in found]
    count = Counter(cycle.outcome for cycle in cycles)
    words = ", ".join(f"{count[outcome]} {outcome}" for outcome in Outcome if count[outcome])
    unreadable = sum(len(cycle.unreadable) for cycle in cycles)
    return f"\n{len(results)} scripts, {len(cycles)} resumes: {words}; {unreadable} unreadable warnings"


if __name__ == "__main__":
    sys.exit(main())
