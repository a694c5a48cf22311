"""`python -m benchmarks.first_batch`: planted faults of labels, templates and LR units, and healthy scripts.

Every script is an ordinary one of Transformers or TRL without a line of ours, guarded as under `chronicle run`, and stopped
after its first optimizer step. Printed is what was said before that step. Exit 1 when a healthy script is blamed.
"""

import contextlib
import io
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from benchmarks.first_batch.cases import CASES, HAS_TRL, Case
from chronicle.journal import read_journal
from chronicle.journal.events import FirstBatchSeen
from chronicle.paths import RunPaths
from chronicle.resume.adapters.transformers import ChronicleCallback


class StopAfterOne(transformers.TrainerCallback):  # type: ignore[misc]
    """One optimizer step is enough."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = True
        return control


def play(case: Case, folder: Path) -> tuple[list[str], str]:
    """The findings that were said before step 1, and the error that ended the script, if one did."""
    torch.manual_seed(0)
    run, error = folder / "logs" / "tr", ""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            trainer = case.make(str(folder / "out"))
            trainer.add_callback(StopAfterOne())
            trainer.add_callback(ChronicleCallback(run))  # what `startup/sitecustomize.py` does
            trainer.train()
        except Exception as problem:  # noqa: BLE001 a planted fault may end its script; a healthy one that fails is seen
            error = traceback.format_exception_only(problem)[-1].strip()[:160]
    entries = read_journal(RunPaths(run)).entries if (run / "journal").is_dir() else ()
    seen = [FirstBatchSeen.of(entry) for entry in entries if entry.kind == "guard.first_batch"]
    faults = [f"guard.fault: {entry.data['error']}" for entry in entries if entry.kind == "guard.fault"]
    return [str(one["name"]) for event in seen for one in event.findings] + faults, error


def main() -> int:
    """Play every case, or those whose name contains a word of the command line."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    chosen = [case for case in CASES if not sys.argv[1:] or any(word in case.name for word in sys.argv[1:])]
    counts = {"faults": 0, "said": 0, "healthy": 0, "blamed": 0}
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found, error = play(case, Path(folder))
        right = bool(set(found) & set(case.expected)) if case.expected else not found and not error
        counts["faults" if case.expected else "healthy"] += 1
        counts["said" if case.expected else "blamed"] += right if case.expected else not right
        print(f"{'ok  ' if right else 'FAIL'} {case.name}: {', '.join(found) or 'nothing'}" + (f" ({error})" if error else ""))
        sys.stdout.flush()
    print(f"faults said before step 1: {counts['said']} of {counts['faults']}")
    print(f"healthy scripts blamed: {counts['blamed']} of {counts['healthy']}" + ("" if HAS_TRL else " (without TRL)"))
    return 1 if counts["blamed"] else 0


if __name__ == "__main__":
    sys.exit(main())
