"""Whether a run goes on by itself after a launch: a policy by cause, a budget, and progress as a newer verified checkpoint.

    launch ends ── cause ── rule ──┬─ again, here, after a pause     crash, hang, ended early, unknown; disk full with room
                                   ├─ again, in a new job            preempted, time limit, node lost
                                   ├─ stop: a person has to look     out of memory, refused, stopped, proposal
                                   └─ finished, or ended with code 0

The decision belongs to the journal, so that it is the same whoever asks: the loop of `chronicle run --restarts`, the batch
script through `chronicle again`, or the next start of a job that the scheduler requeued by itself. `decide_onward` is pure.
A chain is one SLURM job with all of its restarts, or one `chronicle run`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from chronicle.checkpoints import find_present_roots
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.entries import Entry
from chronicle.journal.events import (
    TELLING,
    EndCause,
    LaunchEnd,
    LaunchStart,
    Restarted,
    events_of,
)
from chronicle.latest import find_latest
from chronicle.launch.admission import (
    NotResumable,
    close_lost_launches,
    hold_admission,
)
from chronicle.launch.ending import NEARLY_FULL_BYTES, free_bytes
from chronicle.launch.handover import BELOW_A_MOUNT_POINT, LOOK, HandedOver, hand_over
from chronicle.launch.keeper import Killed
from chronicle.launch.nodes import Node, Peers, handed_path, shared_number
from chronicle.launch.provenance import host_name
from chronicle.launch.slurm import ask_job, job_of, start_of
from chronicle.settings import Settings
from rollback.disk.durable import is_mount_point, write_atomic
from rollback.errors import RollbackError

if TYPE_CHECKING:
    from chronicle.launch.launching import LaunchResult

LONGEST_PAUSE_SECONDS = 600.0
PATIENCE = 10  # launches in a row without progress, where nothing is wrong with the run


class Verdict(StrEnum):
    """What happens after a launch."""

    HERE = "again"
    NEW_JOB = "again in a new job"
    STOP = "stop"
    FINISHED = "finished"
    ENDED = "ended"  # with code 0; nothing says that steps are left


WELL = (Verdict.FINISHED, Verdict.ENDED)


class RestartRule(NamedTuple):
    """What follows from a cause. `patience`: launches in a row without progress; None: as many as `--crashes` says."""

    verdict: Verdict
    patience: int | None
    why: str


RULES: Mapping[EndCause, RestartRule] = {
    EndCause.FINISHED: RestartRule(Verdict.FINISHED, None, "the run has finished"),
    EndCause.ENDED: RestartRule(Verdict.ENDED, None, "code 0, and no planned step count says that steps are left"),
    EndCause.EARLY: RestartRule(Verdict.HERE, None, "it did not reach its last step"),
    EndCause.PREEMPTED: RestartRule(Verdict.NEW_JOB, PATIENCE, "nothing is wrong with the run"),
    EndCause.NODE_LOST: RestartRule(Verdict.NEW_JOB, PATIENCE, "nothing is wrong with the run"),
    EndCause.TIME_LIMIT: RestartRule(Verdict.NEW_JOB, None, "the job's time was over"),
    EndCause.CRASH: RestartRule(Verdict.HERE, None, "it may not happen again"),
    EndCause.HANG: RestartRule(Verdict.HERE, None, "it may not happen again"),
    EndCause.UNKNOWN: RestartRule(Verdict.HERE, None, "nothing says that it would happen again"),
    EndCause.OUT_OF_MEMORY: RestartRule(Verdict.STOP, None, "the same launch would run out of memory again"),
    EndCause.DISK_FULL: RestartRule(Verdict.HERE, None, "there is room for the next save again"),
    EndCause.REFUSED: RestartRule(Verdict.STOP, None, "the same start would be refused again"),
    EndCause.STOPPED: RestartRule(Verdict.STOP, None, "somebody wanted it to end"),
    EndCause.PROPOSAL: RestartRule(Verdict.STOP, None, "a rollback is proposed: `chronicle status`"),
}
# `scontrol requeue`: a TERM, and then another start
REQUEUED = RestartRule(Verdict.NEW_JOB, PATIENCE, "its job was requeued since")
DEFAULT_RESTARTS = 100  # of a batch script: a run of weeks in jobs of a day
DEFAULT_CRASHES = 3
TOLD_TO_END = 143  # a trainer that saves on TERM and returns 0 has not finished, and a Kubernetes Job must not take it for that
DEFAULT_PAUSE_SECONDS = 10.0


class Policy(NamedTuple):
    """How often a run may start again by itself, and how long it waits."""

    restarts: int
    crashes: int = DEFAULT_CRASHES  # launches in a row that failed without progress, after which a person has to look
    pause_seconds: float = DEFAULT_PAUSE_SECONDS  # without progress; doubled for each further one in a row


def policy_of(restarts: int, crashes: int, pause: float) -> Policy:
    """The restart policy of these options. Raises `UsageProblem`."""
    for name, value, least in (("--restarts", restarts, 0), ("--crashes", crashes, 1), ("--restart-pause", pause, 0)):
        if value < least:
            raise UsageProblem(f"{name} is {value:g}: expected {least} or more")
    return Policy(restarts, crashes, pause)


class Attempt(NamedTuple):
    """One launch of the chain. `progress`: it left a verified checkpoint newer than the one it was handed."""

    cause: EndCause
    progress: bool
    room: bool = False  # for the next save, where the disk was full
    requeued: bool = False  # its job has been started again since, so whoever stopped it wants it to go on


class Onward(NamedTuple):
    """What happens now, and why."""

    verdict: Verdict
    reason: str
    pause_seconds: float = 0.0


def decide_onward(attempts: Sequence[Attempt], policy: Policy) -> Onward:
    """Decide after the last of the chain's attempts; those before it were each followed by a restart. Pure."""
    last = attempts[-1]
    rule, used = RULES[last.cause], len(attempts) - 1
    said = f"{last.cause.value}: {rule.why}"
    if last.cause is EndCause.DISK_FULL and not last.room:
        return Onward(Verdict.STOP, f"{last.cause.value}: the next save would fail as well: free space first")
    if last.cause is EndCause.STOPPED and last.requeued:
        rule, said = REQUEUED, f"{last.cause.value}: {REQUEUED.why}"
    if rule.verdict not in (Verdict.HERE, Verdict.NEW_JOB):
        return Onward(rule.verdict, said)
    if last.cause is EndCause.EARLY and len(attempts) > 1 and attempts[-2].cause is EndCause.EARLY:
        return Onward(Verdict.STOP, f"{last.cause.value} twice in a row: it may be meant to end there; a person has to look")
    streak = 0
    while streak < len(attempts) and not attempts[-1 - streak].progress:
        streak += 1
    patience = policy.crashes if rule.patience is None else rule.patience
    if streak >= patience:
        launches = "launch" if streak == 1 else f"{streak} launches in a row"
        said = f"{last.cause.value}, and no newer verified checkpoint in {launches}: a person has to look"
        return Onward(Verdict.STOP, said)
    if used >= policy.restarts:
        return Onward(Verdict.STOP, f"{last.cause.value}, and the budget of {policy.restarts} restarts is used up")
    if rule.verdict is Verdict.NEW_JOB:
        return Onward(rule.verdict, said)
    pause = policy.pause_seconds * 2.0 ** (streak - 1) if streak else 0.0  # a run that gets on need not wait for anything
    return Onward(rule.verdict, said, min(LONGEST_PAUSE_SECONDS, pause))


# --- what the journal says of a chain


def chain_of(environ: Mapping[str, str]) -> str:
    """The chain that a launch started here belongs to: the job of SLURM, else this `chronicle run` alone."""
    job = job_of(environ)
    return f"slurm-{job}" if job is not None else f"run-{secrets.token_hex(8)}"


def _cause_of(ends: Iterable[LaunchEnd]) -> EndCause:
    """The most telling cause of a launch's nodes."""
    found = [EndCause(end.cause) for end in ends if end.cause in set(EndCause)]
    return min(found, key=TELLING.index, default=EndCause.UNKNOWN)


def _read_chain(entries: Sequence[Entry], chain: str) -> tuple[dict[int, int], Restarted | None]:
    """The launches of a chain since it last stopped, each with the step of the checkpoint that it was handed (-1: none).

    And the decision after the last of them, if there is one.
    """
    handed: dict[int, int] = {}
    decided: dict[int, Restarted] = {}
    for entry, start in events_of(entries, LaunchStart):
        if start.chain == chain and entry.launch is not None:
            step = start.handed.get("step")
            handed.setdefault(entry.launch, step if isinstance(step, int) else -1)
    newest = max(handed, default=0)
    stopped = 0
    for entry, event in events_of(entries, Restarted):
        if entry.launch in handed and entry.launch is not None:
            decided[entry.launch] = event
            if event.decision == Verdict.STOP and entry.launch != newest:
                stopped = max(stopped, entry.launch)
    return {number: handed[number] for number in sorted(handed) if number > stopped}, decided.get(newest)


class Settled(NamedTuple):
    """The decision after the last launch of a chain. `fresh`: it was made now, not read from the journal."""

    launch: int
    decision: Onward
    fresh: bool


def settle_launch(
    settings: Settings, chain: str, policy: Policy, say: Callable[[str], None], killed: Killed | None = None
) -> Settled | None:
    """Decide about the last launch of the chain and record it; the recorded decision if there is one; None without a launch.

    Launches whose supervisor is gone get their end first. Raises `ChronicleError` where the journal cannot be read or written.
    """
    paths = settings.paths
    with hold_admission(paths), JournalWriter(paths) as writer:
        close_lost_launches(paths, read_journal(paths), writer, killed)
    entries = read_journal(paths).entries
    handed, decided = _read_chain(entries, chain)
    if not handed:
        return None
    launch = max(handed)
    if decided is not None:
        known = Onward(Verdict(decided.decision), decided.reason, decided.pause_seconds or 0.0)
        return Settled(launch, known, fresh=False)
    ends: dict[int, list[LaunchEnd]] = {number: [] for number in handed}
    for entry, end in events_of(entries, LaunchEnd):
        if entry.launch in handed and entry.launch is not None:
            ends[entry.launch].append(end)
    causes = {number: _cause_of(ends[number]) for number in handed}
    cause, newest, progress = causes[launch], handed[launch], None
    room = cause is EndCause.DISK_FULL and _wait_for_room(settings, entries, say)
    requeued = cause is EndCause.STOPPED and _requeued_since(entries, launch)
    if requeued or RULES[cause].verdict in (Verdict.HERE, Verdict.NEW_JOB):
        newest = _newest_step(settings, entries, say)
        progress = newest > handed[launch]
    reached = [*list(handed.values())[1:], newest]
    attempts = [
        Attempt(causes[number], after > handed[number], room, requeued)
        for number, after in zip(handed, reached, strict=True)
    ]
    decision = decide_onward(attempts, policy)
    goes_on = decision.verdict in (Verdict.HERE, Verdict.NEW_JOB)
    event = Restarted(
        decision=decision.verdict.value, cause=cause.value, reason=decision.reason,
        restarts=len(attempts) if goes_on else len(attempts) - 1, budget=policy.restarts,
        pause_seconds=round(decision.pause_seconds, 1), progress=progress,
        step=newest if progress is not None and newest >= 0 else None,
    )  # fmt: skip
    with JournalWriter(paths) as writer:
        writer.write(event, launch=launch, title=f"{decision.verdict.value} after launch {launch}: {decision.reason}")
    return Settled(launch, decision, fresh=True)


def _newest_step(settings: Settings, entries: Sequence[Entry], say: Callable[[str], None]) -> int:
    """Step of the newest verified checkpoint; -1 where there is none, or none can be found."""
    found = -1
    for root in find_present_roots(settings, entries):
        try:
            newest = find_latest(root, entries, full=True, settings=settings).checkpoint
        except (RollbackError, OSError) as problem:
            say(f"progress is not known: `{root}` cannot be listed: {problem}")
            continue
        found = max(found, -1 if newest is None or newest.step is None else newest.step)
    return found


def _requeued_since(entries: Sequence[Entry], launch: int) -> bool:
    """Whether this process belongs to a later start of the job in which the launch ran."""
    own = start_of(os.environ)
    starts = [start_of(start.environment) for entry, start in events_of(entries, LaunchStart) if entry.launch == launch]
    return own is not None and any(one is not None and one.job == own.job and one.restart < own.restart for one in starts)


ROOM_SECONDS = 600.0  # for somebody, or a clean-up, to free space


def _wait_for_room(settings: Settings, entries: Sequence[Entry], say: Callable[[str], None]) -> bool:
    """Whether the disks of the run have room for another save, now or within ten minutes."""
    needed = {settings.paths.run_dir: NEARLY_FULL_BYTES}
    for root in find_present_roots(settings, entries):
        sizes = [bytes_below(path) for path in root.iterdir()] if root.is_dir() else []
        needed[root] = max(NEARLY_FULL_BYTES, int(1.25 * max(sizes, default=NEARLY_FULL_BYTES)))
    deadline, told = time.monotonic() + ROOM_SECONDS, False
    while True:
        short = [(path, count) for path, count in needed.items() if (free_bytes(path) or 0) < count]
        if not short or time.monotonic() >= deadline:
            return not short
        if not told:
            path, count = short[0]
            wanted = f"{count / 1e6:,.0f} MB, which the next save needs"
            say(f"the disk of `{path}` is full: waiting up to {ROOM_SECONDS / 60:.0f} min for {wanted}")
            told = True
        time.sleep(1.0)


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(os.lstat(os.path.join(here, name)).st_size for here, _, names in os.walk(path) for name in names)


# --- the loop: here; on several nodes once, whoever starts them decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Unattended:
    """A run that goes on by itself. `say` is for a person; `node`: this one of several."""

    settings: Settings
    chain: str
    policy: Policy
    grace_seconds: float
    say: Callable[[str], None]
    node: Node | None = None

    def settle(self, killed: Killed | None = None) -> Settled | None:
        """Decide about the last launch of the chain."""
        return settle_launch(self.settings, self.chain, self.policy, self.say, killed)

    def pause(self, decision: Onward) -> None:
        """Say why it goes on, and when; and wait."""
        when = f"again in {decision.pause_seconds:.0f} s" if decision.pause_seconds else "again now"
        self.say(f"{when}: {decision.reason}")
        time.sleep(decision.pause_seconds)


WAIT_SECONDS = 3600.0  # reading a checkpoint of many TB takes its time


def keep_going(
    run: Unattended, launch: Callable[[Node | None, HandedOver], LaunchResult], killed: Killed | None = None
) -> LaunchResult:
    """Launch until the policy says that it is enough; returns how the last launch ended here.

    A job that its scheduler started again is asked about its last launch first: `NotResumable` where that says stop. So is the
    launch of a supervisor that was `killed`, in whose place this process is; nothing of it may be alive any more.
    """
    node, settings = run.node, run.settings
    if node is not None:
        return launch(node, hand_over_to_nodes(run, node))
    if killed is not None and settings.paths.journal_dir.is_dir():
        settled = run.settle(killed)
        if settled is not None and settled.decision.verdict is not Verdict.HERE:
            run.say(f"{settled.decision.verdict.value}: {settled.decision.reason}")
            return _ended_before(settled, killed)
        if settled is not None:
            run.pause(settled.decision)
    else:
        _look_before(run)
    while True:
        end = launch(None, hand_over(settings, run.say))
        settled = run.settle()
        if settled is None or settled.launch != end.launch or settled.decision.verdict in WELL:
            return end  # where its entries could not be written, nothing is known, and nothing is repeated
        if settled.decision.verdict is not Verdict.HERE:
            run.say(f"{settled.decision.verdict.value}: {settled.decision.reason}")
            return replace(end, exit_code=end.exit_code or TOLD_TO_END)
        run.pause(settled.decision)


def _look_before(run: Unattended) -> None:
    """Say what would stop the run in the night; decide about a job that its scheduler started again. Raises `NotResumable`."""
    has_journal = run.settings.paths.journal_dir.is_dir()
    entries = read_journal(run.settings.paths).entries if has_journal else ()
    for root in find_present_roots(run.settings, entries):
        if is_mount_point(root):
            run.say(f"`{root}` is a mount point: a save that is cut cannot be moved out of it, and the run would stop; "
                    f"{BELOW_A_MOUNT_POINT}")  # fmt: skip
    before = run.settle() if has_journal else None
    if before is not None and before.fresh and before.decision.verdict is Verdict.STOP:
        reason = f"launch {before.launch} of this job: {before.decision.reason}"
        raise NotResumable(reason, "start it by hand when that is clear")


def _ended_before(settled: Settled, killed: Killed) -> LaunchResult:
    """The result of a launch whose supervisor was killed, and which is not followed by another one here."""
    from chronicle.launch.launching import LaunchResult

    code = 0 if settled.decision.verdict in WELL else 128 + killed.signal
    return LaunchResult(launch=settled.launch, exit_code=code, data={})


def hand_over_to_nodes(run: Unattended, node: Node) -> HandedOver:
    """What this node's part of a launch resumes from. The first node decides and looks, the others wait for its word.

    Raises `NotResumable` on every node where the first one says so.
    """
    shared = handed_path(run.settings.paths, node.key)
    if node.number == 0:
        try:
            _look_before(run)
            handed = hand_over(run.settings, run.say)
        except ChronicleError as refusal:
            _refuse(shared, refusal.message)
            raise
        shared.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(shared, json.dumps(handed.to_json()), durable=False)
        return handed
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            told = json.loads(shared.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            time.sleep(0.5)
            continue
        if "refused" in told:
            raise NotResumable(f"the first node of this launch says: {told['refused']}", LOOK)
        return HandedOver(str(told.get("path") or ""), told.get("step"))
    raise NotResumable(f"the first node of this launch has not said in {WAIT_SECONDS / 60:.0f} min where to resume from", LOOK)


def _refuse(shared: Path, why: str) -> None:
    shared.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(shared, json.dumps({"refused": why}), durable=False)


def requeued_before_a_launch(environ: Mapping[str, str]) -> str:
    """Why the scheduler takes this job's nodes, where its signal came before a launch began; "" where it does not."""
    job = job_of(environ)
    word = ask_job(job, now=time.time()) if job is not None else None
    lead = environ.get("CHRONICLE_SIGNAL_LEAD", "")
    if word is not None and word.preempted:
        return "SLURM took the nodes for another job before a launch began"
    if word is not None and word.seconds_left is not None and lead.isdigit() and word.seconds_left <= float(lead):
        return f"{word.seconds_left:.0f} s are left of the job's time, and no launch began"
    return ""


def requeued_in_vain(entries: Sequence[Entry], environ: Mapping[str, str]) -> int:
    """How often this job was started again in a row without that a launch of it began."""
    own = start_of(environ)
    if own is None:
        return 0
    starts = (start_of(start.environment) for _, start in events_of(entries, LaunchStart))
    began = max((one.restart for one in starts if one is not None and one.job == own.job), default=-1)
    return own.restart - began


def stand_down(settings: Settings, node: Node, grace_seconds: float, killed: Killed) -> int:
    """On one of several nodes whose supervisor was killed: write its end and tell the other nodes; the exit code.

    Whoever started the nodes decides about the launch when all of them have ended.
    """
    paths, host = settings.paths, host_name()
    with hold_admission(paths), JournalWriter(paths) as writer:
        close_lost_launches(paths, read_journal(paths), writer, killed)
    said = f"the supervisor on {host} was ended by {killed.name}"
    if node.number == 0 and not handed_path(paths, node.key).exists():
        _refuse(handed_path(paths, node.key), said)
    launch = shared_number(paths, node.key)
    if launch is not None:
        data = {"host": host, "exit_code": 128 + killed.signal, "cause": EndCause.CRASH.value, "because": said}
        Peers(paths.launch_dir(launch), node.number, grace_seconds).tell(data)
    return 128 + killed.signal
