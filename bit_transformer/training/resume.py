"""Which checkpoint a launch starts from, and what a rollback asked of its data and LR.

`auto` takes what `chronicle run --restarts` hands over, else what `chronicle latest` would name: the newest checkpoint of this
run's lineage that passes verification. A step or a path names one, `fresh` none. Where later checkpoints lie beside it the
launch is refused, since it would overwrite them. The trainer loads it, and the guard checks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bit_transformer.errors import CannotResume
from chronicle.journal import read_journal
from chronicle.latest import find_latest
from chronicle.paths import RunPaths
from chronicle.resume.contract import load_contract
from rollback.checkpoint.listing import list_checkpoints

CHECKPOINT_NAME = re.compile(r"opt_step-(\d+)")
STATE_DIRECTORY = "accelerator_state"
RESUME_FROM = "CHRONICLE_RESUME_FROM"  # set by `chronicle run --restarts` (docs/trainer_interface.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint to load (None: a fresh start), and the changes of data and LR that a rollback asked for."""

    path: Path | None
    skip_batches: int = 0
    reshuffle: bool = False
    warmup_steps: int = 0


def checkpoint_path(root: Path, step: int) -> Path:
    """Return where `accelerator.save_state` writes the checkpoint of `step`."""
    return root / f"opt_step-{step}" / STATE_DIRECTORY


def find_resume_point(requested: str, root: Path, environ: Mapping[str, str]) -> ResumePoint:
    """Return the checkpoint to start from. Raises CannotResume where the named one does not exist, or later ones do."""
    if root.exists() and not root.is_dir():
        raise CannotResume(f"`{root}` is a file, expected a directory for checkpoints", "name another with --checkpoints")
    run_dir = Path(environ["CHRONICLE_RUN_DIR"]) if "CHRONICLE_RUN_DIR" in environ else None
    path = _find_path(requested, root, environ.get(RESUME_FROM), run_dir)
    listed = list_checkpoints(root, include_abandoned=False)
    steps = [one.step for one in listed if one.step is not None and one.written is not None]  # the save was completed
    if path is not None and not path.is_dir():
        raise CannotResume(f"checkpoint `{path}` does not exist; steps here: {', '.join(map(str, steps)) or 'none'}")
    match = CHECKPOINT_NAME.fullmatch(path.parent.name) if path is not None else None
    if path is None or (match is not None and path.parent.parent.resolve() == root.resolve()):
        step = int(match[1]) if match is not None else -1
        later = [found for found in steps if found > step]
        if later:
            raise CannotResume(
                f"`{root}` holds checkpoints of later steps {', '.join(map(str, later))}, which this launch would overwrite",
                f"`chronicle rollback --to {step}` moves them out of the way" if step >= 0
                else "choose another directory with --checkpoints")
    contract = load_contract(run_dir / "contract.json") if run_dir is not None else None
    if contract is None or path is None or path.resolve() != _state_directory(Path(contract.checkpoint), root).resolve():
        return ResumePoint(path=path)
    data = contract.data or {}
    return ResumePoint(path=path, skip_batches=int(data.get("skip_batches") or 0), reshuffle=bool(data.get("reshuffle")),
                       warmup_steps=contract.warmup_steps)


def _find_path(requested: str, root: Path, handed: str | None, run_dir: Path | None) -> Path | None:
    if requested == "fresh":
        return None
    if requested.isdigit():
        return checkpoint_path(root, int(requested))
    if requested != "auto":
        return _state_directory(Path(requested), root)
    if handed:
        return _state_directory(Path(handed), root)
    entries = read_journal(RunPaths(run_dir)).entries if run_dir is not None else ()
    newest = find_latest(root, entries, full=False).checkpoint if root.is_dir() else None
    return _state_directory(newest.path, root) if newest is not None else None


def _state_directory(path: Path, root: Path) -> Path:
    path = path if path.is_absolute() or path.exists() else root / path
    return path / STATE_DIRECTORY if CHECKPOINT_NAME.fullmatch(path.name) else path
