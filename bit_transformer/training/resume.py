"""Decides which checkpoint a launch starts from. Nothing is guessed.

`auto` takes what `chronicle run --restarts` hands over, the newest verified checkpoint. Else it follows the journal: after a
rollback the checkpoint that its contract names, else the checkpoint saved last; a later save that was cut (it has no manifest,
which is written last) is moved to the quarantine. Where the journal names none it is a fresh start, which needs an empty
directory. `latest-complete` takes the highest step with a manifest; a step or a path names a checkpoint. The trainer loads it
and the guard checks it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bit_transformer.errors import CannotResume
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import RECEIPTS, CheckpointSaved, EntryKind
from chronicle.journal.place import anchors_of
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import MANIFEST_NAME

CHECKPOINT_NAME = re.compile(r"opt_step-(\d+)")
STATE_DIRECTORY = "accelerator_state"
RESUME_FROM = "CHRONICLE_RESUME_FROM"  # set by `chronicle run --restarts` (docs/trainer_interface.md)
RENAME_SECONDS = 60.0


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


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a checkpoint directory, complete or not, ascending."""
    if not root.is_dir():
        return []
    matches = (CHECKPOINT_NAME.fullmatch(entry.name) for entry in root.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def find_resume_point(requested: str, root: Path, environ: Mapping[str, str]) -> ResumePoint:
    """Return the checkpoint to start from. Raises CannotResume where none can be chosen or the named one does not exist."""
    if root.exists() and not root.is_dir():
        raise CannotResume(f"`{root}` is a file, expected a directory for checkpoints", "name another with --checkpoints")
    contract = _read_contract(environ)
    if requested == "auto" and RESUME_FROM not in environ:
        _set_cut_saves_aside(root, environ, contract)
    path = _named_path(requested, root, environ, contract)
    if path is None:
        _require_nothing_later(root, -1)
        return ResumePoint(path=None)
    if not path.is_dir():
        raise CannotResume(f"checkpoint `{path}` does not exist; steps here: {_listed(list_steps(root))}")
    match = CHECKPOINT_NAME.fullmatch(path.parent.name)
    if match and path.parent.parent.resolve() == root.resolve():
        _require_nothing_later(root, int(match[1]))
    if contract is None or not _is_same(path, _state_directory(Path(contract["checkpoint"]), root)):
        return ResumePoint(path=path)
    data = contract.get("data") or {}
    return ResumePoint(path=path, skip_batches=int(data.get("skip_batches") or 0),
                       reshuffle=bool(data.get("reshuffle")), warmup_steps=int(contract.get("warmup_steps") or 0))


def require_later(stop_at: int | None, step: int) -> None:
    """Raise CannotResume where `stop_at` is not after the step that a launch starts from."""
    if stop_at is not None and stop_at <= step:
        raise CannotResume(f"--stop-at is {stop_at}, this launch starts after step {step}", "name a later step")


def _named_path(requested: str, root: Path, environ: Mapping[str, str], contract: Mapping[str, Any] | None) -> Path | None:
    if requested == "fresh":
        return None
    if requested == "latest-complete":
        return checkpoint_path(root, _latest_complete(root))
    if requested != "auto":
        return checkpoint_path(root, int(requested)) if requested.isdigit() else _state_directory(Path(requested), root)
    if handed := environ.get(RESUME_FROM):
        return _state_directory(Path(handed), root)
    kind, named = _last_word(environ)
    if kind == EntryKind.CHECKPOINT:
        return _state_directory(Path(named), root)
    if contract is not None and kind != "undone":
        return _state_directory(Path(contract["checkpoint"]), root)
    if list_steps(root):
        raise CannotResume(
            f"`{root}` holds checkpoints of steps {_listed(list_steps(root))} and the journal does not name one to resume from",
            "choose with `--resume latest-complete`, `--resume STEP`, or roll back with `chronicle rollback --to STEP`")
    return None


def _set_cut_saves_aside(root: Path, environ: Mapping[str, str], contract: Mapping[str, Any] | None) -> None:
    """Move directories without a manifest that are later than every whole one into quarantine; the first rank does it.

    A KILL in the middle of a save leaves one. Only in a run: its journal says where they are, and `chronicle verify --restore`
    takes it back.
    """
    cut = [step for step in list_steps(root) if not _is_complete(root, step)]
    whole = [step for step in list_steps(root) if _is_complete(root, step)]
    saved = Path(_last_word(environ)[1])
    names = [f"opt_step-{step}" for step in cut if step > max(whole, default=-1) and f"opt_step-{step}" not in saved.parts]
    if not names or "CHRONICLE_RUN_DIR" not in environ or (not whole and contract is not None):
        return
    if environ.get("RANK", "0") == "0":
        from chronicle.latest import set_aside

        with JournalWriter(RunPaths(Path(environ["CHRONICLE_RUN_DIR"]))) as writer:
            set_aside(root, names, None, writer, why="a save that was cut")
        return
    deadline = time.monotonic() + RENAME_SECONDS
    while any((root / name).exists() for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)  # the first rank is renaming them


def _last_word(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the last journal event that decides: ("checkpoint", path), ("rollback", ""), ("undone", "") or ("", "")."""
    run_dir = environ.get("CHRONICLE_RUN_DIR")
    word = ("", "")
    for entry in read_journal(RunPaths(Path(run_dir))).entries if run_dir else ():
        if entry.kind == EntryKind.CHECKPOINT:
            word = (EntryKind.CHECKPOINT.value, CheckpointSaved.of(entry).path or "")
        elif entry.kind == EntryKind.UNDO_RECEIPT:
            word = ("undone", "")
        elif entry.kind in RECEIPTS:
            word = ("rollback", "")
    return word


def _read_contract(environ: Mapping[str, str]) -> dict[str, Any] | None:
    run_dir = environ.get("CHRONICLE_RUN_DIR")
    path = Path(run_dir) / "contract.json" if run_dir else None
    if path is None or not path.is_file():
        return None
    try:
        contract = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise CannotResume(f"contract `{path}` cannot be read: {problem}") from problem
    if not isinstance(contract, dict) or contract.get("v") != 1 or not contract.get("checkpoint"):
        raise CannotResume(f"contract `{path}` does not have version 1 or does not name a checkpoint")
    stored = contract.get("stored") or contract["checkpoint"]  # relative to the run: true after a move as well
    return contract | {"checkpoint": anchors_of(RunPaths(path.parent)).resolve(stored)}


def _state_directory(path: Path, root: Path) -> Path:
    path = path if path.is_absolute() or path.exists() else root / path
    return path / STATE_DIRECTORY if CHECKPOINT_NAME.fullmatch(path.name) else path


def _is_complete(root: Path, step: int) -> bool:
    state = checkpoint_path(root, step)
    return any((place / MANIFEST_NAME).is_file() for place in (state, state.parent))


def _latest_complete(root: Path) -> int:
    complete = [step for step in list_steps(root) if _is_complete(root, step)]
    if not complete:
        raise CannotResume(f"no checkpoint in `{root}` has its manifest; steps here: {_listed(list_steps(root))}",
                           "name one with `--resume STEP`")
    return complete[-1]


def _require_nothing_later(root: Path, step: int) -> None:
    later = [found for found in list_steps(root) if found > step]
    if later:
        raise CannotResume(f"`{root}` holds checkpoints of later steps {_listed(later)}, which this launch would overwrite",
                           f"`chronicle rollback --to {step}` moves them out of the way" if step >= 0
                           else "choose another directory with --checkpoints")


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
