"""One check: two values compared, the likely cause of a difference, the table a person reads and the exception.

A check has one of four outcomes. Only `DIFFERENT` refuses. A value that could not be compared is `NOT_COMPARED`: it refuses
nothing, but a resume with such a check is not called verified.

`ResumeRefused` is a `SystemExit`: an uncaught refusal ends the process with code 78 ("do not requeue"), and the table on
stderr replaces a traceback from every rank. It is no `Exception`, because
`try: load_state() except Exception: start_from_scratch()` is one of the accidents the guard exists for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.resume.contract import COMPUTED, Expectation, close_rows, is_close
from chronicle.resume.faults import raised_by_script, reason_of
from chronicle.resume.memory import Memory, Scheduler
from rollback.errors import RollbackError

EXIT_CODE = 78  # EX_CONFIG; schedulers are told not to requeue
SAME = 1e-9  # relative tolerance: the same program on the same state


class Outcome(StrEnum):
    """What a comparison found."""

    EQUAL = "equal"
    NOTED = "noted"  # different, which is allowed; it is said
    NOT_COMPARED = "not compared"  # `cause` says why
    DIFFERENT = "different"  # refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison. `code` is its kind: F1…F10 files, M1…M5 memory, L1…L4 first steps.

    `error` is the guard's own error that prevented the comparison; it is also recorded as a `guard.fault`.
    """

    name: str
    code: str
    outcome: Outcome = Outcome.EQUAL
    expected: str = ""
    found: str = ""
    where: str = ""
    cause: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether training may go on, as far as this check is concerned."""
        return self.outcome is not Outcome.DIFFERENT

    def to_json(self) -> dict[str, Any]:
        """The form written to the journal; empty fields are left out. `ok` is what older versions read."""
        record: dict[str, Any] = {"name": self.name, "code": self.code, "ok": self.ok, "outcome": str(self.outcome)}
        for key in ("expected", "found", "where", "cause"):
            if getattr(self, key):
                record[key] = getattr(self, key)
        return record


class ResumeRefused(SystemExit):
    """Raised before the first step when memory or files are not what was saved or planned."""

    def __init__(self, message: str, remedy: str | None = None, checks: Sequence[Check] = ()) -> None:
        super().__init__(EXIT_CODE)
        self.message = message
        self.remedy = remedy
        self.checks = tuple(checks)
        self.exit_code = EXIT_CODE

    def __str__(self) -> str:
        return self.message


def format_refusal(headline: str, checks: Sequence[Check], remedy: str | None) -> str:
    """The failed checks as one block of text: expected, found, where, and the likely cause."""
    lines = [f"chronicle guard: {headline}"]
    for check in checks:
        if check.ok:
            continue
        lines.append(f"  {check.code:<3} {check.name}")
        for label, text in (
            ("expected", check.expected),
            ("found", check.found),
            ("where", check.where),
            ("likely", check.cause),
        ):
            if text:
                lines.append(f"      {label + ':':<10}{text}")
    if remedy:
        lines.append(f"hint: {remedy}")
    return "\n".join(lines) + "\n"


# ---- comparing two values --------------------------------------------------------------------------------------------


def compared(
    name: str, code: str, ok: bool, *, expected: str = "", found: str = "", where: str = "", cause: str = ""
) -> Check:
    """A check of two values that are equal (`ok`) or must not differ as they do; `cause` is used only then."""
    outcome = Outcome.EQUAL if ok else Outcome.DIFFERENT
    return Check(
        name=name,
        code=code,
        outcome=outcome,
        expected=expected,
        found=found,
        where=where,
        cause="" if ok else cause,
    )


def failed(name: str, code: str, *, expected: str = "", found: str = "", where: str = "", cause: str = "") -> Check:
    """A check that failed."""
    return compared(name, code, False, expected=expected, found=found, where=where, cause=cause)


def noted(name: str, code: str, *, expected: str = "", found: str = "", where: str = "", cause: str = "") -> Check:
    """A difference that is allowed; `cause` says why it is."""
    return Check(
        name=name, code=code, outcome=Outcome.NOTED, expected=expected, found=found, where=where, cause=cause
    )


def not_compared(name: str, code: str, why: str, *, where: str = "", error: str = "") -> Check:
    """A value that could not be compared. `error`: the guard's own error, when that is the reason."""
    return Check(name=name, code=code, outcome=Outcome.NOT_COMPARED, where=where, cause=why, error=error)


def attempt(name: str, code: str, work: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks of `work`; an unexpected error in it ends these checks alone, and the rest is not compared.

    Errors that are raised on purpose (a damaged manifest, an unreadable contract) are not caught: they are findings.
    """
    try:
        yield from work()
    except (ChronicleError, RollbackError):
        raise
    except Exception as problem:
        if raised_by_script(problem):
            raise
        error = reason_of(problem)
        yield not_compared(name, code, f"the check itself failed: {error}", error=error)


def equal(name: str, code: str, expected: Any, found: Any, where: str, cause: str) -> Check:
    """A check that passes when both values are equal; `cause` is used only when they differ."""
    ok = expected == found
    return compared(name, code, ok, expected=_text_of(expected), found=_text_of(found), where=where, cause=cause)


def near(name: str, expected: float, found: float | None, where: str) -> Check:
    """A check that passes when an optimizer setting is equal within `SAME`."""
    ok = found is not None and is_close(expected, found, SAME)
    cause = f"the optimizer's `{name}` was set again after the load, or never restored"
    return compared(name, "M1", ok, expected=f"{expected:.9g}", found=_text_of(found), where=where, cause=cause)


REPLICATED = (None, "replicated", "SingleDeviceStrategy", "DDPStrategy")  # every rank holds the whole state


def other_world(expected: Expectation, found: Memory) -> bool:
    """Whether this launch runs on another number of ranks, and may: accepted, or the same samples a step in another split."""
    memory = expected.memory
    if memory is None or not _worlds_differ(memory, found):
        return False
    return expected.accepts("world_size") or is_other_split(memory, found)


def accepted_world(expected: Expectation, found: Memory) -> bool:
    """Whether a person accepted the other number of ranks of this launch; then its schedule may run at another speed."""
    memory = expected.memory
    return memory is not None and expected.accepts("world_size") and _worlds_differ(memory, found)


def is_other_split(memory: Memory, found: Memory) -> bool:
    """Whether other ranks take the same global batch, hold the whole state each, and step the schedule at the same speed."""
    size = memory.topology.get("global_batch")
    if size is None or size != found.topology.get("global_batch") or is_sharded(memory):
        return False
    whole = all(one.topology.get("sharding") in REPLICATED for one in (memory, found))
    return whole and [one.unit for one in memory.schedulers] == [one.unit for one in found.schedulers]


def _worlds_differ(memory: Memory, found: Memory) -> bool:
    return bool(memory.topology.get("world_size") != found.topology.get("world_size"))


def is_sharded(memory: Memory) -> bool:
    """Whether the ranks hold different optimizer moments."""
    return len({digest.moments for digest in memory.ranks}) > 1


def show_row(row: Sequence[float | None]) -> str:
    """One LR per parameter group as text, cut after six groups."""
    shown = ", ".join("none" if lr is None else f"{lr:.9g}" for lr in row[:6])
    return f"{shown}, … ({len(row)} groups)" if len(row) > 6 else shown


def _text_of(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 160 else text[:157] + "…"


# ---- likely causes ---------------------------------------------------------------------------------------------------
# Signatures from the catalogue of silent resume failures. Where none fits, the text says only what was observed.


def lr_cause(expected: Expectation, found: Memory, lrs: Sequence[float | None], own: Sequence[float | None]) -> str:
    """Why the LRs of the groups (`own`) are not the expected ones (`lrs`)."""
    if not own:
        return "no optimizer is known to the guard: load after prepare()"
    if len(own) != len(lrs):
        return "the number of parameter groups changed"
    restarted = _restarted_scheduler(expected.memory, found.schedulers)
    if restarted:
        return restarted
    contract = expected.contract
    ratio = contract.lr_ratio if contract is not None else None
    if contract is not None and ratio and close_rows((tuple(lr and lr * ratio for lr in own),), (tuple(lrs),), COMPUTED):
        return f"the LR of rollback {contract.rollback} did not reach memory: the script set the old one again"
    if all(lr == 0 for lr in own):
        return "LR is zero: the warm-up starts again"
    return "the optimizer's groups were not restored, or something set their LR after the load"


def forecast_cause(expected: Expectation, found: Memory) -> str:
    """Why the LRs of the next steps differ although the present ones may not."""
    restarted = _restarted_scheduler(expected.memory, found.schedulers)
    if restarted:
        return restarted
    if expected.memory and [s.unit for s in expected.memory.schedulers] != [s.unit for s in found.schedulers]:
        return "the scheduler advances at a different speed: the number of processes changed"
    return "the schedule differs from the one at the save: other arguments (warm-up, horizon), class, or bound optimizer"


def _restarted_scheduler(memory: Memory | None, schedulers: Sequence[Scheduler]) -> str:
    saved = memory.schedulers if memory else ()
    if saved and not schedulers:
        return "the scheduler is not prepared or registered in this launch: its saved state was not loaded"
    for index, own in enumerate(schedulers):
        if own.last_epoch == 0 and (index >= len(saved) or saved[index].last_epoch):
            return f"scheduler {index} ({own.name}) was not restored: it is at its beginning and would warm up again"
    return ""


def position_cause(saved: Scheduler, own: Scheduler) -> str:
    """Why a scheduler's `last_epoch` differs."""
    if not own.last_epoch:
        return "the scheduler was not restored: it is at its beginning"
    if not saved.last_epoch:
        return "the scheduler was stepped during the load"
    for factor in (2, 3, 4, 8, 16):
        if own.last_epoch in (saved.last_epoch * factor, saved.last_epoch // factor):
            return f"off by a factor of {factor}: stepped twice, or counted in another number of processes"
    if abs(own.last_epoch - saved.last_epoch) <= saved.unit:
        return "stepped once too often or once too few around the save or the load"
    return "state of another step was loaded"


def step_cause(found: Memory) -> str:
    """Why the trainer's step counter differs."""
    if not found.step:
        return "the step counter was not restored: training would start from zero"
    return "state of another step was loaded, or the counter is not in optimizer steps"


def moment_cause(norm: float | None) -> str:
    """Why the norm of a group's first moments differs."""
    if norm is None or norm == 0:
        return "the optimizer state was not restored: its moments are empty"
    return "moments of another step, or of other parameters"


def weights_cause(memory: Memory, own: str) -> str:
    """Why the digest of the weights differs."""
    for name, digest in memory.averages.items():
        if own and digest == own:
            return f"these are the averaged weights `{name}`, not the weights that were trained"
    return "the model was not restored, or changed after the load"


def moments_cause(memory: Memory, own: str, rank: int) -> str:
    """Why the digest of a rank's optimizer moments differs."""
    for digest in memory.ranks:
        if digest.rank != rank and own and digest.moments == own:
            return f"this rank holds the optimizer shard of rank {digest.rank}"
    return "the optimizer state was not restored, or belongs to other parameters"


def rng_cause(memory: Memory, own: Mapping[str, str], rank: int) -> str:
    """Why a rank's random generators differ."""
    for digest in memory.ranks:
        if digest.rank != rank and digest.rng.get("torch") == own.get("torch"):
            return f"this rank holds the generators of rank {digest.rank}"
    return "the random state was not restored: its file was skipped silently (missing, unreadable or of another world size)"
