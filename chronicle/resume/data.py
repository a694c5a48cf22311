"""M4: the data that a launch begins with, against the first pass: what its next batch really is.

Every rank compares its own first batch with the record of the batches that followed the save (`first_pass.py`). Where it is
another one, the whole record is read and says what came: an earlier batch (and how many repeat), a later one (how many are left
out), or one the first pass did not have. That is noted and said in one line; it refuses the resume only where the trainer
promised to go on with exactly the next batch (`same_data=True`), or itself claims to skip what was seen and begins again.

After the first step the next batches are compared as well, and later passes of the loader are counted: one that is as short as
the rest of the resumed epoch was skips batches for ever (StatefulDataLoader with persistent workers, `skip_first_batches`).
"""

import atexit
import json
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chronicle.journal.writer import fresh_id
from chronicle.resume.batches import BatchWitness
from chronicle.resume.checks.check import Check, Outcome, attempt, compared, failed, not_compared
from chronicle.resume.contract import Expectation
from chronicle.resume.events import BatchEntered, Ended, Loaded, Saved
from chronicle.resume.first_pass import (
    ENTRY,
    NAME,
    VERSION,
    FirstPass,
    OtherBatch,
    Position,
    read_first_pass,
    read_record,
)
from chronicle.resume.hub import Observer
from chronicle.resume.training import Training
from rollback.disk.durable import write_atomic

MAX_BATCHES = 4_000_000
MAX_UNBEGUN = 100_000
NOT_SEEN = (
    "no call of the model was seen before this step: it is called by a method of its own, inside the step (a closure) "
    "or inside a compiled function"
)
NO_POSITION = "the checkpoint does not say how many batches had been seen when it was saved"
NUM_WITHOUT_STEP = 256  # batches; nobody accumulates that many
NO_STEP_SEEN = "no optimizer step was seen (is `optimizer.step` inside `torch.compile`?), so nothing of this launch is compared"
ASKED_AT = (3, 32, 256)  # batches after which it is asked whether steps are taken that nobody sees
NUM_FIRST = 3
NUM_OF_STEP = 64  # micro-batches
NUM_FOLLOWED = 256  # batches after the first one that are compared
NUM_ASTRAY = 3  # in a row that differ, before it is said
NUM_RANKS = 64  # with more ranks only those that find a difference themselves say so
MOST_WORDS = 240  # characters of a cause that ranks exchange


@dataclass(slots=True)
class _Followed:
    """The batches of the first pass that should come after the first one, and what differed so far."""

    expected: deque[tuple[int, int]] = field(default_factory=deque)  # digest, and how many steps after the save it was
    early: list[tuple[int, int]] = field(default_factory=list)  # digest and step of batches before the first optimizer step
    astray: int = 0  # in a row that are other ones
    uneven: int = 0  # in a row that belong to another step
    ahead: int | None = None  # steps before the first of them, here more than in the first pass


class DataWatch(Observer):
    """The data of this launch on one rank."""

    about = "batches"

    def __init__(
        self, training: Training, tell: Callable[[BatchEntered], object], look_for_steps: Callable[[bool], None]
    ) -> None:
        """`tell`: of all that enters a model. `look_for_steps(surely)`: whether steps are taken that no hook sees."""
        self._training, self._look_for_steps = training, look_for_steps
        self._options, self._journal, self._ranks = training.options, training.journal, training.ranks
        self._start, self._contained, self._failed = training.start, training.contained, training.faults.record
        self.batches = BatchWitness(training, tell, self._see)
        self.continues = False  # the trainer itself says that it skips the batches that were seen
        self._was_equal = False
        self._said: set[str] = set()
        self._begin_anew()
        atexit.register(_finish, weakref.ref(self))

    def goes_on(self, *, skips_seen: bool) -> None:
        """The trainer itself says whether it skips the batches that were seen."""
        self.continues = skips_seen

    def _begin_anew(self) -> None:
        paths = self._training.paths
        self._record = BatchRecord(None if paths is None else paths.batches_dir)
        self.record_id = ""  # agreed on by all ranks, anew after every load
        self._first: int | None = None  # digest of this launch's first batch
        self.first: tuple[str, ...] = ()  # of its first three
        self.of_step: list[int] = []  # digests of the batches since the last step
        self._step: int | None = None
        self._has_begun = self._resumes = False  # the first step was taken; and it followed a load
        self._followed = _Followed()
        self._passes: list[int] = []  # lengths of the passes that ended in this launch; the first began at the resume
        self._in_pass = 0
        self._full = 0  # batches of a whole pass, as far as the record knows
        self._own: Check | None = None  # of this rank's first batch
        self._strays = False  # it is another one that nobody can have meant
        self._stray_words = ""  # on some rank: which one, and what it is

    # ---- what enters the model -----------------------------------------------------------------------------------

    @property
    def is_amid_step(self) -> bool:
        """Whether batches have entered for a step that is still to come."""
        return bool(self.of_step) and self._step == self._training.step

    @property
    def position(self) -> str:
        """Position in the record that a checkpoint saved now carries."""
        return self._record.position_after(self.batches.num_waiting)

    def saved(self, event: Saved) -> None:
        """The batches after it are looked at again."""
        self.batches.after_save()
        if event.is_of_now:
            self.batches.settle()

    def loaded(self, event: Loaded) -> None:
        """In a process that has trained, the next batch is a first one, and what follows belongs to a record of its own."""
        if event.again:
            self.finish()
            self.batches.restart()
            self._begin_anew()

    def ended(self, event: Ended) -> None:
        """Nothing stays in memory."""
        self.finish()

    def finish(self) -> None:
        """The process ends: nothing stays in memory, unless the run's directory was removed meanwhile."""
        if self._record.is_removed:
            return
        with self._contained("batches"):
            self._look_for_steps(False)
            self.batches.settle()

    def _see(self, digest: int, place: int, step: int | None) -> None:
        """One batch of the training. `step`: optimizer steps completed before it; None before the first of the launch."""
        if step != self._step:
            self._step, self.of_step = step, []
        if len(self.of_step) < NUM_OF_STEP:
            self.of_step.append(digest)
        if self._first is None:
            self._first = digest
        elif not self._has_begun and step is not None and len(self._followed.early) < NUM_FOLLOWED:
            self._followed.early.append((digest, step))
        if len(self.first) < NUM_FIRST:
            self.first = (*self.first, f"{digest:016x}")
        self._record.add(digest, 0 if step is None else step + 1, place)
        if step is None and self._record.num_seen == NUM_WITHOUT_STEP:
            self._journal.say("no step", f"not verified: {NO_STEP_SEEN}")
        if self._record.num_seen in ASKED_AT:
            self._look_for_steps(self._record.num_seen >= NUM_WITHOUT_STEP)
        if self._resumes and step is not None:
            self._follow(digest, step)
            self._count(place, step)
        elif place:
            self._in_pass = place

    def _follow(self, digest: int, step: int) -> None:
        """The batches after the first one. Three in a row that differ are said once, or that belong to other steps."""
        known = self._followed
        if not known.expected:
            return
        expected, after = known.expected.popleft()
        taken = 0 if self._start.start_step is None else step - self._start.start_step  # None: still the first step
        known.ahead = taken - after if known.ahead is None else known.ahead  # the two may be counted from another step
        after += known.ahead
        is_same = expected == digest
        known.astray = 0 if is_same else known.astray + 1
        known.uneven = known.uneven + 1 if is_same and after != taken else 0
        first = step + 2 - NUM_ASTRAY
        if known.uneven == NUM_ASTRAY and not self._may_be_split():
            more = "fewer" if taken < after else "more"
            words = f"the same batches make {more} optimizer steps than in the first pass ({taken} steps here, {after} there)"
            self._breach("per-step", first, f"about step {first}: {words}: each step trains on another number of samples")
        if known.astray == NUM_ASTRAY:
            known.expected.clear()
            self._breach("order", first, f"about step {first} the batches are no longer those of the first pass")

    def _count(self, place: int, step: int) -> None:
        """Whether later passes have only as many batches as were left of the resumed one."""
        if place == 1 and self._in_pass:
            self._passes.append(self._in_pass)
            rest, last = self._passes[0], self._passes[-1]
            if len(self._passes) > 1 and last == rest < self._full:
                what = f"this pass of the loader had {last} of {self._full} batches, as many as were left of the resumed one"
                self._breach("skipped", step, f"{what}: batches are skipped in every pass, not only in the resumed one")
        self._in_pass = place

    def warn(self, step: int) -> None:
        """This launch, which is not refused, goes on with another batch that nobody can have meant: an incident, and a line."""
        if self._ranks.rank != 0 or not self._stray_words:
            return
        text = f"this launch goes on with other batches than followed this save{self._stray_words}"
        way_out = 'if intended: CHRONICLE_ACCEPT_CHANGE="data: reason"; same_data=True refuses it'
        line = f"warn: data-not-as-recorded: the data order changed at step {step}{self._stray_words}; {way_out}"
        self._breach("not-as-recorded", step, text, line)

    def _breach(self, kind: str, step: int, text: str, line: str = "") -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._journal.tell(f"data-{kind}", text, step=step, said=line or f"data: {text}")

    # ---- before the first step -----------------------------------------------------------------------------------

    def was_loaded(self, data: Any) -> None:
        """The framework has loaded; `data` is the trainer's position now."""
        self._was_equal = self._is_equal(data)

    def gather(self) -> bool:
        """Whether every rank begins with the batch that followed the save; each must call this right before the first step."""
        with self._contained("batches"):
            self.batches.settle()
        self._own = own = next(attempt(NAME, "M4", self._compare), None)
        if own is not None and own.error:
            self._failed(f"check of {NAME}", own.error)
        rank, equal = self._ranks.rank, own is not None and own.outcome is Outcome.EQUAL
        report = {"rank": rank, "record": fresh_id(), "equal": equal}
        if own is not None and self._strays:
            report["strays"] = (f" (first batch of rank {rank}): " if rank else ": ") + own.cause[:MOST_WORDS]
        reports = self._ranks.gather(report)
        self._stray_words = next((str(report["strays"]) for report in reports if report.get("strays")), "")
        self.record_id = str(reports[0]["record"])
        return all(report.get("equal") for report in reports)

    def begin(self) -> None:
        """The first step is about to be taken: from here on the record is written."""
        self._resumes = self._start.resumed
        with self._contained("batches"):
            self.batches.settle()
            self._has_begun = True
            rank, start = self._ranks.rank, self._start.start_step or 0
            if self.record_id and rank < NUM_RANKS:
                self._record.begin(self.record_id, rank, start_step=start, parent=self._parent(), launch=self._journal.launch)

    def check(self, data: Any) -> list[Check]:
        """The position that the trainer reports, and this rank's first batch as `gather` found it."""
        checks = [] if self._was_equal or self._is_equal(data) else [self._wrong_position(data)]
        own = self._own or next(iter(self._compare()), None)  # none: a load that was found only now, by the journal
        if own is None:
            return checks
        if own.outcome is Outcome.NOT_COMPARED and not checks and self._saved_position() is not None:
            return [compared("data position", "M4", True, expected="as saved", found="equal", where="data_state()")]
        return [*checks, replace(own, where=f"first batch of rank {self._ranks.rank}")]

    def _compare(self) -> list[Check]:
        """This rank's first batch against the record; empty where nothing is to be compared."""
        self.batches.settle()
        expectation, rank = self._start.expectation, self._ranks.rank
        if expectation is None or expectation.basis == "none" or self._may_differ(expectation) or rank >= NUM_RANKS:
            return []
        position, paths = self._parent(), self._journal.paths
        if self._first is None:
            return [not_compared(NAME, "M4", NOT_SEEN)]
        if position is None or paths is None:
            return [not_compared(NAME, "M4", NO_POSITION)]
        before = read_first_pass(paths.batches_dir, position, rank)
        if before is None:
            return [not_compared(NAME, "M4", f"the record of the first pass is not in `{paths.batches_dir}`")]
        self._full = max(before.pass_lengths(), default=0)
        if before.followed == self._first:
            self._expect(before)
            return [compared(NAME, "M4", True, expected=f"{self._first:016x}", found="equal")]
        other = OtherBatch(before, self._first)
        self._strays = other.is_astray
        memory = self._start.memory
        beside = rank if memory is not None and memory.of_rank(rank) is None else None
        return [other.check(exactly=self._options.same_data, continues=self.continues, beside=beside)]

    def _expect(self, before: FirstPass) -> None:
        """Follow the batches that came after the first one in the first pass."""
        rest = before.entries[before.position + 1 :][:NUM_FOLLOWED]
        begun = before.step(before.position)
        self._followed.expected.extend((int(digest), int(step) - begun) for digest, step, _ in rest.tolist())
        for digest, step in self._followed.early:  # further micro-batches of the first step
            self._follow(digest, step)
        self._followed.early.clear()

    def _parent(self) -> Position | None:
        """The position in the first pass that the loaded checkpoint carries."""
        memory = self._start.memory
        own = None if memory is None else memory.of_rank(self._ranks.rank) or next(iter(memory.ranks), None)
        return None if own is None else Position.parse(own.batches)

    def _may_be_split(self) -> bool:
        """Whether steps may hold another number of batches: it was accepted, or a rollback changed it."""
        expectation = self._start.expectation
        named = ("accumulation", "global_batch", "world_size")
        return expectation is None or expectation.contract is not None or any(map(expectation.accepts, named))

    def _may_differ(self, expectation: Expectation) -> bool:
        return expectation.accepts("data") or (expectation.contract is not None and expectation.contract.moves_data)

    def _saved_position(self) -> Any:
        """The position that the trainer reported at the save; None where it reports none."""
        return None if self._options.data_state is None or self._start.memory is None else self._start.memory.data

    def _is_equal(self, data: Any) -> bool:
        expectation, saved = self._start.expectation, self._saved_position()
        if expectation is None or saved is None or self._may_differ(expectation):
            return True
        return _plain(saved) == _plain(data)

    def _wrong_position(self, data: Any) -> Check:
        return failed(
            "data position",
            "M4",
            expected=str(self._saved_position())[:160],
            found=str(data)[:160],
            where="data_state()",
            cause="the data position was not restored: samples would be repeated or left out",
        )


def _finish(reference: "weakref.ref[DataWatch]") -> None:
    watch = reference()
    if watch is not None:
        watch.finish()


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)


# ---- the record of this launch -----------------------------------------------------------------------------------------


class BatchRecord:
    """The record of this launch and rank. Nothing is written before the first optimizer step, and then each batch at once."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._fd = -1
        self.record = ""
        self.num_seen = 0
        self._early: list[tuple[int, int, int]] = []  # batches before the first step
        self._first = 0  # index of the first batch that is kept in the file

    def position_after(self, num_waiting: int) -> str:
        """What a checkpoint saved now carries, with batches that are still to be added; "" when nothing is recorded."""
        return "" if self._path is None else str(Position(self.record, self.num_seen + num_waiting))

    def add(self, digest: int, step: int, place: int) -> None:
        """One batch, which the optimizer step `step` will use; 0: the launch's first."""
        self.num_seen += 1
        if self._directory is None:
            return
        if self._path is not None:
            if self.num_seen - self._first > MAX_BATCHES:
                self._drop_old(self._path)
            os.write(self._fd, ENTRY.pack(digest, step, place))
        elif self.num_seen > MAX_UNBEGUN:
            self._directory, self._early = None, []  # no optimizer step was ever seen
        else:
            self._early.append((digest, step, place))

    def begin(self, record: str, rank: int, *, start_step: int, parent: Position | None, launch: int | None) -> None:
        """The first step is about to be taken from `start_step`; the launch went on from `parent`. `record`: the new id."""
        if self._directory is None or self._path is not None:
            return
        self.record, path = record, self._directory / f"{record}.{rank}"
        header = {"v": VERSION, "first": 0, "start_step": start_step, "parent": str(parent or ""), "launch": launch}
        early = [ENTRY.pack(digest, step or start_step + 1, place) for digest, step, place in self._early]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_header(header) + b"".join(early))
        self._early = []
        self._open(path)

    def _open(self, path: Path) -> None:
        self._path, self._fd = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def is_removed(self) -> bool:
        """Whether somebody removed the directory that it is written to."""
        return self._path is not None and not self._path.parent.exists()

    def _drop_old(self, path: Path) -> None:
        """Keep the newer half."""
        header, entries = read_record(path)
        half = len(entries) // 2
        self._first = header["first"] + half
        write_atomic(path, _header({**header, "first": self._first}) + entries[half:].tobytes(), durable=False)
        self._close()
        self._open(path)


def _header(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"
