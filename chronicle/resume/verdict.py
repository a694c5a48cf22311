"""The verdict of the checks: exchanged between ranks, printed, recorded in the journal, and raised on every rank.

The main process prints and writes. When the guard itself fails at a check, that value was not compared: the resume is not
refused, and not called verified either. A damaged manifest or an unreadable contract is a finding, and refuses.
Saves use no collective, because a script may save on the main process alone. At a save every rank puts its digest into the
process group's key-value store, and the main process collects what is there. At a load and at a first step each rank
gathers at most a kilobyte from every other.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import GuardVerdict
from chronicle.metrics.log import attempt_of
from chronicle.resume.checks.check import Check, Outcome, ResumeRefused, attempt, failed, format_refusal, not_compared
from chronicle.resume.contract import Expectation, Mode, Options
from chronicle.resume.faults import Faults
from chronicle.resume.journal import GuardJournal
from chronicle.resume.memory import Carried, Memory, RankDigest
from chronicle.resume.rules import RULES
from rollback.errors import RollbackError

MAX_REPORT_BYTES = 1024
LET_GO_SECONDS = 1.0
MOST_NAME = 40  # characters
NUM_UNKNOWN = 3  # names that a rank's report holds of what it could not compare
NO_BASIS = "it carries no description of its memory: saved without the guard, copied without its manifest, or never sealed"


@dataclass(slots=True)
class StartingPoint:
    """How this launch began, or how it went on after its latest load, as far as it is known by now."""

    expectation: Expectation | None = None
    loaded_from: Path | None = None  # the checkpoint
    identity: Mapping[str, Any] = field(default_factory=dict)  # of the state that was loaded, as it carries it itself
    state_loaded: bool = False  # a plain loop loaded an optimizer state: there is no directory
    start_step: int | None = None  # optimizer steps completed when the first step of this launch began
    carried: tuple[Carried, ...] = ()  # options of rollbacks that the guard applies in this launch
    no_basis: str = ""  # why there is nothing to compare with, where that is known
    again: bool = False  # this process had trained before: a reload, or a second call of `fit` or `train`

    def learn(self, **known: Any) -> None:
        """More is known by now: fields by their names. Every holder of this object sees it."""
        for name, value in known.items():
            setattr(self, name, value)

    def adopt(self, other: "StartingPoint") -> None:
        """Begin anew as `other` says."""
        self.learn(**{part.name: getattr(other, part.name) for part in fields(self)})

    @property
    def resumed(self) -> bool:
        """Whether anything was loaded, as far as the guard saw."""
        return self.loaded_from is not None or self.state_loaded

    @property
    def memory(self) -> Memory | None:
        """Memory of the save that was loaded, where it is known."""
        return self.expectation.memory if self.expectation else None

    @property
    def place(self) -> str:
        """What was loaded, in words."""
        if self.loaded_from is not None:
            return f"`{self.loaded_from}`"
        if not self.state_loaded:
            return "nothing was loaded"
        step, launch = self.identity.get("step"), self.identity.get("launch")
        by = "" if launch is None else f" by launch {launch}"
        return "the state that was loaded" if step is None else f"the state that was loaded (saved at step {step}{by})"


class Verdicts:
    """Gives the verdicts of one process; `refusal` is the one that was raised, if any."""

    def __init__(
        self, ranks: "Ranks", journal: GuardJournal, options: Options, start: StartingPoint, faults: Faults
    ) -> None:
        self._ranks, self._journal, self._options, self._start = ranks, journal, options, start
        self._faults = faults
        self._remarks: dict[str, Check] = {}  # name -> what was noted or not compared since the last load
        self._of_others: dict[str, Check] = {}  # name -> what another rank did not compare
        self.refusal: ResumeRefused | None = None

    def opens(self) -> None:
        """A load begins: what was said about an earlier one no longer counts."""
        self._remarks.clear()
        self._of_others.clear()

    def decide(self, checks: Sequence[Check], moment: str, root: Path | None) -> None:
        """Exchange with the other ranks (each must call this); refuse everywhere when anything failed anywhere."""
        self._remember(checks, moment)
        reports = self.exchange(checks)
        for report in reports:
            for name, why in report.get("unknown", ()) if report["rank"] != self._ranks.rank else ():
                where = f"rank {report['rank']}"
                self._of_others.setdefault(str(name), not_compared(str(name), "M1", str(why), where=where))
        own = [check for check in checks if not check.ok]
        others = [r for r in reports if (r["failed"] or r.get("more")) and r["rank"] != self._ranks.rank]
        if own or others:
            self.refuse([*own, *(check for r in others for check in _from_report(r, own))], moment, root)

    def exchange(self, checks: Sequence[Check]) -> list[dict[str, Any]]:
        """Send this rank's failures to all ranks, and return the reports of all."""
        bad = [[c.name, c.code, c.expected[:60], c.found[:60], c.where[:40], c.cause[:90]] for c in checks if not c.ok]
        unknown = [[c.name[:MOST_NAME], c.cause[:100]] for c in checks if _is_open(c)][:NUM_UNKNOWN]
        report: dict[str, Any] = {"rank": self._ranks.rank, "failed": bad}
        return self._ranks.gather({**report, "unknown": unknown} if unknown else report)

    def refuse(self, bad: Sequence[Check], moment: str, root: Path | None, *, local: bool = False) -> None:
        """Print the table, record it, and raise unless the mode is `warn`.

        The main process prints; a `local` refusal, of which no other rank knows, is printed by this rank.
        """
        warned = self._options.mode is Mode.WARN
        place = f"`{root}`" if root is not None else self._start.place
        headline = f"{'warning, allowed by CHRONICLE_GUARD=warn' if warned else 'resume refused'} {moment}: {place}"
        remedy = None if warned else _remedy(bad)
        with self._faults.contained("verdict"):
            if self._ranks.rank == 0 or local:
                sys.stderr.write(format_refusal(headline, bad, remedy))
                sys.stderr.flush()
            word = "warned" if warned else "refused"
            self._record(word, bad, moment, f"guard: {word} {moment}")
        if not warned:
            first = bad[0] if bad else failed("another rank", "M1", found="a mismatch")
            text = f"{headline}: {first.name}: expected {first.expected or 'otherwise'}, found {first.found}"
            self.refusal = ResumeRefused(text, remedy, bad)
            raise self.refusal

    def conclude(self, checks: Sequence[Check], moment: str) -> None:
        """Nothing differs: say what was compared and what was not, on stderr and in the journal."""
        self._remember(checks, moment)
        unknown, noted = self._not_compared(), self._noted()
        event = self._event("unverified" if unknown else "passed", checks, moment)
        if self._ranks.rank == 0:
            if unknown:
                listed = ", ".join(f"{one['name']} ({one['why']})" for one in unknown)
                self._journal.say(f"unverified {listed}", f"{event.words}: {listed}")
            for one in (one for one in noted if one not in unknown):
                self._journal.say(f"noted {one}", f"noted: {one['name']}: {one['why']}")
        names = ", ".join(one["name"] for one in unknown)
        self._write(event, f"guard: {event.words}: {names}" if unknown else f"guard: passed {moment}")

    def switched_off(self, moment: str) -> None:
        """Record that the guard is off in this launch."""
        self._record("off", (), moment, f"guard: off {moment}")

    def recall(self, checks: Sequence[Check]) -> None:
        """What a load could not compare; a check that the first step makes of it says so."""
        for check in checks:
            if check.outcome is Outcome.NOT_COMPARED:
                self._remarks.setdefault(check.name, check)

    def _remember(self, checks: Sequence[Check], moment: str) -> None:
        for check in checks:
            if check.error:
                self._faults.record(f"check of {check.name} {moment}", check.error)
            if check.outcome in (Outcome.NOTED, Outcome.NOT_COMPARED):
                self._remarks[check.name] = check
            else:
                self._remarks.pop(check.name, None)

    def _not_compared(self) -> list[dict[str, str]]:
        """What matters and was not compared, with the reason; empty when the launch is verified."""
        own = {check.name[:MOST_NAME]: check for check in self._remarks.values() if _is_open(check)}
        found = [_remark(check) for check in {**self._of_others, **own}.values()]
        if self._start.resumed and self._basis() == "none":
            found.insert(0, {"name": "memory", "why": f"{self._start.place}: {self._start.no_basis or NO_BASIS}"})
        known = {one["name"] for one in found}
        for where, error in self._faults.found:
            name = where.removeprefix("check of ").partition(" before ")[0].partition(" after ")[0]
            if name not in known:
                known.add(name)
                found.append({"name": name, "why": f"the guard failed: {error}"})
        return found

    def _noted(self) -> list[dict[str, str]]:
        return [_remark(c) for c in self._remarks.values() if c.outcome is Outcome.NOTED]

    def _basis(self) -> str:
        expectation = self._start.expectation
        return expectation.basis if expectation else ("none" if self._start.resumed else "fresh")

    def _record(self, verdict: str, checks: Sequence[Check], moment: str, title: str) -> None:
        self._write(self._event(verdict, checks, moment), title)

    def _event(self, verdict: str, checks: Sequence[Check], moment: str) -> GuardVerdict:
        expectation = self._start.expectation
        contract = expectation.contract if expectation else None
        unknown = self._not_compared()
        return GuardVerdict(
            verdict=verdict,
            moment=moment,
            mode=str(self._options.mode),
            basis=self._basis(),
            verified=verdict == "passed" if self._start.resumed or verdict != "passed" else None,
            checks=tuple(check.to_json() for check in checks),
            noted=tuple(self._noted()),
            not_compared=tuple(unknown),
            checkpoint=None if self._start.loaded_from is None else str(self._start.loaded_from),
            run_id=self._journal.run_id,
            loaded=dict(self._start.identity),
            contract=None if contract is None else contract.rollback,
            accepted=dict(expectation.accepted) if expectation else {},
            fresh_start=self._options.fresh_start,
            carried=tuple(asdict(one) for one in self._start.carried),
            attempt=attempt_of(os.environ) or None,
        )

    def _write(self, event: GuardVerdict, title: str) -> None:
        """Write one `guard.verdict` entry (main process only)."""
        step, memory = self._start.start_step, self._start.memory
        self._journal.write(event, step=memory.step if step is None and memory else step, title=title)


def run_checks(name: str, work: Callable[[], Iterable[Check]], *, at_stake: bool = True) -> list[Check]:
    """The checks of `work`. An error in it leaves `name` not compared, and refuses nothing.

    A damaged manifest or an unreadable contract is a finding and fails, if there is a resume `at_stake`.
    """
    checks: list[Check] = []
    try:
        checks.extend(attempt(name, "M1", work))
    except (ChronicleError, RollbackError) as problem:
        if at_stake:
            expected, cause = "a state that can be verified", problem.remedy or ""
            checks.append(failed("guard", "M1", expected=expected, found=problem.message, cause=cause))
        else:
            checks.append(not_compared(name, "M1", problem.message))
    return checks


def _is_open(check: Check) -> bool:
    """Whether it was not compared. Other data than recorded are allowed by default, but are not those that were recorded."""
    return check.outcome is Outcome.NOT_COMPARED or (check.outcome is Outcome.NOTED and check.code == "M4")


def _remark(check: Check) -> dict[str, str]:
    place = f" ({check.where})" if check.where.startswith("rank ") else ""
    return {"name": check.name + place, "why": check.cause or check.found}


def _from_report(report: Mapping[str, Any], own: Sequence[Check]) -> list[Check]:
    """Failures of another rank that this rank does not have itself."""
    names = {check.name for check in own}
    where = f"rank {report['rank']}"
    checks = [
        failed(name, code, expected=expected, found=found, where=f"{where}: {place}", cause=cause)
        for name, code, expected, found, place, cause in report["failed"]
        if name not in names
    ]
    if report.get("more"):
        checks.append(failed("more checks", "M1", found=f"{report['more']} further mismatches", where=where))
    return checks


def _remedy(bad: Sequence[Check]) -> str:
    names = {check.name for check in bad}
    if "resume" in names:
        return "load a checkpoint before training; or set CHRONICLE_FRESH_START=1, or CHRONICLE_RUN=NAME for another run"
    if "open transaction" in names:
        return "`chronicle recover` finishes or reverts it"
    rows = [RULES.get(check.name) for check in bad]
    accepted = [check.accepted or (row.accepted if row else "") for check, row in zip(bad, rows, strict=True)]
    listed = "; ".join(f"{name}: why" for name in dict.fromkeys(accepted) if name)
    intended = f'if it is intended, CHRONICLE_ACCEPT_CHANGE="{listed}" accepts exactly this; ' if all(accepted) and bad else ""
    return (
        "restore what differs, or resume from a verified checkpoint (`chronicle verify`); "
        f"{intended}CHRONICLE_GUARD=warn continues anyway and records it"
    )


# ---- exchange between ranks ------------------------------------------------------------------------------------------


class Ranks:
    """The process group as it is right now; a single process when there is none."""

    def __init__(self) -> None:
        self._saves: dict[str, int] = {}

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(_group().get_rank()) if _group() else 0

    @property
    def world_size(self) -> int:
        """Number of ranks, as the process group itself says."""
        return int(_group().get_world_size()) if _group() else 1

    def gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's report, in rank order; every rank must call this. A report over 1 KB is cut and says so."""
        if self.world_size == 1:
            return [report]
        if "cpu:gloo" in str(_group().get_backend_config()):
            return _gather_on_gloo(shorten_report(report), self.world_size)
        reports: list[Any] = [None] * self.world_size
        _group().all_gather_object(reports, shorten_report(report))
        return reports

    def publish(self, topic: str, digest: RankDigest) -> str:
        """Store this rank's digest for the main process; returns the key prefix of this save."""
        count = self._saves[topic] = self._saves.get(topic, 0) + 1
        prefix = f"chronicle/{topic}/{count}"
        store = _store()
        if store is not None and self.world_size > 1:
            store.set(f"{prefix}/{self.rank}", json.dumps(digest.to_json(), separators=(",", ":")))
        return prefix

    def collect(self, prefix: str, own: RankDigest, deadline: Callable[[], float]) -> tuple[RankDigest, ...]:
        """The digests under `prefix` of all ranks that published before the (monotonic) deadline, `own` included."""
        digests = {own.rank: own}
        store = _store()
        if store is None:
            return (own,)
        missing = [rank for rank in range(self.world_size) if rank not in digests]
        while missing:
            # `check` returns at once; `wait` would block the training's own use of the store
            for rank in [rank for rank in missing if store.check([f"{prefix}/{rank}"])]:
                digests[rank] = RankDigest.from_json(json.loads(store.get(f"{prefix}/{rank}")))
                store.delete_key(f"{prefix}/{rank}")
                missing.remove(rank)
            if not missing or time.monotonic() > deadline():
                break
            time.sleep(0.005)
        return tuple(digests[rank] for rank in sorted(digests))


def shorten_report(report: dict[str, Any]) -> dict[str, Any]:
    """The report within `MAX_REPORT_BYTES` of JSON; entries are dropped from the end of its list `failed`."""
    if _size(report) <= MAX_REPORT_BYTES:
        return report
    failures: Sequence[Any] = report.get("failed", ())
    for count in range(len(failures) - 1, -1, -1):
        shorter = {**report, "failed": list(failures[:count]), "more": len(failures) - count}
        if _size(shorter) <= MAX_REPORT_BYTES:
            return shorter
    return {"rank": report.get("rank"), "failed": [], "more": len(failures)}


def _gather_on_gloo(report: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """As `all_gather_object`, and back only when gloo's thread has let go of the tensors (at most `LET_GO_SECONDS` later).

    That thread needs the GIL for it. When the interpreter ends meanwhile, as it does after a refusal, CPython before 3.14 ends
    the thread inside torch's C++, and the process is aborted (-6) where its exit code should have said 78.
    """
    import torch

    mine = torch.frombuffer(bytearray(_packed(report).ljust(MAX_REPORT_BYTES)), dtype=torch.uint8)
    tensors = [mine, *(torch.empty_like(mine) for _ in range(world_size))]
    before = _count_references(tensors)
    _group().all_gather(tensors[1:], mine)
    deadline = time.monotonic() + LET_GO_SECONDS
    while _count_references(tensors) != before and time.monotonic() < deadline:
        time.sleep(0.001)
    return [json.loads(bytes(tensor.tolist())) for tensor in tensors[1:]]


def _count_references(tensors: Sequence[Any]) -> list[int]:
    """Of each tensor's Python object. torch since 2.10 holds one more while a tensor is held in C++ as well."""
    return [sys.getrefcount(tensor) for tensor in tensors]


def _packed(report: dict[str, Any]) -> bytes:
    return json.dumps(report, separators=(",", ":"), default=str).encode()


def _size(report: dict[str, Any]) -> int:
    return len(_packed(report))


def _group() -> Any:
    """`torch.distributed` when it is initialised, else None; imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _store() -> Any:
    distributed = _group()
    if distributed is None:
        return None
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None
