"""The journal as the guard uses it: what it reads before a first step, and what it writes. Neither ever stops training.

Only the main process writes, except for errors of the guard itself, which every rank records. A journal that cannot be read or
written (full disk, no run directory, permissions) is reported once on stderr and training goes on. The state itself is
protected by the checkpoint's manifest, not by the journal.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from chronicle.checkpoints import NO_STATES, KnownStates, known_states
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.journal.events import (
    GUARDED_SAVES,
    CheckpointSaved,
    EntryKind,
    FileDigest,
    GuardVerdict,
    Incident,
    JournalEvent,
    RunFork,
    StateSaved,
    find_open_transaction,
)
from chronicle.journal.place import Standing, look
from chronicle.journal.writer import fresh_id, id_milliseconds, new_id
from chronicle.paths import RunPaths

# as a verdict notes it: training goes on in a process that has trained these weights; the second one by a new optimizer
TRAINED_ON = {"name": "resume", "why": "this process trained these weights before, and trains on with them"}
RENEWED = {**TRAINED_ON, "why": f"{TRAINED_ON['why']}, by an optimizer that begins anew"}
# and where another model begins in it: the next fold, the next seed
FURTHER = {"name": "resume", "why": "nothing was loaded: this launch trained another model before, and begins a further one"}
PROPOSE = "propose"  # the tier of an incident that does not end by itself

@dataclass(frozen=True, slots=True, kw_only=True)
class TakenState:
    """A state that a plain loop wrote: what shows that its weights were loaded, and that its optimizer was left behind."""

    step: int | None
    optimizers: tuple[str, ...]  # classes
    renewed: bool = False  # the launch that wrote it went on with a new optimizer


# incidents of which single steps are known that went wrong
OF_STEPS = frozenset(("instant-spike", "nan", "weights-not-finite", "replicas-differ", "step-differs"))


@dataclass(slots=True, kw_only=True)
class GuardHistory:
    """What the journal knows that a first step depends on; `fold_history` fills it."""

    checkpoints: list[tuple[int | None, str]] = field(default_factory=list)  # (step, path) as saved; "": path not known
    open_intent: str | None = None  # id of a transaction that was neither finished nor reverted
    fulfilled: set[str] = field(default_factory=set)  # rollbacks whose contract a launch fulfilled
    kept: list[tuple[int, str]] = field(default_factory=list)  # (step, path) of those that the weights now descend from
    digests: dict[str, str] = field(default_factory=dict)  # path of a checkpoint that is one file -> SHA-256
    related: set[str] = field(default_factory=set)  # ids of runs that this one was copied from, or declared a fork of
    states: KnownStates = NO_STATES  # of checkpoints that were saved without a guard
    taken: dict[str, TakenState] = field(default_factory=dict)  # digest of the weights -> the newest state with them
    saved_by: int | None = None  # the launch that saved last
    has_trained: bool = False  # a launch before this one took its first step
    further: bool = False  # since the last save a further training was begun, of which nothing is saved
    incidents: dict[str, tuple[int | None, Incident]] = field(default_factory=dict)  # (launch, how it stands), in `OF_STEPS`

    def incident_at(self, launch: int | None, step: int) -> Incident | None:
        """The incident that this step of a launch belongs to; what the step did is then no measure for another one."""
        for its, one in self.incidents.values():
            first = one.onset_step if one.onset_low_step is None else one.onset_low_step
            last = one.recovered_step if one.recovered_step is not None or one.tier == PROPOSE else one.peak_step
            if its == launch and first is not None and first <= step and (last is None or step <= last):
                return one
        return None

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint the journal knows."""
        return self.checkpoints[-1][0] if self.checkpoints else None


class GuardJournal:
    """Journal of one run for one process. `run_dir` None means: no journal, nothing is recorded."""

    def __init__(
        self, run_dir: Path | None, *, launch: int | None = None, rank: Callable[[], int] = lambda: 0
    ) -> None:
        self.paths = None if run_dir is None else RunPaths(run_dir)
        self.launch = launch
        self._rank = rank
        self._writer: JournalWriter | None = None
        self._run_id: str | None = None
        self._said: set[str] = set()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank()

    def _is_main(self) -> bool:
        return self._rank() == 0

    @property
    def run_id(self) -> str:
        """Id of the run; "" when there is no run directory, or it is a copy that nobody has claimed."""
        if self.paths is None:
            return ""
        if self._run_id is None:
            try:
                place, standing = look(self.paths)
                if place is None:
                    place = JournalWriter(self.paths).place
                self._run_id = place.run_id if standing in (Standing.HERE, Standing.MOVED) else ""
            except (ChronicleError, OSError, ValueError) as problem:
                self.say("run-id", f"the run's id could not be read ({problem}); checkpoints are saved without identity")
                self._run_id = ""
        return self._run_id

    def new_identity(self, step: int | None, shared: str = "") -> dict[str, Any]:
        """What a checkpoint saved now carries: an id of its own, run, launch and step; empty without a run.

        `shared`: an id that all ranks of this training agreed on. One state is of all ranks, and a save has no collective: so
        every rank makes the same id of it.
        """
        if not self.run_id or self.paths is None:
            return {}
        known = id_milliseconds(shared) if shared else None
        own = fresh_id()
        if known is not None:
            own = new_id(known, int.from_bytes(sha256(f"{shared} {step}".encode()).digest()[:10], "big"))
        return {"id": own, "run_id": self.run_id, "run": self.paths.run, "launch": self.launch, "step": step}

    def write(
        self,
        event: JournalEvent,
        *,
        step: int | None,
        title: str,
        refs: Iterable[str] = (),
        from_any_rank: bool = False,
    ) -> str | None:
        """Append one entry if there is a run and this is the main process, and return its id; never raises."""
        if self.paths is None or not (from_any_rank or self._is_main()):
            return None
        try:
            if self._writer is None:
                self._writer = JournalWriter(self.paths)
            if isinstance(event, CheckpointSaved) and event.path:
                self._writer.add_root(Path(event.path).parent)
            return self._writer.write(event, step=step, launch=self.launch, title=title, refs=tuple(refs)).id
        except (ChronicleError, OSError, ValueError) as problem:
            self.say("journal", f"the journal could not be written ({problem}); training continues")
            return None

    def tell(
        self,
        kind: str,
        text: str,
        *,
        step: int | None,
        tier: str = "warn",
        low: int | None = None,
        seen: int | None = None,
        since: str = "",
        said: str = "",
        more: str = "",
        from_any_rank: bool = False,
    ) -> None:
        """Write an incident that began at `step`, and say it once. `said`: the line in other words, `more`: what to do.

        `low`: the first step at which it may have begun, `seen`: that at which it was seen, `since`: these in words.
        """
        title = f"{tier}: {kind}{since}: {text}"
        event = Incident(
            kind=kind,
            tier=tier,
            status="open",
            onset_step=step,
            onset_low_step=low,
            alarm_step=step if seen is None else seen,
            channels=("guard",),
            launch=self.launch,
            change="opened",
            text=text,
        )
        self.write(event, step=step, title=title, from_any_rank=from_any_rank)
        self.say(f"{kind} {text}", (said or title) + (f"; {more}" if more else ""))

    def read(self) -> GuardHistory:
        """Fold the journal; one that cannot be read is reported and counts as empty."""
        if self.paths is None or not self.paths.journal_dir.is_dir():
            return GuardHistory()
        try:
            return fold_history(read_journal(self.paths).entries)
        except (ChronicleError, OSError) as problem:
            self.say("journal-read", f"the journal could not be read ({problem})")
            return GuardHistory()

    def say(self, topic: str, text: str) -> None:
        """Print one line to stderr, once per topic."""
        if topic not in self._said:
            self._said.add(topic)
            print(f"chronicle guard: {text}", file=sys.stderr, flush=True)


def fold_history(entries: Sequence[Entry]) -> GuardHistory:
    """Fold the entries of a run into what a first step depends on. Pure."""
    known = GuardHistory(states=known_states(entries))
    saves: dict[str, str] = {}
    newest = ""  # weights of the newest save, where it is one of them
    for entry in entries:
        if entry.kind in GUARDED_SAVES:
            path = (StateSaved if entry.kind == EntryKind.GUARD_SAVED else CheckpointSaved).of(entry).path
            known.checkpoints.append((entry.step, path))
            saves[path] = entry.id
            known.digests.pop(path, None)
            if entry.step is not None and path:
                known.kept.append((entry.step, path))
            newest, known.saved_by, known.further = "", entry.launch, False
            if entry.kind == EntryKind.GUARD_SAVED and (state := StateSaved.of(entry)).weights:
                newest = state.weights
                known.taken[newest] = TakenState(step=entry.step, optimizers=tuple(map(str, state.optimizers or ())))
        elif entry.kind == EntryKind.GUARD_DIGEST:
            digest = FileDigest.of(entry)
            if entry.refs and saves.get(digest.path) == entry.refs[0]:
                known.digests[digest.path] = digest.sha256
        elif entry.kind == EntryKind.GUARD_VERDICT:
            verdict = GuardVerdict.of(entry)
            if verdict.verdict == "refused":
                continue
            known.has_trained = True
            known.further = known.further or FURTHER in verdict.noted
            if newest and RENEWED in verdict.noted:
                known.taken[newest] = replace(known.taken[newest], renewed=True)
            if verdict.contract:
                known.fulfilled.add(verdict.contract)
            if entry.step is not None:  # this launch goes on from here: what was saved later is no ancestor of it
                known.kept = [(step, path) for step, path in known.kept if step <= entry.step]
        elif entry.kind == EntryKind.INCIDENT and (incident := Incident.of(entry)).kind in OF_STEPS:
            first = next((ref for ref in entry.refs if ref in known.incidents), entry.id)  # written again as it develops
            known.incidents[first] = entry.launch, incident
        elif entry.kind == EntryKind.RUN_FORK:
            known.related.add(str(RunFork.of(entry).parent.get("run_id")))
    intent = find_open_transaction(entries)
    known.open_intent = None if intent is None else intent.id
    return known


def find_run_dir(
    given: str | os.PathLike[str] | None, environ: Mapping[str, str], cwd: Path
) -> tuple[Path | None, str]:
    """The run directory and where it came from; None (with the reason) when it is not clear which run is meant.

    `given` may be a path, or the bare name of a run, which is in the logs directory of the settings.
    """
    if given is not None and (os.sep in os.fspath(given) or Path(given).is_dir()):
        return Path(given).absolute(), "argument"
    if given is None and environ.get("CHRONICLE_RUN_DIR"):
        return Path(environ["CHRONICLE_RUN_DIR"]), "CHRONICLE_RUN_DIR"
    from chronicle.settings import load_settings

    try:
        return load_settings(cwd, environ, run=None if given is None else os.fspath(given)).paths.run_dir, "settings"
    except ChronicleError as problem:
        return None, str(problem)
