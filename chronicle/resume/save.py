"""A save under guard: fingerprint and manifest, written after all other files, without making training wait or fail.

No collective is used (see `Ranks`). When the other ranks' digests are not there within a second, a thread waits for them and
writes the manifest then. File digests are always computed in a thread. An error is reported once and training goes on.
A checkpoint may be one level above the directory that the framework writes (`opt_step-30500/accelerator_state`): the manifest
lies where `rollback` lists checkpoints.
"""

import atexit
import contextlib
import functools
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from chronicle.journal.events import CheckpointSaved, FileDigest, StateSaved
from chronicle.resume.envelope.replicas import Replicas
from chronicle.resume.events import Saved
from chronicle.resume.faults import last_resort, shield
from chronicle.resume.memory import MEMORY_VERSION, Memory, RankDigest
from chronicle.resume.training import Training
from chronicle.resume.written import Head, say_other_weights
from rollback.checkpoint.layout import ACCELERATE_STATE_DIR
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    OtherVersion,
    digest_file,
    read_manifest,
    replace_manifest,
    write_manifest,
)
from rollback.errors import RollbackError, UnreadableFile

_NUMBER = re.compile(r"[0-9]+")
NUM_RANKS_COMPARED = 64  # between saves
WAIT_FOR_RANKS_SECONDS = 1.0  # while training waits
WAIT_IN_BACKGROUND_SECONDS = 120.0
WAIT_AT_THE_END_SECONDS = 3.0  # a script that saves on the main process alone: the others will never come


class Sealer:
    """Writes manifests for one process."""

    def __init__(self, training: Training, replicas: Replicas) -> None:
        self.ranks, self.journal, self._replicas = training.ranks, training.journal, replicas
        self._failed = training.faults.record
        self._threads: list[threading.Thread] = []
        self._told_weights = False  # that a save holds others
        self._names: dict[str, str] = {}  # files of the last save, by their names without numbers
        self._deadline = float("inf")  # of waiting for other ranks, on the monotonic clock
        # daemon threads and this hook: threads that Python joins before `atexit` could not be told to hurry
        reference = weakref.ref(self)
        atexit.register(shield(lambda: _finish(reference), functools.partial(self._failed, "exit")))

    def record(self, event: Saved, path: Path | None, memory: Memory) -> None:
        """A state was saved at `path`, or (None) written by torch: one entry in the journal, and a manifest in a directory."""
        if path is None:
            saved = StateSaved(
                step=memory.step,
                identity=memory.state_id,
                run_id=str(memory.identity.get("run_id") or ""),
                honours=list(memory.honours) or None,
                spoilt=memory.spoilt,
                weights=next((one.weights for one in memory.ranks), ""),
                state=event.digest,
                optimizers=list(memory.optimizers) or None,
            )
            self.journal.write(saved, step=memory.step, title="state taken")
        elif path.is_file():  # nothing is written beside it; its digest comes later
            entry = self._record_checkpoint(path, memory, digests="pending")
            if entry is not None:
                self.later(lambda: self._write_digest(path, memory.step, entry))
        else:
            self.seal(path, memory, event.seconds, event.before)

    def compare_weights(self, path: Path, kept: Mapping[str, Head], step: int | None) -> None:
        """Are the weights that lie there those of memory (`kept`)? Said once a launch."""

        def compare() -> None:
            text = say_other_weights(path, kept)
            if text and not self._told_weights:
                self._told_weights = True
                self.journal.tell("save-differs", text, step=step, said=text)

        if kept:
            self.later(compare)

    def seal(
        self,
        root: Path,
        memory: Memory,
        save_seconds: float | None = None,
        before: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Every rank calls this after its part of the save; the main process writes. `memory.ranks` is this rank's own.

        `before`: files of the directory when the save began (`files_in`). Those that it left alone are no part of it: a
        script's own file of a save before, which it is about to overwrite.
        """
        now = files_in(root) if before else {}
        left = frozenset(path for path, one in (before or {}).items() if now.get(path) == one)
        own = memory.ranks[0]
        prefix = self.ranks.publish(_topic(str(root)), own)
        if self.ranks.rank != 0:
            return
        digests = self.collect_soon(prefix, own)
        if len(digests) == self.ranks.world_size:
            self._write(root, replace(memory, ranks=digests), save_seconds, left)
            self.later(lambda: write_digests(root))
            return

        def wait_and_write() -> None:
            begun = time.monotonic()
            late = self.ranks.collect(prefix, own, lambda: min(begun + WAIT_IN_BACKGROUND_SECONDS, self._deadline))
            self._write(root, replace(memory, ranks=late), save_seconds, left)
            write_digests(root)

        self.later(wait_and_write)

    def collect_soon(self, prefix: str, own: RankDigest) -> tuple[RankDigest, ...]:
        """The digests that arrive within a second."""
        soon = time.monotonic() + WAIT_FOR_RANKS_SECONDS
        return self.ranks.collect(prefix, own, lambda: soon)

    def _write_digest(self, path: Path, step: int | None, saved: str) -> None:
        sha256, crc32 = digest_file(path)
        event = FileDigest(path=str(path), sha256=sha256, crc32=crc32)
        self.journal.write(event, step=step, title=f"digest of {path.name}", refs=(saved,))

    def share(self, topic: str, value: str, write: Callable[[Sequence[RankDigest]], None]) -> None:
        """Call `write` on the main process with `value` of every rank, from a thread when it must wait for the others.

        With more than `NUM_RANKS_COMPARED`, only this rank's own value is used.
        """
        own = RankDigest(rank=self.ranks.rank, data=value)
        if not 1 < self.ranks.world_size <= NUM_RANKS_COMPARED:
            write((own,))
            return
        prefix = self.ranks.publish(_topic(topic), own)
        if self.ranks.rank == 0:
            begun = time.monotonic()
            deadline = begun + WAIT_IN_BACKGROUND_SECONDS
            self.later(lambda: write(self.ranks.collect(prefix, own, lambda: min(deadline, self._deadline))))

    def finish(self) -> None:
        """Complete every manifest begun here; digests of ranks that do not arrive within seconds are left out."""
        self._deadline = time.monotonic() + WAIT_AT_THE_END_SECONDS
        for thread in self._threads:
            thread.join()
        self._threads, self._deadline = [], float("inf")

    def _write(self, root: Path, memory: Memory, save_seconds: float | None, left: Collection[str]) -> None:
        run = self.journal.paths.run if self.journal.paths else None
        if differ := self._replicas.at_save(memory.ranks, memory.topology, memory.step):
            memory = replace(memory, spoilt="; ".join(filter(None, (memory.spoilt, differ))))
        made = write_first_manifest(
            root, step=memory.step, memory=memory.to_json(), run=run, launch=self.journal.launch, without=left
        )
        self._compare_names(root, made)
        self._record_checkpoint(root, memory, save_seconds=None if save_seconds is None else round(save_seconds, 3))

    def _record_checkpoint(self, path: Path, memory: Memory, **more: Any) -> str | None:
        event = CheckpointSaved(
            path=str(path),
            identity=memory.state_id,
            step=memory.step,
            honours=list(memory.honours) or None,
            spoilt=memory.spoilt,
            **more,
        )
        return self.journal.write(event, step=memory.step, title=f"checkpoint {path.name}")

    def _compare_names(self, root: Path, made: Manifest) -> None:
        """Say what this save lacks that the save before wrote: a save hook that failed leaves no other trace."""
        names = {_NUMBER.sub("N", file.path): file.path for file in made.files}
        lost = sorted(path for name, path in self._names.items() if name not in names)
        if lost:
            listed = ", ".join(f"`{path}`" for path in lost[:3])
            text = f"`{root}` has no {listed}, which the save before wrote: a save hook may have failed"
            self.journal.say(f"names {listed}", text)
        self._names = names

    def later(self, work: Callable[[], None]) -> None:
        """Do this in a thread; its errors are recorded."""

        def report_errors() -> None:
            try:
                work()
            except Exception as problem:  # noqa: BLE001 a thread of ours must not print a traceback into the training
                self.journal.say("digests", f"file digests were not completed ({type(problem).__name__}: {problem})")
                last_resort(functools.partial(self._failed, "thread"), problem)

        thread = threading.Thread(target=report_errors, name="chronicle-digests", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()


def _finish(reference: "weakref.ref[Sealer]") -> None:
    sealer = reference()
    if sealer is not None:
        sealer.finish()


def _topic(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


# ---- manifest and files of a checkpoint ------------------------------------------------------------------------------


def checkpoint_root(directory: Path) -> Path:
    """The checkpoint that a saved or loaded directory belongs to: itself, or the directory above `accelerator_state`."""
    absolute = Path(directory).absolute()
    return absolute.parent if absolute.name == ACCELERATE_STATE_DIR else absolute


def read_memory(root: Path) -> Memory | None:
    """The memory a checkpoint was saved with; None without manifest or memory. Raises `RollbackError` when damaged."""
    manifest = read_manifest(root)
    if manifest is None or manifest.memory is None:
        return None
    version = manifest.memory.get("v")
    if isinstance(version, int) and version > MEMORY_VERSION:
        what = f"`{root / MANIFEST_NAME}` describes memory in version {version}: version {MEMORY_VERSION} is known"
        raise OtherVersion(what, "use a newer chronicle")
    return Memory.from_json(manifest.memory)


def files_in(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below a directory with its size and modification time in ns; {} where there is none."""
    found = {}
    for path in root.rglob("*") if root.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.is_file():
                about = path.stat()
                found[path.relative_to(root).as_posix()] = (about.st_size, about.st_mtime_ns)
    return found


def write_first_manifest(
    root: Path,
    *,
    step: int | None,
    memory: Mapping[str, Any] | None,
    run: str | None,
    launch: int | None,
    without: Collection[str] = (),
) -> Manifest:
    """Write the manifest right after the save: names, sizes and memory now, file digests later (`digests: pending`)."""
    return write_manifest(
        root, step=_step_in_name(root, step), memory=memory, run=run, launch=launch, digests=False, without=without
    )


def _step_in_name(root: Path, counted: int | None) -> int | None:
    """The step in the checkpoint's name if it is the counted one or its neighbour; else the counted one.

    Some trainers name a checkpoint by a counter that is one behind the optimizer's: that is a layout and no mismatch.
    """
    try:
        named = open_checkpoint(root)
    except RollbackError:
        return counted
    if named.step is None or named.step_source != "name":
        return counted
    return named.step if counted is None or abs(named.step - counted) <= 1 else counted


def write_digests(root: Path) -> None:
    """Add the digests of its files to the manifest; nothing is written when the checkpoint is already gone."""
    manifest = read_manifest(root)
    if manifest is None:
        return
    files: list[ManifestFile] = []
    for file in manifest.files:
        try:
            sha256, crc32 = digest_file(root / file.path)
        except UnreadableFile:
            return  # rotated away in the meantime
        files.append(replace(file, sha256=sha256, crc32=crc32))
    replace_manifest(root, replace(manifest, files=tuple(files), digests="complete"))
