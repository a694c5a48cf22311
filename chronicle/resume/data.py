"""M4: the data that a launch begins with, against the first pass: what its next batch really is.

Every rank compares its own first batch with the record of the batches that followed the save (`batch_record.py`). Where it is
another one, the whole record is read and says what came: an earlier batch (and how many repeat), a later one (how many are left
out), or one the first pass did not have. That is noted and said in one line; it refuses the resume only where the trainer
promised to go on with exactly the next batch (`same_data=True`), or itself claims to skip what was seen and begins again.

After the first step the next batches are compared as well, and later passes of the loader are counted: one that is as short as
the rest of the resumed epoch was skips batches for ever (StatefulDataLoader with persistent workers, `skip_first_batches`).
"""

import atexit
import json
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from chronicle.journal.events import Incident
from chronicle.journal.writer import fresh_id
from chronicle.resume.batch_record import BatchRecord, FirstPass, Position, read_first_pass, read_recorded_batch
from chronicle.resume.batches import BatchWitness
from chronicle.resume.checks.check import Check, Outcome, attempt, compared, failed, not_compared, noted
from chronicle.resume.contract import Expectation, Mode, Options
from chronicle.resume.journal import GuardJournal
from chronicle.resume.verdict import Ranks, StartingPoint

NAME = "next batch"
NOT_SEEN = (
    "no call of the model was seen before this step: it is called by a method of its own, inside the step (a closure) "
    "or inside a compiled function"
)
NO_POSITION = "the checkpoint does not say how many batches had been seen when it was saved"
NUM_WITHOUT_STEP = 256  # batches; nobody accumulates that many
NO_STEP_SEEN = "no optimizer step was seen (is `optimizer.step` inside `torch.compile`?), so nothing of this launch is compared"
ASKED_AT = (3, 32, 256)  # batches after which it is asked whether steps are taken that nobody sees
NUM_FIRST = 3
NUM_FOLLOWED = 256  # batches after the first one that are compared
NUM_ASTRAY = 3  # in a row that differ, before it is said
NUM_RANKS = 64  # with more ranks only those that find a difference themselves say so


class DataWatch:
    """The data of this launch on one rank."""

    def __init__(
        self,
        options: Options,
        journal: GuardJournal,
        ranks: Ranks,
        start: StartingPoint,
        step: Callable[[], int | None],
        first_batch: Callable[[], None],
        contained: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self._options, self._journal, self._ranks, self._start, self._step = options, journal, ranks, start, step
        self.batches = BatchWitness(self._see, step, first_batch, contained)
        self._record = self._new_record()
        self.record_id = ""  # agreed on by all ranks, anew after every load
        self._contained = contained
        self.told: Callable[[int], None] = lambda digest: None  # of the digest of every batch
        self._was_equal = False
        self._first: int | None = None  # digest of this launch's first batch
        self.first: tuple[str, ...] = ()  # of its first three
        self._early: list[tuple[int, int]] = []  # (digest, step) after the first batch and before the first optimizer step
        # batches of the first pass that should come next, and how many steps after the save each was
        self._expected: deque[tuple[int, int]] = deque()
        self._astray = self._uneven = 0
        self._ahead: int | None = None  # steps before the first of them, here more than in the first pass
        self._passes: list[int] = []  # lengths of the passes that ended in this launch; the first began at the resume
        self._in_pass = 0
        self._full = 0  # batches of a whole pass, as far as the record knows
        self._said: set[str] = set()
        self.strays = ""  # how this launch goes on with another batch, on some rank: `Astray`
        atexit.register(_finish, weakref.ref(self))
        self.failed: Callable[[str, str], None] = lambda where, error: None  # told of errors of the guard itself
        self.look_for_steps: Callable[[bool], None] = lambda surely: None  # whether steps are taken that no hook sees
        self.continues = False  # the trainer itself says that it skips the batches that were seen

    # ---- what enters the model -----------------------------------------------------------------------------------

    @property
    def position(self) -> str:
        """Position in the record that a checkpoint saved now carries."""
        return self._record.position_after(self.batches.num_waiting)

    def after_save(self) -> None:
        """A checkpoint was saved: the batches that follow are written at once."""
        self._record.saved()
        self.batches.after_save()

    def restart(self) -> None:
        """A load inside this process: the next batch is a first one, and what follows belongs to a record of its own."""
        self.finish()
        self._record = self._new_record()
        self.batches.restart()
        self._first, self.first, self.record_id = None, (), ""
        self._early.clear()
        self._expected.clear()
        self._passes.clear()
        self._astray = self._uneven = self._in_pass = 0
        self._ahead, self.strays = None, ""

    def _new_record(self) -> BatchRecord:
        paths, off = self._journal.paths, self._options.mode is Mode.OFF
        return BatchRecord(None if paths is None or off else paths.batches_dir)

    def finish(self) -> None:
        """The process ends: nothing stays in memory, unless the run's directory was removed meanwhile."""
        if self._record.is_removed:
            return
        with self._contained("batches"):
            self.look_for_steps(False)
            self.batches.settle()
            self._record.flush()

    def _see(self, digest: int, place: int, step: int | None) -> None:
        """One batch of the training. `step`: optimizer steps completed before it; None before the first of the launch."""
        self.told(digest)
        if self._first is None:
            self._first = digest
        elif not self._record.begun and step is not None and len(self._early) < NUM_FOLLOWED:
            self._early.append((digest, step))
        if len(self.first) < NUM_FIRST:
            self.first = (*self.first, f"{digest:016x}")
        self._record.add(digest, 0 if step is None else step + 1, place)
        if step is None and self._record.num_seen == NUM_WITHOUT_STEP:
            self._journal.say("no step", f"not verified: {NO_STEP_SEEN}")
        if self._record.num_seen in ASKED_AT:
            self.look_for_steps(self._record.num_seen >= NUM_WITHOUT_STEP)
        if self._start.resumed and step is not None:
            self._follow(digest, step)
            self._count(place, step)
        elif place:
            self._in_pass = place

    def _follow(self, digest: int, step: int) -> None:
        """The batches after the first one. Three in a row that differ are said once, or that belong to other steps."""
        if not self._expected:
            return
        expected, after = self._expected.popleft()
        self._astray = 0 if expected == digest else self._astray + 1
        taken = 0 if self._start.start_step is None else step - self._start.start_step  # None: still the first step
        self._ahead = taken - after if self._ahead is None else self._ahead  # the two may be counted from another step
        after += self._ahead
        self._uneven = self._uneven + 1 if expected == digest and after != taken else 0
        if self._uneven == NUM_ASTRAY and not self._may_be_split():
            first = step + 2 - NUM_ASTRAY
            more = "fewer" if taken < after else "more"
            words = f"the same batches make {more} optimizer steps than in the first pass ({taken} steps here, {after} there)"
            self._breach("per-step", first, f"about step {first}: {words}: each step trains on another number of samples")
        if self._astray == NUM_ASTRAY:
            self._expected.clear()
            first = step + 2 - NUM_ASTRAY
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

    def warn(self, checks: Sequence[Check], step: int, *, fixed_order: bool) -> None:
        """This launch, which is not refused, goes on with another batch that nobody can have meant: an incident, and a line.

        `fixed_order`: the order of every pass is known to depend on nothing but its number.
        """
        found = next((c for c in checks if c.name == NAME and c.outcome is Outcome.NOTED), None)
        if found is None or not (self.strays == ASTRAY or (self.strays and fixed_order)):
            return
        where = "" if found.where.endswith("rank 0") else f" ({found.where})"
        text = f"this launch goes on with other batches than followed this save{where}: {found.cause}"
        way_out = 'same_data=True refuses this; where it is meant, accept "data: why"'
        line = f"warn: data-not-as-recorded since step {step}: other batches than followed the save; {way_out}"
        self._breach("not-as-recorded", step, text, line)

    def _breach(self, kind: str, step: int, text: str, line: str = "") -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._journal.say(f"data {kind}", line or f"data: {text}")
            event = Incident(kind=f"data-{kind}", tier="warn", text=text, onset_step=step)
            self._journal.write(event, step=step, title=f"data: {text}")

    # ---- before the first step -----------------------------------------------------------------------------------

    def loaded(self, data: Any) -> None:
        """The framework has loaded; `data` is the trainer's position now."""
        self._was_equal = self._is_equal(data)

    def gather(self) -> list[tuple[int, Check]]:
        """What every rank finds of its own first batch; each rank must call this right before the first step."""
        with self._contained("batches"):
            self.batches.settle()
        own = next(iter(attempt(NAME, "M4", self._compare)), None)
        if own is not None and own.error:
            self.failed(f"check of {NAME}", own.error)
        packed = None if own is None else [str(own.outcome), own.expected, own.found[:60], own.cause[:240], own.error[:120]]
        report = {"rank": self._ranks.rank, "data": packed, "record": fresh_id()}
        reports = self._ranks.gather({**report, "strays": self.strays} if self.strays else report)
        self.strays = max(str(report.get("strays") or "") for report in reports)
        self.record_id = str(reports[0]["record"])
        return [(int(report["rank"]), _unpack(report["data"], int(report["rank"]))) for report in reports if report.get("data")]

    def begin(self) -> None:
        """The first step is about to be taken: from here on the record is written."""
        with self._contained("batches"):
            self.batches.settle()
            rank, start = self._ranks.rank, self._start.start_step or 0
            if self.record_id and rank < NUM_RANKS:
                self._record.begin(self.record_id, rank, start_step=start, parent=self._parent(), launch=self._journal.launch)

    def check(self, data: Any, found: Sequence[tuple[int, Check]]) -> list[Check]:
        """The position that the trainer reports, and the first batches of all ranks as `gather` found them."""
        checks = [] if self._was_equal or self._is_equal(data) else [self._wrong_position(data)]
        if self._ranks.rank != 0:
            return checks
        found = found or [(0, check) for check in self._compare()]  # a load that was found only now, by the journal
        if not found:
            return checks
        worst = max(found, key=lambda one: WORSE.index(one[1].outcome))[1]
        if worst.outcome is Outcome.NOT_COMPARED and not checks and self._has_position():
            return [compared("data position", "M4", True, expected="as saved", found="equal", where="data_state()")]
        return [*checks, worst]

    def _compare(self) -> list[Check]:
        """This rank's first batch against the record; empty where nothing is to be compared."""
        own = self._compare_first()
        return [] if own is None else [own]

    def _compare_first(self) -> Check | None:
        self.batches.settle()
        expectation = self._start.expectation
        if expectation is None or expectation.basis == "none" or self._may_differ(expectation):
            return None
        position, paths, rank = self._parent(), self._journal.paths, self._ranks.rank
        if rank >= NUM_RANKS:
            return None
        if self._first is None:
            return not_compared(NAME, "M4", NOT_SEEN)
        if position is None or paths is None:
            return not_compared(NAME, "M4", NO_POSITION)
        followed = read_recorded_batch(paths.batches_dir, position, rank)
        if followed != self._first or followed is None:
            before = read_first_pass(paths.batches_dir, position, rank)
            if before is None:
                return not_compared(NAME, "M4", f"the record of the first pass is not in `{paths.batches_dir}`")
            self._full = max(before.pass_lengths(), default=0)
            self.strays = how_astray(before, self._first)
            return compare_first_batch(
                before, self._first, exactly=self._options.same_data, continues=self.continues, beside=self._beside_the_save()
            )
        before = read_first_pass(paths.batches_dir, position, rank)
        if before is not None:
            self._full = max(before.pass_lengths(), default=0)
            rest = before.entries[before.position + 1 :][:NUM_FOLLOWED]
            begun = before.step(before.position)
            self._expected.extend((int(digest), int(step) - begun) for digest, step, _ in rest.tolist())
            for digest, step in self._early:  # further micro-batches of the first step
                self._follow(digest, step)
            self._early.clear()
        return compared(NAME, "M4", True, expected=f"{followed:016x}", found="equal")

    def _beside_the_save(self) -> int | None:
        """This rank, where another one saved alone: it may not have written the batches that followed."""
        memory, rank = self._start.expectation.memory if self._start.expectation else None, self._ranks.rank
        return None if memory is None or memory.of_rank(rank) is not None else rank

    def _parent(self) -> Position | None:
        """The position in the first pass that the loaded checkpoint carries."""
        expectation = self._start.expectation
        if expectation is None or expectation.memory is None:
            return None
        memory = expectation.memory
        own = memory.of_rank(self._ranks.rank) or next(iter(memory.ranks), None)
        return None if own is None else Position.parse(own.batches)

    def _may_be_split(self) -> bool:
        """Whether steps may hold another number of batches: it was accepted, or a rollback changed it."""
        expectation = self._start.expectation
        named = ("accumulation", "global_batch", "world_size")
        return expectation is None or expectation.contract is not None or any(map(expectation.accepts, named))

    def _may_differ(self, expectation: Expectation) -> bool:
        return expectation.accepts("data") or (expectation.contract is not None and expectation.contract.moves_data)

    def _is_equal(self, data: Any) -> bool:
        expectation = self._start.expectation
        if self._options.data_state is None or expectation is None or expectation.memory is None:
            return True
        if expectation.memory.data is None or self._may_differ(expectation):
            return True
        return _plain(expectation.memory.data) == _plain(data)

    def _has_position(self) -> bool:
        """Whether the trainer itself reported its position, at the save and now."""
        memory = self._start.expectation.memory if self._start.expectation else None
        return self._options.data_state is not None and memory is not None and memory.data is not None

    def _wrong_position(self, data: Any) -> Check:
        memory = self._start.expectation.memory if self._start.expectation else None
        return failed(
            "data position",
            "M4",
            expected=str(memory.data if memory else None)[:160],
            found=str(data)[:160],
            where="data_state()",
            cause="the data position was not restored: samples would be repeated or left out",
        )


WORSE = (Outcome.EQUAL, Outcome.NOT_COMPARED, Outcome.NOTED, Outcome.DIFFERENT)


def compare_first_batch(before: FirstPass, first: int, *, exactly: bool, continues: bool, beside: int | None = None) -> Check:
    """What the first batch of a resume is, when it is not known to be the one that followed the save.

    `exactly`: the trainer promised the next batch. `continues`: it claims to skip what was seen. `beside`: this rank, where
    another one saved alone, so that what followed here may never have been written.
    """
    position, num = before.position, len(before.entries)
    same = before.find(first)
    if position >= num:
        return _nothing_followed(before, first, same, exactly=exactly, continues=continues, beside=beside)
    expected = f"the batch of step {before.step(position)}"
    if not same:
        cause = f"the batch is none of the {num} of the first pass: another order, other samples, or another augmentation"
        return _differs(exactly, expected, "an unknown batch", cause + _new_pass(before))
    nearest = min(same, key=lambda index: (abs(index - position), index))
    found = f"the batch of step {before.step(nearest)}"
    if nearest < position:
        cause = _repeats(before, nearest)
        begins = before.begins_data(nearest)
        return _differs(exactly or (continues and begins), expected, found, cause)
    num_left = nearest - position
    left_out = "1 batch of the first pass is" if num_left == 1 else f"{num_left} batches of the first pass are"
    return _differs(exactly, expected, found, f"{left_out} left out; {found} comes first")


ASTRAY, AT_NEW_PASS = "2 astray", "1 at a new pass"  # the worse is the larger


def how_astray(before: FirstPass, first: int) -> str:
    """How sure it is that another batch was not meant; "" for a pass that is begun again, as scripts do on purpose."""
    if before.position >= len(before.entries):
        return ""
    same = before.find(first)
    if not same:  # a new pass may well come in a new order
        return AT_NEW_PASS if before.begins_pass(before.position) else ASTRAY
    nearest = min(same, key=lambda index: (abs(index - before.position), index))
    return ASTRAY if nearest > before.position or not before.begins_data(nearest) else ""


def _nothing_followed(
    before: FirstPass, first: int, same: tuple[int, ...], *, exactly: bool, continues: bool, beside: int | None
) -> Check:
    """Nothing is on record after the save. An earlier batch repeats, unless the data come in the same order in every pass."""
    position = before.position
    digests = before.entries["digest"]
    ends_before = position > len(before.entries)
    regular = ends_before or any(before.begins_data(at) or digests[at - 1] == digests[position - 1] for at in same)
    if same and position and (not regular or continues):
        nearest = max(same)
        found = f"the batch of step {before.step(nearest)}"
        return _differs(exactly or continues, "a batch that has not been seen", found, _repeats(before, nearest))
    if ends_before:
        why = "the record of batches ends before this save"
    elif beside is None:
        why = "the run stopped right at this save, or before the batch that followed was on record"
    else:
        why = f"rank {beside} took no part in this save, and the batch that followed there is not on record"
    if same and position:
        why += f"; this launch begins with the batch of step {before.step(same[0])}"
    return not_compared(NAME, "M4", why)


def _repeats(before: FirstPass, index: int) -> str:
    again = before.position - index
    if before.position < len(before.entries) and before.begins_pass(before.position) and before.begins_data(index):
        return f"this pass of the loader comes in the order of the pass that began at step {before.step(index)}"
    number = "1 batch repeats" if again == 1 else f"{again} batches repeat"
    what = f"the batch of step {before.step(index)} of the first pass comes again: {number}"
    if index == 0:
        return what + "; the data start again from their beginning"
    return what + ("; the pass of the loader starts again" if before.begins_data(index) else "")


def _new_pass(before: FirstPass) -> str:
    return "; the first pass began a new epoch here too" if before.begins_pass(before.position) else ""


def _differs(refused: bool, expected: str, found: str, cause: str) -> Check:
    return (failed if refused else noted)(NAME, "M4", expected=expected, found=found, cause=cause)


def _unpack(packed: Sequence[str], rank: int) -> Check:
    outcome, expected, found, cause, error = packed
    where = f"first batch of rank {rank}"
    return Check(
        name=NAME, code="M4", outcome=Outcome(outcome), expected=expected, found=found, cause=cause, where=where, error=error
    )


def _finish(reference: "weakref.ref[DataWatch]") -> None:
    watch = reference()
    if watch is not None:
        watch.finish()


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)
