"""The guard at a save: memory's fingerprint and the manifest, written last, without making training wait or fail.

No collective is used (see `ranks`). When the other ranks' digests are not there within a second, a thread goes on
waiting and writes the manifest then; file digests are always a thread's work. Whatever goes wrong is said once.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from chronicle.resume.files import write_digests, write_first_manifest
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.verdict import Ranks
from chronicle.resume.journal import Story
from rollback.checkpoint.manifest import digest_file

__all__ = ["Sealer"]

WAIT_FOR_RANKS_SECONDS = 1.0  # on the training's own time
WAIT_IN_BACKGROUND_SECONDS = 120.0
WAIT_AT_THE_END_SECONDS = 3.0  # a script that saves on the main process alone: the others will never come


class Sealer:
    """Writes manifests for one process."""

    def __init__(self, ranks: Ranks, story: Story) -> None:
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
