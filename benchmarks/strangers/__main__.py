"""`python -m benchmarks.strangers [--lot NAME] [--only NAME …] [--clones DIR] [--no-guard] [--keep DIR] [--json FILE]`.

Plays the scripts of `list.toml` and prints one row a script: what each of three resumes after a kill came to. Every false
refusal and every line that a person cannot read is printed below the table. Exit code 1 with more than one false refusal.
`--no-guard` plays the same without the guard, to tell a fault of the script from one of ours. Originals need `--clones`
(or CHRONICLE_STRANGERS), a folder of clones named `<owner>+<repository>`; without it they are left out and counted as such.
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

from benchmarks.strangers.play import OFFLINE, Cycle, Outcome, list_scripts, play

ALLOWED = 1


def main() -> int:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strangers", description=__doc__)
    parser.add_argument("--only", action="append", help="only this script (repeatable)")
    parser.add_argument("--lot", default="", help="a lot that was frozen later (`lots/NAME.toml`) instead of the list")
    parser.add_argument("--clones", type=Path, default=os.environ.get("CHRONICLE_STRANGERS"))
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep each script's folder below this one")
    parser.add_argument("--json", type=Path, help="also write all results here")
    arguments = parser.parse_args()
    os.environ.update(OFFLINE)  # before anything of Hugging Face is imported
    clones = Path(arguments.clones).resolve() if arguments.clones else None
    results: dict[str, Sequence[Cycle]] = {}
    for script in list_scripts(arguments.lot):
        if arguments.only and script.name not in arguments.only:
            continue
        folder = arguments.keep / script.name if arguments.keep else Path(tempfile.mkdtemp(prefix="stranger-"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        cycles = play(script, folder.resolve(), clones=clones, guarded=not arguments.no_guard)
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
    if not cycles:
        return f"{name:<28}not on this machine"
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
    missing = [name for name, found in results.items() if not found]
    text = f"\n{len(results) - len(missing)} scripts, {len(cycles)} resumes: {words}; {unreadable} unreadable warnings"
    return text + (f"\nnot on this machine: {', '.join(missing)}" if missing else "")


if __name__ == "__main__":
    sys.exit(main())
