"""Every kind of journal entry as a typed value, with its fields; and the sets of kinds.

One frozen class per kind; `EntryKind` lists the kinds. `read` gives the value of an `Entry`, `JournalWriter.write` writes one.
An unknown kind is read as `UnknownKind` with all of its data, so that views can show it. How fields, versions and the JSON
form work is in `chronicle.journal.typed`; who writes or reads entries imports all from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self, TypeVar

from chronicle.journal.entries import Entry
from chronicle.journal.typed import EVENTS as EVENTS
from chronicle.journal.typed import NOTHING as NOTHING
from chronicle.journal.typed import Items, Record, Records, Texts
from chronicle.journal.typed import JournalEvent as JournalEvent


class EntryKind(StrEnum):
    """What an entry is about, as written in its field `kind`."""

    RUN_INIT = "run.init"
    IMPORT = "import"
    LAUNCH_START = "launch.start"
    LAUNCH_STEP = "launch.step"
    LAUNCH_SETTINGS = "launch.settings"
    LAUNCH_ATTEMPT = "launch.attempt"
    LAUNCH_END = "launch.end"
    RESTART = "restart"
    PREFLIGHT = "preflight"
    PLAN = "plan"
    RUN_PLACE = "run.place"
    RUN_FORK = "run.fork"
    GUARD_ATTACHED = "guard.attached"
    GUARD_VERDICT = "guard.verdict"
    GUARD_SAVED = "guard.saved"
    GUARD_DIGEST = "guard.digest"
    GUARD_LOG = "guard.log"
    GUARD_FAULT = "guard.fault"
    GUARD_FIRST_BATCH = "guard.first_batch"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_SEEN = "checkpoint.seen"
    VERIFIED = "verified"
    QUARANTINE = "quarantine"
    QUARANTINE_UNDONE = "quarantine.undone"
    PRUNE = "prune"
    INCIDENT = "incident"
    PROPOSAL = "proposal"
    REPLAY = "replay"
    RETAKEN = "retaken"
    REHEARSAL = "rehearsal"
    AUTOPILOT = "autopilot"
    ROLLBACK_INTENT = "rollback.intent"
    ROLLBACK_RECEIPT = "rollback.receipt"
    UNDO_INTENT = "undo.intent"
    UNDO_RECEIPT = "undo.receipt"
    RECOVER_RECEIPT = "recover.receipt"
    NOTE = "note"
    AMEND = "amend"
    CLOSE = "close"
    CLAIM = "claim"
    HARDWARE = "hardware"
    SWEEP = "sweep"
    EVIDENCE = "evidence"
    DATA_START = "data.start"
    DATA_RATIO = "data.ratio"
    DATA_OBSERVED = "data.observed"
    GATE = "gate"
    GROWTH = "growth"
    EXPORT = "export"
    EXPERIMENT_REGISTER = "experiment.register"
    EXPERIMENT_LAUNCH = "experiment.launch"
    EXPERIMENT_LEG = "experiment.leg"
    EXPERIMENT_STOP = "experiment.stop"
    EXPERIMENT_REPORT = "experiment.report"


class EndCause(StrEnum):
    """Why a launch ended (`launch.end`, field `cause`; docs/launching.md says from what it follows)."""

    FINISHED = "finished"
    ENDED = "ended"  # with code 0; whether steps are left is not known
    EARLY = "ended early"
    STOPPED = "stopped by a person"
    PROPOSAL = "proposal"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NODE_LOST = "node lost"
    OUT_OF_MEMORY = "out of memory"
    HANG = "hang"
    CRASH = "crash"
    REFUSED = "refused"
    DISK_FULL = "disk full"
    UNKNOWN = "unknown"


# Of several nodes, the one that says most about the launch: what others report is often only that a peer was gone.
TELLING = (
    EndCause.REFUSED, EndCause.OUT_OF_MEMORY, EndCause.DISK_FULL, EndCause.NODE_LOST, EndCause.TIME_LIMIT, EndCause.PREEMPTED,
    EndCause.PROPOSAL, EndCause.STOPPED, EndCause.HANG, EndCause.CRASH, EndCause.UNKNOWN, EndCause.EARLY,
    EndCause.ENDED, EndCause.FINISHED,
)  # fmt: skip


def is_more_telling(cause: str | None, than: str | None) -> bool:
    """Whether this cause of a node's end says more about the launch than that one; none recorded says nothing."""
    return cause in TELLING and (than not in TELLING or TELLING.index(EndCause(cause)) < TELLING.index(EndCause(than)))


INTENTS = frozenset((EntryKind.ROLLBACK_INTENT, EntryKind.UNDO_INTENT))  # a transaction begins
RECEIPTS = frozenset((EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT, EntryKind.RECOVER_RECEIPT))  # one is over
LAUNCHES = frozenset(
    (EntryKind.LAUNCH_START, EntryKind.LAUNCH_STEP, EntryKind.LAUNCH_END, EntryKind.GUARD_ATTACHED, EntryKind.GUARD_VERDICT)
)  # say where a launch was
GUARDED_SAVES = frozenset(
    (EntryKind.CHECKPOINT, EntryKind.GUARD_SAVED)
)  # the second where the guard only saw the optimizer's state

# Which receipts end which intent: recovery ends either, an undo does not end a rollback that is still open.
CLOSED_BY: Mapping[str, frozenset[str]] = {
    EntryKind.ROLLBACK_INTENT: frozenset((EntryKind.ROLLBACK_RECEIPT, EntryKind.RECOVER_RECEIPT)),
    EntryKind.UNDO_INTENT: frozenset((EntryKind.UNDO_RECEIPT, EntryKind.RECOVER_RECEIPT)),
}


class Words(JournalEvent):
    """What a person said: seen, suspected, done, expected, learnt."""

    text: str = ""
    symptom: str = ""
    suspects: Records = ()  # cause, claim, test, verdict
    action: Record | None = None  # verb, changes
    expect: str = ""
    rule: str = ""
    hosts: Texts = ()
    tags: Texts = ()
    evidence: Items = ()  # attached files
    outcome: Any = None
    agent: Record | None = None  # who asked through `chronicle mcp`, for what, and what it had looked at
    import_: Record | None = None  # where it stood in an older chronicle


class UnknownKind(Words):
    """An entry of a kind that this program does not know: written by a newer one, or imported. Views show it."""

    __slots__ = ()

    @classmethod
    def from_json(cls, data: Record) -> Self:
        """The entry's data as it is: nothing is known of its versions."""
        return cls.view(data)


class Overriding(JournalEvent):
    """What a person overrode: a launch that seemed alive, or a damaged journal."""

    force: str | None = None  # why
    overrode: Texts = ()  # the damage of the journal


# --- launches ----------------------------------------------------------------------------------------------------------


class RunInit(JournalEvent, kind=EntryKind.RUN_INIT):
    """The journal was created (`chronicle init`)."""

    checkpoints: str | None
    run_id: str = ""


class RunPlace(JournalEvent, kind=EntryKind.RUN_PLACE):
    """Where the run lies from here on: first written with its id, again whenever its directory has moved."""

    run_id: str
    host: str = ""
    path: str = ""  # of the run directory, absolute: a remark
    checkpoints: str = ""  # the checkpoint root, absolute: a remark
    copied: bool = False  # its inodes are new: a person said that it is the run itself


class RunFork(JournalEvent, kind=EntryKind.RUN_FORK):
    """The run began from a checkpoint of another one, or from a copy of it; earlier entries are the parent's."""

    run_id: str
    parent: Record = NOTHING  # run_id, run, step, launch, path of the parent
    copied: bool = False  # the parent's journal was copied with it


class ImportedSource(JournalEvent, kind=EntryKind.IMPORT):
    """An older journal, table or log was imported; its digest prevents a second import."""

    path: str
    sha256: str
    format: str
    points: int | None


class LaunchStart(Overriding, kind=EntryKind.LAUNCH_START):
    """A launch begins on one node; a launch over several nodes has one such entry per node."""

    argv: Texts = ()
    cwd: str = ""
    git_commit: str | None = None
    git_dirty_digest: str | None = None
    code_patch: Record = NOTHING  # sha256, bytes, files, hidden: the uncommitted changes as an object; or `why` not
    env_digest: str | None = None
    environment: Record = NOTHING
    host: str = ""
    pid: int | None = None
    start_ticks: int | None = None
    boot_id: str = ""
    uid: int | None = None
    python: str = ""
    fresh: str | None = None  # why it begins from scratch although the checkpoints of earlier launches are gone
    part: str | None = None
    preflight: Record = NOTHING  # check -> verdict of the quick preflight
    skipped: Texts = ()
    accept_change: str | None = None  # why a changed plan is accepted
    journal_heads: Record = NOTHING  # writer -> first digits of the digest of its last line
    token: str | None = None
    containment: str | None = None
    grace_seconds: float | None = None
    cgroup: str | None = None
    lease: bool = False  # the supervisor holds the lock of `heartbeats/<host>.lease` while it lives
    base_lr: float | None = None
    start_step: int | None = None
    chain: str | None = None  # the unattended launches that follow one another: one SLURM job, or one `chronicle run`
    handed: Record = NOTHING  # path and step of the checkpoint that the launch was told to resume from
    imported: bool = False
    segment: str | None = None


class LaunchStep(JournalEvent, kind=EntryKind.LAUNCH_STEP):
    """The step at which a launch without a guard started, taken from its log."""

    start_step: int | None
    inferred: bool = False


class LaunchSettings(JournalEvent, kind=EntryKind.LAUNCH_SETTINGS):
    """Settings of a launch, all that are known from one source; a later entry of the same source replaces an earlier one."""

    values: Record
    source: str = ""  # "the script" (`chronicle.config`), "TrainingArguments", …


class LaunchAttempt(JournalEvent, kind=EntryKind.LAUNCH_ATTEMPT):
    """The launcher has started its ranks again within one launch (`torchrun --max-restarts`): why the last attempt ended."""

    host: str = ""
    attempt: int | None = None  # the one that begins; torchrun's restart count
    began: float | None = None  # seconds since the epoch, by the start of its first process
    cause: str | None = None  # an `EndCause`, of the attempt before it
    because: str = ""


class LaunchEnd(JournalEvent, kind=EntryKind.LAUNCH_END):
    """A launch ended on one node."""

    host: str | None = None
    exit_code: int | None = None
    signal: Any = None  # its name, or a number in imported journals
    cause: str | None = None  # an `EndCause`; None in journals of earlier versions
    because: str = ""  # what was seen of it
    last_step: int | None = None
    duration_seconds: float | None = None
    launcher_code: int | None = None
    stopped_by: str | None = None
    stop_signal: str | None = None
    ended_processes: Record = NOTHING
    first_to_end: Record | None = None
    tail: Texts = ()
    tail_of: str = ""
    log_bytes_lost: int | None = None
    metrics_from: str | None = None
    proposal: str | None = None
    start_step: int | None = None
    sealed: Records = ()  # path, bytes, sha256 of what the launch wrote
    inferred: bool = False  # written later, because the supervisor was gone
    imported: bool = False
    attempts: Records = ()  # of `torchrun --max-restarts`: attempt, first_step, last_step as logged
    rhythm: Record = NOTHING  # how long it was usually silent between two steps, and what the next launch may expect


class Restarted(JournalEvent, kind=EntryKind.RESTART):
    """After a launch: whether the run goes on by itself. `Onward` of `chronicle.launch.restarts`."""

    decision: str  # "again", "again in a new job", "stop", "finished", "ended"
    cause: str = ""  # of the launch's end
    reason: str = ""
    restarts: int | None = None  # how many were used, this one included
    budget: int | None = None
    pause_seconds: float | None = None
    progress: bool | None = None  # whether the launch left a newer verified checkpoint; None: not looked for
    step: int | None = None  # of the newest verified checkpoint


class SealedParts(JournalEvent, kind=EntryKind.EVIDENCE):
    """A log was rotated: the digest of the finished part."""

    sealed: Records


class Swept(JournalEvent, kind=EntryKind.SWEEP):
    """Orphans of earlier launches were ended (`chronicle ps --sweep`)."""

    orphans: Records
    killed: Any
    left: Items


class Preflight(JournalEvent, kind=EntryKind.PREFLIGHT):
    """What the preflight inside the ranks found."""

    verdict: str
    checks: Records
    facts: Record


class PlanDeclared(JournalEvent, kind=EntryKind.PLAN):
    """The plan of the run was declared or changed: what later launches are compared with."""

    declared: Record
    reason: str | None


# --- the guard ---------------------------------------------------------------------------------------------------------


class GuardAttached(JournalEvent, kind=EntryKind.GUARD_ATTACHED):
    """The launch is guarded: its first optimizer step is preceded by a `guard.verdict`."""

    run_id: str = ""


class GuardVerdict(JournalEvent, kind=EntryKind.GUARD_VERDICT):
    """What the guard found before the first step: `passed`, `unverified`, `warned`, `refused` or `off`.

    `unverified`: nothing differed, but not everything that matters was compared; `not_compared` says what and why.
    """

    verdict: str
    moment: str = ""
    mode: str = ""
    basis: str = ""
    verified: bool | None = None  # None: nothing was loaded, so there was nothing to verify
    checks: Records
    noted: Records = ()  # name and why: different, and allowed
    not_compared: Records = ()  # name and why
    checkpoint: str | None = None  # the directory or file that was loaded
    run_id: str = ""
    loaded: Record = NOTHING  # identity of what was loaded: id, run_id, run, launch, step
    contract: str | None = None  # the rollback whose contract this launch met
    accepted: Record = NOTHING
    fresh_start: bool = False
    carried: Records = ()
    start_step: int | None = None
    attempt: int | None = None  # how often torchrun had started the ranks again; None for the first time

    @property
    def words(self) -> str:
        """The verdict for a person: one that lacks some comparisons has passed in the others, unless other data came."""
        if self.verdict != "unverified":
            return self.verdict
        differs = self.basis == "none" or any(one in self.noted for one in self.not_compared)
        if differs or not any(one.get("outcome") == "equal" for one in self.checks):
            return "not verified"
        return "passed, not compared"


class StateSaved(JournalEvent, kind=EntryKind.GUARD_SAVED):
    """The guard of a plain loop saw the optimizer's state being taken; where it was saved is not known."""

    step: int | None
    identity: str = ""
    path: str = ""
    honours: Any = None
    spoilt: str = ""
    weights: str = ""  # digest of them, as in a manifest
    state: str = ""  # digest of the optimizer's state (`rollback.checkpoint.state_digest`)
    run_id: str = ""
    optimizers: Any = None  # their classes


class FileDigest(JournalEvent, kind=EntryKind.GUARD_DIGEST):
    """The digest of a checkpoint that is one file, computed in the background after the save."""

    path: str
    sha256: str
    crc32: Any


class GuardFault(JournalEvent, kind=EntryKind.GUARD_FAULT):
    """An error of the guard itself: it stayed out of the way, and the launch is unverified from this step on."""

    where: str  # what the guard was doing: save, load, first step, step, thread, exit, …
    error: str
    trace: Texts = ()  # file:line of the innermost frames
    rank: int | None = None


class FirstBatchSeen(Words, kind=EntryKind.GUARD_FIRST_BATCH):
    """The first batch of a launch in words (`text`), before its first step."""

    batch: Record = NOTHING  # shares, lengths, and rows as parts that are masked, trained or padding
    findings: Records = ()  # name, text
    revisions: Record = NOTHING  # digests of tokenizer and chat template, commit of the model


class LogVerdict(JournalEvent, kind=EntryKind.GUARD_LOG):
    """What the first logged steps after a restart say."""

    verdict: str
    moment: str
    basis: str
    rows: int | None
    checks: Records


# --- checkpoints -------------------------------------------------------------------------------------------------------


class CheckpointSaved(JournalEvent, kind=EntryKind.CHECKPOINT):
    """A checkpoint was saved; the entry's `step` and `launch` say when."""

    path: str
    identity: str = ""  # the id that the checkpoint itself carries
    step: int | None = None
    save_seconds: float | None = None
    honours: Any = None  # what the trainer said that it carries out; None = it said nothing
    digests: str | None = None  # "pending": a `guard.digest` entry follows
    spoilt: str = ""  # why it is no target of a rollback: NaN in the weights, replicas that differ


class CheckpointSeen(JournalEvent, kind=EntryKind.CHECKPOINT_SEEN):
    """A launch left a checkpoint without an identity: while it has this stamp, the entry names its run, launch and step."""

    path: str
    stamp: str
    run_id: str
    replaces: str = ""  # the id in its manifest, which an earlier save left behind


class Verified(JournalEvent, kind=EntryKind.VERIFIED):
    """What `chronicle verify` found; valid while the checkpoint's files have the sizes, times and inodes of the stamp."""

    path: str
    stamp: str
    full: bool
    passes: bool
    files: int | None
    bytes: int | None
    errors: Items  # (check, path, message) of the first few
    num_errors: int | None


class Quarantined(JournalEvent, kind=EntryKind.QUARANTINE):
    """Strays, or saves that were cut, are moved out of the checkpoints."""

    root: str
    moves: Records
    pointers: Records = ()  # that named one of them: path, before, after, is_link


class QuarantineUndone(JournalEvent, kind=EntryKind.QUARANTINE_UNDONE):
    """Strays of an earlier quarantine (the entry's `refs`) are moved back."""

    root: str


class Pruned(Overriding, kind=EntryKind.PRUNE):
    """Abandoned checkpoints and originals that no undo needs are deleted."""

    changed: bool
    deleted: Texts
    kept: Records
    objects: Texts
    bytes: int | None
    root: str


# --- events and proposals ----------------------------------------------------------------------------------------------


class Incident(Words, kind=EntryKind.INCIDENT):
    """Something went wrong: a detector's event (written again as it develops) or a person's note."""

    id: int | None = None  # the detector's number, one per launch
    kind: str = ""  # the detector's class: instant-spike, gradual-divergence, …
    tier: str = ""
    status: str = ""
    onset_step: int | None = None
    onset_low_step: int | None = None
    onset_row: int | None = None
    onset_low_row: int | None = None
    alarm_step: int | None = None
    alarm_row: int | None = None
    peak_step: int | None = None
    peak_row: int | None = None
    recovered_step: int | None = None
    recovered_row: int | None = None
    channels: Texts = ()
    cluster: int | None = None
    launch: int | None = None
    excess: float | None = None
    sigmas: float | None = None
    interval: float | None = None
    change: str = ""  # opened, changed, closed


class Proposed(JournalEvent, kind=EntryKind.PROPOSAL):
    """A rollback is proposed; `command` None: no checkpoint can be named."""

    events: Items = ()
    cluster: int | None = None
    onset_step: int | None = None
    onset_low_step: int | None = None
    before_step: int | None = None
    target_step: int | None = None
    target_launch: int | None = None
    action: str | None = None
    lr_scale: float | None = None
    cost_steps: int | None = None
    cost_hours: float | None = None
    alternatives: Records = ()
    reasons: Texts = ()
    exhausted: Texts = ()
    command: str | None = None
    by_hand: str = ""  # what a person must change too, because the command cannot
    withdrawn: bool = False


class Replayed(JournalEvent, kind=EntryKind.REPLAY):
    """Recorded steps were taken again in a sandbox and compared print by print; nothing of the run was changed."""

    verdict: str  # as in `chronicle.replay.verdict`
    why: str = ""
    evidence: Texts = ()
    until: int | None = None
    start: int | None = None  # steps completed where the replay began
    checkpoint: str | None = None
    identity: Record = NOTHING  # of that checkpoint, as it carries it
    compared: int | None = None  # steps
    parts: Texts = ()  # of a step that were compared
    replays: int | None = None
    seconds: float | None = None


class StepsRetaken(JournalEvent, kind=EntryKind.RETAKEN):
    """A launch took steps that an earlier one had taken from the same state: their prints, compared rank by rank."""

    verdict: str  # as in `chronicle.prints.retaken`
    why: str = ""
    earlier: int | None = None  # the launch that took them first
    start: int | None = None  # steps completed where both began
    first: int | None = None  # the first and the last step that were compared
    last: int | None = None
    ranks: int | None = None  # of which steps were compared
    parts: Texts = ()  # that were compared in each step of every rank
    apart_step: int | None = None
    apart_part: str = ""
    apart_ranks: Items = ()
    hosts: Record = NOTHING  # of these ranks: rank -> host then, host now
    rise: int | None = None  # onset of an incident of the earlier launch in these steps
    came_again: bool | None = None  # None: nobody can tell
    changed: Texts = ()  # since that launch


class Rehearsed(JournalEvent, kind=EntryKind.REHEARSAL):
    """A script was killed and resumed in scratch directories, and compared with the same script undisturbed."""

    verdict: str  # as in `chronicle.rehearse.judge`
    command: Texts = ()  # with `{out}` and the other places as they were typed
    resume: Texts = ()
    signal: str = ""
    at: int | None = None
    to: int | None = None
    findings: Texts = ()
    not_compared: Texts = ()
    leaves: int | None = None  # values in files that were compared
    logged_values: int | None = None
    git_commit: str | None = None
    git_dirty_digest: str | None = None
    env_digest: str | None = None
    ranks: int | None = None  # of the undisturbed launches
    seconds: float | None = None


def is_of(event: Rehearsed, command: Sequence[str]) -> bool:
    """Whether this is the command of a rehearsal, whatever stands where its `{out}`, `{name}` and `{port}` stood."""
    for words in (event.command, event.resume):
        if len(words) == len(command) and None not in map(filled_with, words, command):
            return True
    return False


def filled_with(pattern: str, word: str) -> Mapping[str, str] | None:
    """What stands where a word of a rehearsed command has its places; None where it is another word."""
    parts = re.split(r"\{(out|name|port|checkpoint)\}", pattern)
    found = re.fullmatch("(.*)".join(map(re.escape, parts[::2])), word, re.DOTALL)
    return None if found is None else dict(zip(parts[1::2], found.groups(), strict=True))


class Autopilot(JournalEvent, kind=EntryKind.AUTOPILOT):
    """What the autopilot decided after a launch."""

    step: str  # land, roll-back, undo, halt
    reason: str
    command: Texts


# --- transactions ------------------------------------------------------------------------------------------------------


class RollbackFacts(JournalEvent):
    """What was asked of a rollback and what follows from it, the same in its intent and its receipt."""

    step: int | None = None
    launch: int | None = None
    parent_launch: int | None = None  # named by the person: beats inference
    identity: Record = NOTHING  # of the target, as it carries it or by its stamp: id, run_id, run, launch, step
    plan: str | None = None  # digest of the plan
    lr_ratio: float | None = None
    sets: Record = NOTHING  # fields set by hand
    base_lr_before: float | None = None
    base_lr_after: float | None = None
    lrs: Items = ()
    accept_unproved: str = ""  # why the LR was edited although its effect was not proved
    edited_fields: int | None = None
    lost_steps: int | None = None
    lost_hours: float | None = None
    warmup_steps: int | None = None
    skip_batches: int | None = None
    reshuffle: bool = False
    experiment: Any = None
    imported: bool = False
    root: str = ""  # the directory of the checkpoints, or its URL
    entry: str = ""  # name of the target in it
    store: Record = NOTHING  # in an object store: the new prefix, the pointer, what it said and says


class Intent(Overriding):
    """What a transaction writes beside the checkpoints, for its recovery."""

    contract_path: str | None = None
    config_paths: Texts = ()
    parent_attributes: Any = None


class RollbackIntent(RollbackFacts, Intent, kind=EntryKind.ROLLBACK_INTENT):
    """A rollback begins. From here on until its receipt no launch starts and no checkpoint is loaded."""



class RollbackReceipt(RollbackFacts, kind=EntryKind.ROLLBACK_RECEIPT):
    """A rollback was done: what was asked, what was changed, and all that its undo needs.

    `files`, `patched`, `pointers`, `copies`, `configs`, `contract`, `directories` and `attributes` are forms of the
    package `rollback`, which writes and reads them. Receipts of imported journals have only what was asked.
    """

    intent: str | None = None
    source: str = ""  # where the target lay: in `root`, or among abandoned checkpoints
    displaced: bool = False
    files: Records = ()
    patched: Records = ()
    directories: Items = ()
    abandoned: Texts = ()
    abandoned_dir: str = ""
    pointers: Records = ()
    copies: Records = ()
    configs: Records = ()
    contract: Record | None = None
    remaining: Texts = ()
    attributes: Record = NOTHING
    stamp: str = ""  # of the target from now on, where its identity is known by its stamp alone


class UndoFacts(JournalEvent):
    """Which rollback is undone, the same in the intent and the receipt of its undo."""

    undoes: str = ""
    undoes_intent: str = ""
    step: int | None = None
    root: str = ""
    entry: str = ""


class UndoIntent(UndoFacts, Intent, kind=EntryKind.UNDO_INTENT):
    """The undo of a rollback begins."""

    store: Record = NOTHING


class UndoReceipt(UndoFacts, kind=EntryKind.UNDO_RECEIPT):
    """A rollback was taken back; the entry's `refs` name its receipt."""

    intent: str | None = None
    returned: Texts = ()
    abandoned: Texts = ()
    abandoned_dir: str = ""
    restored: Texts = ()
    identity: Record = NOTHING  # of the checkpoint whose bytes were restored
    stamp: str = ""


class RecoverReceipt(JournalEvent, kind=EntryKind.RECOVER_RECEIPT):
    """An unfinished transaction was finished (`receipt` names the receipt) or reverted."""

    intent: str | None
    outcome: str
    receipt: str | None = None
    cause: str | None = None


# --- people ------------------------------------------------------------------------------------------------------------


class Note(Words, kind=EntryKind.NOTE):
    """A person's note."""

    untags: Texts = ()  # tags that the run no longer has
    archived: bool | None = None  # whether lists leave the run out from now on


class Amendment(Words, kind=EntryKind.AMEND):
    """A correction of an earlier entry (`refs`): its fields replace those of the entry."""


class Close(JournalEvent, kind=EntryKind.CLOSE):
    """What came of an incident, a rollback or a note (`refs`)."""

    outcome: str
    text: str = ""
    rule: str = ""


class Claim(JournalEvent, kind=EntryKind.CLAIM):
    """A sentence about the run, the fields that state its numbers, and what the evidence says of each.

    Claims of before claims had fields have `statements` that were parsed from the sentence.
    """

    text: str
    verdict: str
    statements: Records
    fields: Record = NOTHING
    not_judged: Texts = ()
    journal_heads: Record = NOTHING


class Hardware(JournalEvent, kind=EntryKind.HARDWARE):
    """A hardware event out of a kernel log, or a node excluded from or readmitted to the run (`action`)."""

    event: str = ""
    host: str | None = None
    device: Any = None
    time: str | None = None
    xid: int | None = None
    text: str = ""
    serious: bool | None = None
    line: str = ""
    key: str | None = None
    action: str | None = None
    reason: str = ""
    tags: Texts = ()


# --- data --------------------------------------------------------------------------------------------------------------


class DataStart(JournalEvent, kind=EntryKind.DATA_START):
    """The data plan of a launch and where it starts to read."""

    first_step: int | None
    plan: Record
    plan_hash: str
    segments: Any


class DataRatio(JournalEvent, kind=EntryKind.DATA_RATIO):
    """The observed mixture of sources differs from the planned one; the title says how."""


class DataObserved(JournalEvent, kind=EntryKind.DATA_OBSERVED):
    """What a launch read, observed in its loader; the title says it."""


# --- the built-in trainer ----------------------------------------------------------------------------------------------


class Gate(JournalEvent, kind=EntryKind.GATE):
    """The quality gate changed its state; the other fields are the smoothed measures by name."""

    state: str


class Growth(JournalEvent, kind=EntryKind.GROWTH):
    """The model was grown during the run."""

    kind: str  # depth or width
    before: int | None
    after: int | None


class Exported(JournalEvent, kind=EntryKind.EXPORT):
    """Exported models, each with its size and held-out loss."""

    rows: Records


# --- studies -----------------------------------------------------------------------------------------------------------


class StudyRegistered(JournalEvent, kind=EntryKind.EXPERIMENT_REGISTER):
    """A study's plan, written before its first launch."""

    study: str
    profile: str
    plan_hash: str
    plan: Record


class StudyLaunch(JournalEvent, kind=EntryKind.EXPERIMENT_LAUNCH):
    """A launch of a study begins."""

    run: str
    arm: str
    seed: int | None
    leg: int | None


class StudyLeg(JournalEvent, kind=EntryKind.EXPERIMENT_LEG):
    """A launch of a study is done; its first such entry counts."""

    run: str
    arm: str
    seed: int | None
    leg: int | None
    launch: int | None
    guard: str | None
    result: Record


class StudyStop(JournalEvent, kind=EntryKind.EXPERIMENT_STOP):
    """A run of a study is given up."""

    run: str
    arm: str = ""
    seed: int | None = None
    leg: int | None = None
    reason: str


class StudyReport(JournalEvent, kind=EntryKind.EXPERIMENT_REPORT):
    """A study was reported: verdicts and digests of the files written."""

    plan_hash: str
    study: str
    profile: str
    checkpoint: str | None
    seeds: Items
    verdicts: Record
    stopped: Record
    arms: Items
    questions: Records
    evidence: Records
    files: Record
    confounders: Texts = ()  # of imported studies
    base: str = ""


# --- reading -----------------------------------------------------------------------------------------------------------

E = TypeVar("E", bound=JournalEvent)


def read(entry: Entry) -> JournalEvent:
    """The value of an entry; `UnknownKind` for an unknown kind. Raises `JournalError` for an unknown version."""
    return EVENTS.get(entry.kind, UnknownKind).of(entry)


def words_of(entry: Entry) -> Words:
    """The words in an entry of any kind: imported entries have them under kinds of their own."""
    return Words.view(entry.data)


def events_of(entries: Iterable[Entry], event: type[E]) -> Iterator[tuple[Entry, E]]:
    """The entries of one kind, each with its value, in their order."""
    kind = str(event.KIND)  # not the enum, whose comparison is slower
    return ((entry, event.of(entry)) for entry in entries if entry.kind == kind)


def find_open_transaction(entries: Iterable[Entry]) -> Entry | None:
    """The oldest intent of a rollback or undo that no receipt answers; None when no transaction is open.

    A receipt answers the intent that its data names; receipts of older and imported journals, which name none there, answer
    those that they refer to. A rollback is answered by its receipt or a recovery, an undo by its own receipt or a recovery.
    The order of the entries does not matter: hosts' clocks differ. Raises `JournalError` where a receipt's version is
    unknown, because then it is not known which transaction it closes.
    """
    intents: list[Entry] = []
    answered: dict[str, set[str]] = {}
    for entry in entries:
        if entry.kind in INTENTS:
            intents.append(entry)
        elif entry.kind in RECEIPTS:
            for intent in intents_closed_by(entry):
                answered.setdefault(intent, set()).add(entry.kind)
    return next((one for one in intents if not CLOSED_BY[one.kind] & answered.get(one.id, set())), None)


def intents_closed_by(receipt: Entry) -> tuple[str, ...]:
    """Ids of the intents that a receipt names."""
    event = read(receipt)
    named = event.intent if isinstance(event, RollbackReceipt | UndoReceipt | RecoverReceipt) else None
    return receipt.refs if named is None else (named,)
