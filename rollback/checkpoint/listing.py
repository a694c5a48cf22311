"""Lists checkpoints by strict name patterns, and reads their state. Nothing is guessed.

Listing uses names and sizes and opens only the manifest. Where name and manifest do not give the step (Accelerate's
`checkpoint_7` counts saves), the counters are read. Checkpoints that a rollback has moved away are in
`<root>/../abandoned/<rollback id>/` and are listed too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.account import is_saved_file, may_be_state, with_account
from rollback.checkpoint.formats import FORMATS, SCRIPT_FOLDER, TORCH
from rollback.checkpoint.formats.format import CheckpointFormat
from rollback.checkpoint.identity import identity_in_file
from rollback.checkpoint.layout import (
    Checkpoint,
    DirectoryEntry,
    FileType,
    Role,
    StateFile,
    is_leftover,
    number_in_name,
    parts_beside,
    saved_number,
    saved_numbers,
    scan_entries,
)
from rollback.checkpoint.manifest import Manifest, is_count, is_manifest_name, read_manifest
from rollback.checkpoint.state import CheckpointState, last_epoch_of
from rollback.disk import RemoteView
from rollback.errors import (
    CheckpointNotFound,
    RollbackError,
    StrayFiles,
    UnknownFormat,
    UnreadableFile,
    one_line,
)

_ABANDONED_DIR = "abandoned"
_COPY = re.compile(r"(?P<original>(?:checkpoint|step|opt_step|global_step)?[-_]?\d+)[^\d/][^\d/]*")


def find_format(name: str, entries: Sequence[DirectoryEntry]) -> CheckpointFormat | None:
    """The first format that claims a directory called `name` with these entries, or None."""
    return next((known for known in FORMATS if known.claims(name, entries)), None)


def format_of(checkpoint: Checkpoint) -> CheckpointFormat:
    """The format of a checkpoint; raises `UnknownFormat` where this program has none of that name."""
    known = next((one for one in FORMATS if one.name == checkpoint.format), None)
    if known is None:
        raise UnknownFormat(f"`{checkpoint.path}`: unknown format {checkpoint.format!r}")
    return known


def open_checkpoint(path: Path | str, *, count_steps: bool = True) -> Checkpoint:
    """The checkpoint at `path`, a directory or a single file.

    `count_steps` reads the counters when the name does not give the step; callers that read the state anyway may skip
    it. Raises `CheckpointNotFound` when nothing is there, `UnknownFormat` with what was found.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointNotFound(_not_there(path))
    found = _describe(Path(os.path.abspath(path)), abandoned=_abandoned_id(path))
    if found is None:
        raise UnknownFormat(*_what_is_there(path))
    return _with_parts(_with_counted_step(found) if count_steps else found)


def list_checkpoints(root: Path | str, *, include_abandoned: bool = True) -> list[Checkpoint]:
    """Which checkpoints are in `root`: the one answer for every command, ordered by step then name, abandoned ones last.

    A missing root has none; a root that is a checkpoint itself is the only one. Files of one save side by side are one
    checkpoint. A link is what it points to: it is left out where that is listed under its own name. So is the newest state
    under a name without a number (`list_rolling`), where its step is there as well. A checkpoint whose step nothing tells is
    listed with none. Files without training state (weights alone) are left out; `list_unrecognised` has the rest.
    """
    root = Path(os.path.abspath(root))
    if root.is_dir() and _is_one_itself(root):
        return [open_checkpoint(root)]
    found = _listed_in(root, None)
    if include_abandoned:
        for folder in _directories(root.parent / _ABANDONED_DIR):
            found += _listed_in(folder, folder.name)
    numbered = [one for one in found if not is_rolling(one)]
    present, known = {c.step for c in numbered if c.abandoned is None}, {c.step for c in numbered}
    rolling = [one for one in found if is_rolling(one)]
    found = [*numbered, *(c for c in rolling if c.step is None or c.step not in (known if c.abandoned else present))]
    return sorted(found, key=lambda c: (c.abandoned is not None, c.step is None, c.step or 0, c.path.name))


def list_rolling(root: Path | str) -> list[Checkpoint]:
    """The newest state under names without a number (`last.ckpt`, `ckpt.pt`, `latest/`), links excepted.

    A trainer writes them again and again and resumes from them, so a rollback puts its target there.
    """
    found = _listed_in(Path(os.path.abspath(root)), None)
    return [one for one in found if is_rolling(one) and not one.path.is_symlink()]


def _listed_in(folder: Path, abandoned: str | None) -> list[Checkpoint]:
    """The checkpoints directly in `folder`, files of one save together, links to one of them left out."""
    counted = [_with_counted_step(checkpoint) for checkpoint in _checkpoints_in(folder, abandoned)]
    own = [one for one in counted if _is_checkpoint(one)]
    known = {one.path for one in own}
    stateless = {one.path.name: one.size_bytes for one in counted if one.single_file and one.path not in known}
    return without_links(_side_by_side(own, stateless))


def _is_checkpoint(one: Checkpoint) -> bool:
    """Whether it is what a run goes on from: a writer's by its layout, or by what was found in it."""
    known = format_of(one)
    counts = one.step is not None and known.is_checkpoint_name(one.path.name)
    return bool(not known.by_content or one.strays or one.trains or counts)


def _side_by_side(own: Sequence[Checkpoint], stateless: Mapping[str, int]) -> list[Checkpoint]:
    """Files of one step under names of the same number are one checkpoint, called by the one that holds an optimizer."""
    found: list[Checkpoint] = []
    taken: set[Path] = set()
    for one in sorted(own, key=lambda one: (not one.trains, one.path.name)):
        if one.path in taken:
            continue
        same = [other for other in own if _is_part(other, one) and other.path not in taken]
        parts = parts_beside(one.path.name, [other.path.name for other in same])
        same = [other for other in same if other.path.name in parts]
        taken |= {one.path, *(other.path for other in same)}
        found.append(_with_parts(one, {**stateless, **{other.path.name: other.size_bytes for other in same}}))
    return found


def _is_part(other: Checkpoint, one: Checkpoint) -> bool:
    files = one.single_file and other.single_file and other.path != one.path
    return files and one.step == other.step and one.step is not None and not other.path.is_symlink()


def _is_one_itself(root: Path) -> bool:
    known = find_format(root.name, scan_entries(root, levels=2))
    return known is not None and (not known.by_content or known.is_checkpoint_name(root.name))


def list_unrecognised(root: Path | str, listed: Iterable[Checkpoint]) -> tuple[str, ...]:
    """What lies in `root` and is none of the `listed` checkpoints, though it is no text either: it may be state.

    A trainer may take it, or it is a save under a name or in a form that is not read here; so it is said before a start.
    Nothing in a store: no trainer lists one.
    """
    if RemoteView.opened is not None:
        return ()
    root = Path(os.path.abspath(root))
    known = {name for one in listed if one.abandoned is None for name in one.names}
    for one in _checkpoints_in(root, None):
        is_called_so = one.path.name not in known and format_of(one).is_checkpoint_name(one.path.name)
        if is_called_so and _with_counted_step(one).trains is False:
            known.add(one.path.name)  # weights alone; what cannot be read is said
    known |= {one.path.name for one in list_rolling(root)}
    rest = [entry for entry in _entries_of(root) if entry.name not in known and not entry.name.startswith(".")]
    return tuple(entry.name for entry in rest if entry.kind is not FileType.LINK and _may_be_state(root, entry))


def say_unrecognised(names: Sequence[str]) -> str:
    """What `list_unrecognised` found, in one sentence; "" for nothing."""
    if not names:
        return ""
    shown = ", ".join(f"`{one_line(name)}`" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"not recognised as checkpoints: {shown}{more}; if these are saves, nothing here resumes from them"


def _may_be_state(root: Path, entry: DirectoryEntry) -> bool:
    if entry.kind is FileType.FILE:
        return may_be_state(root / entry.name)
    inner = scan_entries(root / entry.name, levels=2) if entry.kind is FileType.DIRECTORY else ()
    return any(may_be_state(root / entry.name / one.path) for one in inner if one.kind is FileType.FILE)


def without_links(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints without links to another one of them."""
    present = {Path(os.path.realpath(c.path)) for c in found if not c.path.is_symlink()}
    return [c for c in found if not c.path.is_symlink() or Path(os.path.realpath(c.path)) not in present]


def list_elsewhere(root: Path | str, later: Sequence[str]) -> Mapping[Path, tuple[str, ...]]:
    """Files without training state that carry the number of one of `later`, by directory: above, beside and below `root`.

    A script that saves `model/20.pt` and `optim/20.pt` has one step in two directories, of which one is a root.
    """
    root = Path(os.path.abspath(root))
    numbers = {number for name in later if (number := saved_number(name)) is not None}
    folders = [root.parent, *_directories(root.parent), *_directories(root)] if numbers else []
    found: dict[Path, tuple[str, ...]] = {}
    for folder in folders:
        if folder == root or folder.name.startswith(".") or folder.name == _ABANDONED_DIR:
            continue
        files = [entry.name for entry in _entries_of(folder) if entry.kind is FileType.FILE]
        held = [n for n in files if not is_leftover(n) and saved_number(n) in numbers]
        names = sorted(held, key=lambda n: (saved_number(n) or 0, n))
        newest = _describe(folder / names[-1], abandoned=None) if names else None
        if names and (newest is None or _with_counted_step(newest).step is None):  # else it is a run of its own
            found[folder] = tuple(names)
    return found


def directories_with_checkpoints(root: Path | str) -> list[tuple[Path, int]]:
    """Directories below or beside `root` that hold checkpoints, and how many: where to look when it has none."""
    root = Path(os.path.abspath(root))
    near = [*_directories(root), *(folder for folder in _directories(root.parent) if folder != root)]
    found = []
    for folder in near:
        held = [] if folder.name in {_ABANDONED_DIR} or folder.name.startswith(".") else _checkpoints_in(folder, None)
        if held and _with_counted_step(held[-1]).step is not None:  # the names of the others are not read
            found.append((folder, len(held)))
    return found


def list_root_strays(root: Path | str) -> tuple[str, ...]:
    """Names directly below `root` that look like a leftover or a copy of a checkpoint, and files that none opens as one."""
    root = Path(root)
    entries = _entries_of(root)
    names = {entry.name for entry in entries}
    files = [entry.name for entry in entries if entry.kind is FileType.FILE and _called_a_step(entry.name)]
    strange = {name for name in files if not _does_train(_describe(root / name, abandoned=None))}  # `step-8.hyps`
    return tuple(name for name in sorted(names) if is_leftover(name) or is_checkpoint_copy(name, names) or name in strange)


def _does_train(one: Checkpoint | None) -> bool:
    """Whether it can be read, and holds what a training goes on from."""
    return one is not None and _with_counted_step(one).trains is True


def is_checkpoint_copy(name: str, names: Container[str]) -> bool:
    """Whether it is called as another one of `names`, which is a step, with something after it: `step-500_keep`."""
    return _called_a_step(name) in names


def _called_a_step(name: str) -> str:
    """What stands before that which follows a step in a name: `step-500` of `step-500_keep`; "" where no step is followed."""
    found = _COPY.fullmatch(name)
    is_copy = found is not None and not any(known.is_checkpoint_name(name) for known in FORMATS)
    return found["original"] if found is not None and is_copy else ""


_OTHER_STATE = re.compile(r"(?i)best|final|average|ema|swa")  # written for another purpose than to go on from


def is_rolling(one: Checkpoint) -> bool:
    """Whether it is the newest state under a name of its own, without a number: `last.ckpt`, `ckpt.pt`, `latest/`."""
    return is_copy_of_newest(one.path.name) or (
        one.trains is True and format_of(one).by_content and saved_numbers(one.path.name) == () and not
        _OTHER_STATE.search(one.path.name)
    )


def is_copy_of_newest(name: str) -> bool:
    """Whether it is Lightning's `last.ckpt`: the newest state under a second name."""
    return re.fullmatch(r"last(?:-v\d+)?\.ckpt", name) is not None


def _checkpoints_in(root: Path, abandoned: str | None) -> list[Checkpoint]:
    found: list[Checkpoint] = []
    entries = _entries_of(root)
    names = {entry.name for entry in entries}
    for entry in entries:
        name = entry.name
        if is_leftover(name) or is_checkpoint_copy(name, names):
            continue
        if entry.kind in (FileType.DIRECTORY, FileType.LINK, FileType.FILE):
            checkpoint = _describe(root / name, abandoned=abandoned)
            if checkpoint is not None:
                found.append(checkpoint)
    return found


def _describe(path: Path, *, abandoned: str | None) -> Checkpoint | None:
    """A checkpoint from names alone, or None when no format claims them."""
    single_file = not path.is_dir()
    if single_file:
        if not path.is_file():
            return None
        entries: tuple[DirectoryEntry, ...] = (DirectoryEntry(path.name, FileType.FILE, path.stat().st_size),)
    else:
        entries = scan_entries(path)
    # a `scheduler.pt` alone is a file that a script could have saved, not the directory that a Trainer puts it into
    found = (form for form in FORMATS if form.single_file == single_file and form.claims(path.name, entries))
    known = next(found, None) or _format_by_content(path, entries)
    if known is None:
        return None
    manifest = None if single_file else _manifest_if_whole(path)
    written = None if manifest is None else manifest.written
    files, strays = _sort_entries(known, entries, written or frozenset())
    step, source = _step_of(known, path.name, manifest)
    return Checkpoint(
        path=path,
        step=step,
        step_source=source,
        format=known.name,
        files=files,
        strays=(*strays, *_sibling_strays(known, path)),
        abandoned=abandoned,
        launch=manifest.launch if manifest else None,
        single_file=single_file,
        written=written,
    )


def _format_by_content(path: Path, entries: Sequence[DirectoryEntry]) -> CheckpointFormat | None:
    """The format of a script's own, for files of other names whose content is what torch saved, or a pickle."""
    if RemoteView.opened is not None or not path.exists():
        return None  # in a store each look is a request
    if not path.is_dir():
        return TORCH if is_saved_file(path) else None
    files = [entry for entry in entries if entry.kind is FileType.FILE and entry.path.count("/") < 2]
    saved = [entry.path for entry in files if not is_leftover(entry.name) and is_saved_file(path / entry.path)]
    return SCRIPT_FOLDER if SCRIPT_FOLDER.is_one_save(path.name, saved) else None


def _manifest_if_whole(path: Path) -> Manifest | None:
    """The manifest; None when it is damaged: `verify` reports that, and listing goes on."""
    try:
        return read_manifest(path)
    except UnreadableFile:
        return None


def _sort_entries(
    known: CheckpointFormat, entries: Sequence[DirectoryEntry], written: Set[str]
) -> tuple[tuple[StateFile, ...], tuple[str, ...]]:
    """Files and strays. What the save itself wrote is no stray, unless it is a leftover of a state file."""
    folders = {path[: place.start()] for path in written for place in re.finditer("/", path)}
    files: list[StateFile] = []
    strays: list[str] = []
    for entry in entries:
        if is_manifest_name(entry.name):
            files.append(StateFile(path=entry.path, role=Role.MANIFEST, rank=None, size_bytes=entry.size_bytes))
            continue
        if entry.kind is FileType.DIRECTORY:
            if entry.path not in folders and (is_leftover(entry.name) or known.looks_like_state(entry.path)):
                strays.append(entry.path)
            continue
        role = known.role_of(entry.path)
        leftover, lookalike = is_leftover(entry.name), known.looks_like_state(entry.path)
        if role is None and ((leftover and lookalike) if entry.path in written else (leftover or lookalike)):
            strays.append(entry.path)
            continue
        kind, rank = role or (Role.OTHER, None)
        files.append(StateFile(path=entry.path, role=kind, rank=rank, size_bytes=entry.size_bytes))
    return tuple(files), tuple(strays)


def _sibling_strays(known: CheckpointFormat, path: Path) -> tuple[str, ...]:
    """Siblings that the writer's own loader would consider, as "../name"."""
    if not known.loader_lists_siblings(path.name):
        return ()
    others = (entry.name for entry in _entries_of(path.parent) if entry.name != path.name)
    return tuple(f"../{name}" for name in others if not known.is_checkpoint_name(name))


def _step_of(known: CheckpointFormat, name: str, manifest: Manifest | None) -> tuple[int | None, str]:
    step = known.step_in_name(name)
    if is_count(step):
        return step, "name"
    if manifest is not None and manifest.step is not None:
        return manifest.step, "manifest"
    return None, "unknown"


def _with_counted_step(checkpoint: Checkpoint) -> Checkpoint:
    """The step by the counters, else by the guard's record, else by a number in the name, else as its schedulers count.

    Not with strays, which are refused first.
    """
    if checkpoint.step is not None or checkpoint.strays:
        return checkpoint
    try:
        state = format_of(checkpoint).read_state(checkpoint)
    except RollbackError:
        return checkpoint  # no step: reading or verifying it reports why
    trains = bool(state.optimizers or state.schedulers)
    checkpoint = replace(checkpoint, trains=trains)
    step = state.optimizer_step if state.writer_step is None else state.writer_step
    if is_count(step):
        return replace(checkpoint, step=step, step_source="counters")
    if trains and checkpoint.single_file:
        step = identity_in_file(checkpoint.path).get("step")
        if is_count(step):
            return replace(checkpoint, step=step, step_source="guard")
    number = number_in_name(checkpoint.path.name) if trains else None
    if number is not None:
        return replace(checkpoint, step=number, step_source="number in the name")
    counted = {last_epoch_of(one.state) for one in state.schedulers}
    count = counted.pop() if len(counted) == 1 else None
    return replace(checkpoint, step=count, step_source="scheduler") if is_count(count) else checkpoint


def _with_parts(checkpoint: Checkpoint, beside: Mapping[str, int] | None = None) -> Checkpoint:
    """A one-file checkpoint with the files of the same save beside it: weights, a schedule, another optimizer.

    `beside` are names and sizes of the files of its folder that may be such; without it the files are asked.
    """
    if not checkpoint.single_file or is_copy_of_newest(checkpoint.path.name):
        return checkpoint
    folder = checkpoint.path.parent
    if beside is None:
        names = [entry.name for entry in _entries_of(folder) if entry.kind is FileType.FILE]
        found = [_describe(folder / name, abandoned=None) for name in parts_beside(checkpoint.path.name, names)]
        counted = [_with_counted_step(c) for c in found if c is not None and c.single_file]
        beside = {c.path.name: c.size_bytes for c in counted if c.step in (None, checkpoint.step)}
    parts = parts_beside(checkpoint.path.name, beside)
    roles = {name: Role.MODEL if name.endswith(".safetensors") else Role.CUSTOM for name in parts}
    files = [StateFile(path=name, role=role, rank=None, size_bytes=beside[name]) for name, role in roles.items()]
    return replace(checkpoint, files=(*checkpoint.files, *files)) if files else checkpoint


def _entries_of(root: Path) -> tuple[DirectoryEntry, ...]:
    return scan_entries(root, levels=1) if root.is_dir() else ()


def _directories(path: Path) -> list[Path]:
    return [path / entry.name for entry in _entries_of(path) if entry.kind is FileType.DIRECTORY]


def _abandoned_id(path: Path) -> str | None:
    parents = Path(os.path.abspath(path)).parents
    return parents[0].name if len(parents) > 1 and parents[1].name == _ABANDONED_DIR else None


def _not_there(path: Path) -> str:
    names = [entry.name for entry in _entries_of(path.parent)][:8]
    if not names:
        return f"`{path}` does not exist, nor anything beside it"
    return f"`{path}` does not exist: beside it are {', '.join(names)}"


def _what_is_there(path: Path) -> tuple[str, str]:
    if path.is_file():
        return (
            f"`{path}` is not a checkpoint file of a known writer",
            "known are the files of torch and Lightning, by their endings",
        )
    entries = _entries_of(path)
    names = ", ".join(entry.name for entry in entries[:8]) or "nothing"
    inner = [c.path.name for c in _checkpoints_in(path, None)][:3]
    writers = ", ".join(known.name for known in FORMATS)
    remedy = (
        f"it holds checkpoints: name one of them, e.g. `{path / inner[0]}`"
        if inner
        else f"name the directory that the trainer saved; known writers are {writers}"
    )
    return f"`{path}` is not a checkpoint of a known writer: it holds {names}", remedy


# --- The state of a checkpoint


def read_state(checkpoint: Checkpoint | Path | str, *, allow_strays: bool = False) -> CheckpointState:
    """The schedulers, optimizers, counters, RNG and data position of a checkpoint, given as such or by its path.

    Raises `StrayFiles` before anything is read unless `allow_strays`, `UnreadableFile`, `Incomplete`, `UnknownFormat`, and
    `CheckpointNotFound` for a path.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if not allow_strays:
        refuse_strays(checkpoint)
    return with_account(checkpoint, format_of(checkpoint).read_state(checkpoint))


def refuse_strays(checkpoint: Checkpoint) -> None:
    """Raise `StrayFiles` naming all strays of the checkpoint, if there are any."""
    if not checkpoint.strays:
        return
    names = ", ".join(f"`{name}`" for name in checkpoint.strays)
    noun = "stray" if len(checkpoint.strays) == 1 else "strays"
    raise StrayFiles(
        f"{noun} {names} in `{checkpoint.path}`: a loader could load it as state, expected only the files of "
        f"{checkpoint.format}",
        "move it out of the checkpoint, or let `chronicle verify --quarantine` do it",
    )
