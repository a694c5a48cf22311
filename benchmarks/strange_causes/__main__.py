"""`python -m benchmarks.strange_causes [word …] [--healthy-only] [--bare]`: play all causes and healthy twins, print the table.

Exit 1 when a healthy resume was stopped, or told a breach.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from benchmarks.strange_causes.causes import CAUSES, HEALTHY, Cause
from benchmarks.strange_causes.scripts import FORMS, NUM_AGAIN, NUM_FIRST, SAVED_AT
from chronicle import ResumeRefused
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths


class Outcome(StrEnum):
    """What the guard did."""

    BEFORE = "before step 1"
    BREACH = "at the first breach"
    WARNED = "warned of other data"  # an incident and a line of its own before step 1; the run goes on
    NAMED = "named, not stopped"
    FRAMEWORK = "framework error"
    SILENT = "silent"


OTHER_DATA = "data: this launch goes on with other batches"


def play(cause: Cause, folder: Path, *, promise: bool = False) -> tuple[Outcome, str]:
    """One launch that saves and one that resumes, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    run, said = folder / "logs" / "run", io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        path = first_launch(cause, folder, run)
        if cause.files is not None:
            cause.files(path)
        told = len(incidents(run))
        said.truncate(0), said.seek(0)
        script = FORMS[cause.form](folder, run, {**cause.both, **cause.again, "promise": promise})
        if cause.at_step is not None:
            script.hook_at[later_step(cause)] = cause.at_step
        try:
            resume(script, path, cause)
        except ResumeRefused as refusal:
            check = refusal.checks[0]
            moment = Outcome.BREACH if script.rows and len(script.rows) > 1 else Outcome.BEFORE
            return moment, f"{check.code} {check.name}: {check.expected} → {check.found}"
        except Exception as problem:  # noqa: BLE001 whatever a framework raises
            return (
                Outcome.FRAMEWORK,
                f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}",
            )
    found = incidents(run)[told:]
    loud = [one for one in found if one[0] != "notice"]
    if loud:
        return (Outcome.WARNED if loud[0][1].startswith(OTHER_DATA) else Outcome.BREACH), loud[0][1]
    lines = [line.removeprefix("chronicle guard: ") for line in said.getvalue().splitlines() if line.startswith("chronicle")]
    lines = [line for line in lines if line.startswith(("noted", "not verified"))]
    quiet = [text for _, text in found]
    return (Outcome.NAMED, "; ".join([*lines, *quiet])) if lines or quiet else (Outcome.SILENT, "")


def later_step(cause: Cause) -> int:
    """Steps completed when something happens in the middle of a launch: the third step after the save begins."""
    return SAVED_AT + 2


def first_launch(cause: Cause, folder: Path, run: Path) -> Path:
    """Train to the end, saving on the way."""
    script: Any = FORMS[cause.form](folder, run, cause.both)
    if cause.at_step is not None and cause.in_both:
        script.hook_at[later_step(cause)] = cause.at_step
    if hasattr(script, "first"):
        return Path(script.first())
    script.build()
    script.train(SAVED_AT)
    path: Path = script.save()
    script.train(NUM_FIRST)
    if hasattr(script, "finish"):
        script.finish()
    return path


def resume(script: Any, path: Path, cause: Cause) -> None:
    """The second launch."""
    if hasattr(script, "again"):
        script.again(path, tuple(cause.after))
        return
    script.build()
    script.load(path)
    for hook in cause.after:
        hook(script)
    script.train(SAVED_AT + (60 if cause.at_step else NUM_AGAIN))
    script.save()
    if hasattr(script, "finish"):
        script.finish()


def incidents(run: Path) -> list[tuple[str, str]]:
    """(tier, text) of the incidents of the run."""
    if not (run / "journal").is_dir():
        return []
    entries = read_journal(RunPaths(run)).entries
    return [(str(one.data.get("tier")), str(one.title)) for one in entries if "incident" in one.kind]


def main() -> int:
    """Play, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strange_causes")
    parser.add_argument("words", nargs="*", help="only causes whose form, family or name contain one of these")
    parser.add_argument("--healthy-only", action="store_true")
    parser.add_argument("--promise", action="store_true", help="every script promises the next batch: same_data=True")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [*([] if asked.healthy_only else CAUSES), *HEALTHY]
    chosen = [c for c in chosen if not asked.words or any(w in f"{c.form} {c.family} {c.name}" for w in asked.words)]
    counts: Counter[Outcome] = Counter()
    said_if_healthy: dict[str, set[str]] = {}
    false, healthy, rows = 0, 0, []
    for cause in sorted(chosen, key=lambda one: not one.healthy):
        folder = Path(tempfile.mkdtemp(prefix="strange-"))
        try:
            outcome, words = play(cause, folder, promise=asked.promise)
        except Exception as problem:  # noqa: BLE001 an error of the play itself
            outcome, words = Outcome.FRAMEWORK, f"THE PLAY ITSELF FAILED: {type(problem).__name__}: {problem}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if cause.healthy:
            healthy += 1
            said_if_healthy.setdefault(cause.form, set()).add(words)
            wrong = outcome in (Outcome.BEFORE, Outcome.BREACH, Outcome.FRAMEWORK, Outcome.WARNED)
            false += wrong
            outcome_words = f"FALSE ALARM: {outcome}" if wrong else f"passed ({outcome})"
        else:
            if outcome is Outcome.NAMED and words in said_if_healthy.get(cause.form, set()):
                outcome = Outcome.SILENT  # its healthy twin is told the same
            counts[outcome] += 1
            outcome_words = str(outcome)
        rows.append({"form": cause.form, "family": cause.family, "name": cause.name, "outcome": outcome_words, "words": words})
        print(f"{cause.form:13}{cause.family:11}{cause.name[:58]:60}{outcome_words:22}{words[:110]}", flush=True)
    total = sum(counts.values())
    stopped = counts[Outcome.BEFORE] + counts[Outcome.BREACH] + counts[Outcome.FRAMEWORK]
    listed = ", ".join(f"{outcome} {counts[outcome]}" for outcome in Outcome)
    if total:
        warned = stopped + counts[Outcome.WARNED]
        print(f"\n{total} causes: {listed}; stopped before step 1 or at the first breach: {stopped} ({stopped / total:.0%})")
        print(f"with those that are warned of other data: {warned} ({warned / total:.0%})")
    print(f"healthy resumes: {healthy}, false alarms: {false}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    sys.stdout.flush()
    sys.stderr = io.StringIO()  # sessions that end with the process: their folders are gone
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
