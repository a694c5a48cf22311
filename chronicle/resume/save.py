"""The guard at a save: memory's fingerprint and the manifest, written last, without making training wait or fail.

No collective is used (see `ranks`). When the other ranks' digests are not there within a second, a thread goes on
waiting and writes the manifest then; file digests are always a thread's work. Whatever goes wrong is said once.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, failed
from chronicle.resume.journal import GuardJournal
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.verdict import Ranks
from rollback.checkpoint.layout import ACCELERATE_STATE_DIR
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import ManifestFile, digest_file, read_manifest, replace_manifest, write_manifest
from rollback.checks.verify import verify_checkpoint
from rollback.errors import RollbackError, UnknownFormat, UnreadableFile
from rollback.findings import Severity

__all__ = [
    "Sealer",
    "check_digest",
    "check_files",
    "checkpoint_root",
    "read_memory",
    "write_digests",
    "write_first_manifest",
]

WAIT_FOR_RANKS_SECONDS = 1.0  # on the training's own time
WAIT_IN_BACKGROUND_SECONDS = 120.0
WAIT_AT_THE_END_SECONDS = 3.0  # a script that saves on the main process alone: the others will never come


class Sealer:
    """Writes manifests for one process."""

    def __init__(self, ranks: Ranks, story: GuardJournal) -> None:
        self.ranks = ranks
        self.story = story
        self._threads: list[threading.Thread] = []
        self._deadline = float("inf")  # of waiting for other ranks, on the monotonic clock
        # daemon threads and this: threads that are joined before `atexit` could not be told to hurry
        reference = weakref.ref(self)
        atexit.register(lambda: sealer.finish() if (sealer := reference()) else None)

    def seal(self, root: Path, memory: Memory, save_seconds: float | None = None) -> None:
        """Every rank calls this after its part of the save; the main process writes. `memory.ranks` is this rank's own."""
        own = memory.ranks[0]
        prefix = self.ranks.publish(sha256(str(root).encode()).hexdigest()[:16], own)
        if self.ranks.rank != 0:
            return
        digests = self.collect_soon(prefix, own)
        if len(digests) == self.ranks.world_size:
            self._write(root, replace(memory, ranks=digests), save_seconds)
            self._start(lambda: write_digests(root))
            return

        def wait_and_write() -> None:
            begun = time.monotonic()
            late = self.ranks.collect(prefix, own, lambda: min(begun + WAIT_IN_BACKGROUND_SECONDS, self._deadline))
            self._write(root, replace(memory, ranks=late), save_seconds)
            write_digests(root)

        self._start(wait_and_write)

    def collect_soon(self, prefix: str, own: RankDigest) -> tuple[RankDigest, ...]:
        """The digests that are there within a second."""
        soon = time.monotonic() + WAIT_FOR_RANKS_SECONDS
        return self.ranks.collect(prefix, own, lambda: soon)

    def seal_file(self, path: Path, *, step: int | None, honours: Sequence[str] = ()) -> None:
        """A checkpoint that is one file: its entry now, its digest later. Nothing is written beside it, where loaders look."""
        data: dict[str, object] = {"path": str(path), "step": step, "digests": "pending"}
        if honours:
            data["honours"] = list(honours)
        saved = self.story.write("checkpoint", step=step, title=f"checkpoint {path.name}", data=data)
        if saved is not None:
            self._start(lambda: self._write_digest(path, step, saved))

    def _write_digest(self, path: Path, step: int | None, saved: str) -> None:
        sha256, crc32 = digest_file(path)
        data = {"path": str(path), "sha256": sha256, "crc32": crc32}
        self.story.write("guard.digest", step=step, title=f"digest of {path.name}", refs=(saved,), data=data)

    def share(self, topic: str, value: str, write: Callable[[Sequence[RankDigest]], None], *, at_most: int) -> None:
        """Give `value` of every rank to `write` on the main process, from a thread when it must wait for the others."""
        own = RankDigest(rank=self.ranks.rank, data=value)
        if not 1 < self.ranks.world_size <= at_most:
            write((own,))
            return
        prefix = self.ranks.publish(sha256(topic.encode()).hexdigest()[:16], own)
        if self.ranks.rank == 0:
            begun = time.monotonic()
            deadline = begun + WAIT_IN_BACKGROUND_SECONDS
            self._start(lambda: write(self.ranks.collect(prefix, own, lambda: min(deadline, self._deadline))))

    def finish(self) -> None:
        """Complete every manifest begun here; digests of ranks that have not come within seconds are left out."""
        self._deadline = time.monotonic() + WAIT_AT_THE_END_SECONDS
        for thread in self._threads:
            thread.join()
        self._threads, self._deadline = [], float("inf")

    def _write(self, root: Path, memory: Memory, save_seconds: float | None) -> None:
        run = self.story.paths.run if self.story.paths else None
        write_first_manifest(root, step=memory.step, memory=memory.to_json(), run=run, launch=self.story.launch)
        data: dict[str, object] = {"path": str(root), "step": memory.step}
        if memory.honours:
            data["honours"] = list(memory.honours)
        if save_seconds is not None:
            data["save_seconds"] = round(save_seconds, 3)
        self.story.write("checkpoint", step=memory.step, title=f"checkpoint {root.name}", data=data)

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as problem:  # noqa: BLE001 a thread of ours must not print a traceback into the training
                self.story.say("digests", f"file digests were not completed ({type(problem).__name__}: {problem})")

        thread = threading.Thread(target=guarded, name="chronicle-digests", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()


# --- Manifest and files of a checkpoint


def checkpoint_root(directory: Path) -> Path:
    """The checkpoint that a saved or loaded directory belongs to: itself, or the directory above `accelerator_state`."""
    absolute = Path(directory).absolute()
    return absolute.parent if absolute.name == ACCELERATE_STATE_DIR else absolute


def write_first_manifest(
    root: Path, *, step: int | None, memory: Mapping[str, Any] | None, run: str | None, launch: int | None
) -> None:
    """Seal a checkpoint right after its save: names, sizes and memory now, file digests later (`digests: pending`)."""
    write_manifest(root, step=_step_in_name(root, step), memory=memory, run=run, launch=launch, digests=False)


def _step_in_name(root: Path, counted: int | None) -> int | None:
    """The step the checkpoint's name says, where it is the counted one or its neighbour; else the counted one.

    Some trainers name a checkpoint by a counter that is one behind the optimizer's (the seed's): that is a layout.
    """
    try:
        named = open_checkpoint(root)
    except RollbackError:
        return counted
    if named.step is None or named.step_source != "name":
        return counted
    return named.step if counted is None or abs(named.step - counted) <= 1 else counted


def write_digests(root: Path) -> None:
    """Complete the manifest with digests of the files it lists; nothing is written when the checkpoint is already gone."""
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


def read_memory(root: Path) -> Memory | None:
    """The memory a checkpoint was saved with; None without manifest or memory. Raises `RollbackError` when damaged."""
    manifest = read_manifest(root)
    if manifest is None or manifest.memory is None:
        return None
    return Memory.from_json(manifest.memory)


def check_digest(path: Path, expected: str | None) -> list[Check]:
    """A checkpoint that is one file against the digest in the journal; None: it is not known (yet)."""
    if expected is None or not path.is_file():
        return []
    try:
        found, _ = digest_file(path)
    except UnreadableFile as problem:
        return [failed("checkpoint files", "F2", found=problem.message, where=str(path), cause=problem.remedy or "")]
    if found == expected:
        return []
    cause = "the file was changed after it was saved, and by no rollback"
    return [failed("checkpoint file", "F3", expected=expected[:16], found=found[:16], where=str(path), cause=cause)]


def check_files(root: Path) -> list[Check]:
    """F1–F10 over names, sizes, contents and counters; ERROR findings forbid the resume, and so does a stray."""
    try:
        checkpoint = open_checkpoint(root)
        findings = verify_checkpoint(checkpoint, full=True)
    except UnknownFormat:
        return []  # a writer `rollback` does not know: memory is still compared
    except RollbackError as problem:
        cause = problem.remedy or ""
        return [failed("checkpoint files", "F2", found=problem.message, where=str(root), cause=cause)]
    return [
        failed(
            f"checkpoint file {finding.path}",
            finding.check,
            found=finding.message,
            where=str(root),
            cause=finding.remedy or "",
        )
        for finding in findings
        if finding.severity is Severity.ERROR
    ]
