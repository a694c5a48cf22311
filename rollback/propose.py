"""Turn a cluster of events and the existing checkpoints into one proposal: target, action, cost and command.

Target: the newest verified, healthy checkpoint before `min(onset_low - 50, onset - 100)` of the whole cluster. The
first human rollback of the seed's 80B run went to a checkpoint after the onset, and failed. Actions form a ladder: other
data, LR x 0.75, LR x 0.5, stop. A relapse in the same region climbs one rung and goes back at least one checkpoint
further. The LR is never raised. No clock and no disk: the caller collects checkpoints and history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollback.channels import Role, role_of
from rollback.detect.events import Event, Kind, Status, Tier
from rollback.plan.request import RESHUFFLE, SKIP
from rollback.records import record_of

# --- Values


class Action(StrEnum):
    """What to change besides going back. HARDWARE and FIX_LR are branches beside SKIP, the first rung."""

    SKIP = "skip-data"
    HARDWARE = "replace-hardware"
    FIX_LR = "fix-lr"
    LR_75 = "lr-x0.75"
    LR_50 = "lr-x0.5"
    STOP = "stop"

    @property
    def rung(self) -> int:
        """The place on the ladder, from 0."""
        return LADDER.index(self) if self in LADDER else 0


LADDER = (Action.SKIP, Action.LR_75, Action.LR_50, Action.STOP)
LR_SCALES = {Action.LR_75: 0.75, Action.LR_50: 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateCheckpoint:
    """A checkpoint that exists. `verified` None: not verified yet, `chronicle rollback` will do it.

    `honours`: the options that the run supported when it saved this one; None: no save of it is on record. `lr_elsewhere`:
    why the LR of the next launch does not follow from this checkpoint, so that an edit of it would be refused. `one_lr`:
    whether `--lr` can change it; parameter groups with LRs of their own can only be scaled.
    """

    step: int
    launch: int | None = None
    verified: bool | None = None
    healthy: bool = True
    honours: frozenset[str] | None = None
    lr_elsewhere: str = ""
    one_lr: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRollback:
    """One rollback already done: the onset it answered, where it went and how."""

    onset_step: int
    target_step: int
    action: Action = Action.SKIP
    lr_scale: float = 1.0
    day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known besides the events.

    `lr_factor` is the cumulative factor against the original schedule, `lr_raised` the factor against the parent launch.
    """

    run: str | None = None
    last_step: int = 0
    seconds_per_step: float | None = None
    rollbacks: tuple[PastRollback, ...] = ()
    hardware: tuple[tuple[int, str], ...] = ()
    lr_factor: float = 1.0
    lr_raised: float = 1.0
    lr_expected: float | None = None
    options: tuple[str, ...] = ()  # what the command also needs to find this run: `--logs DIR`, …
    honours: frozenset[str] = frozenset()  # options that the trainer supports: skip, reshuffle
    discarded_steps: int = 0
    day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another possible target, with what it costs."""

    step: int
    launch: int | None
    cost_steps: int
    cost_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Where to go back to, what to change, and why.

    `target_step` None: no verified checkpoint is early enough; `command` is then None, too. `before_step` is the newest
    step that a target may have. `exhausted` names the budgets that this rollback would overdraw.
    """

    events: tuple[int, ...]
    cluster: int
    onset_step: int
    onset_low_step: int
    before_step: int
    target_step: int | None
    target_launch: int | None
    action: Action
    lr_scale: float
    cost_steps: int | None
    cost_hours: float | None
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]
    exhausted: tuple[str, ...]
    command: str | None
    by_hand: str = ""  # what a person must change too, because the command cannot

    @property
    def without_target(self) -> str | None:
        """The sentence that says why there is no target; None where there is one."""
        return next((reason for reason in self.reasons if reason.startswith(NO_TARGET)), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return record_of(self)


# --- The policy

MARGIN_LOW, MARGIN = 50, 100  # steps or logged points, whichever is more
SHORT_MARGIN = 10  # where no checkpoint has the full margin
RELAPSE_STEPS, RELAPSE_DISTANCES = 2000, 3
HARDWARE_STEPS = 100
SKIP_AFTER_ONSET = 200
MIN_LR_FACTOR = 0.1
PER_REGION, PER_DAY, DISCARDED_FRACTION = 3, 4, 0.15  # budgets: beyond them a person has to decide
EXACT = frozenset((Kind.LR_MISMATCH, Kind.POISONED, Kind.REPLICAS))  # kinds whose first wrong step is known
RAISED_LR = 1.2


def propose(
    events: Sequence[Event],
    checkpoints: Sequence[CandidateCheckpoint],
    history: History | None = None,
) -> Proposal | None:
    """Return the proposal for the newest cluster that calls for one, or None when nothing does."""
    history = history or History()
    events = _standing(events)
    calling = [event for event in events if event.tier is Tier.PROPOSE and event.status is not Status.RECOVERED]
    if not calling:
        return None
    cluster = [event for event in events if event.cluster == calling[-1].cluster and _counts(event)]
    onset, low, interval = _onset(cluster)
    reasons = [_story(cluster, onset, low)]
    relapses = _relapses(history, onset)
    action = _choose_action(events, history, relapses, onset, low, reasons)
    sound = (c for c in checkpoints if c.healthy and c.verified is not False and not _was_in_trouble(c.step, events))
    usable = sorted(sound, key=lambda c: c.step)
    if relapses:
        previous = relapses[-1].target_step
        usable = [c for c in usable if c.step < previous]
        reasons.append(f"the rollback to {previous} did not help: at least one checkpoint further back")
    wrong_since = [e.onset_step for e in events if _is_wrong_lr(e, onset) and e.onset_step is not None]
    promised = [event.expected for event in events if _is_wrong_lr(event, onset) and event.expected is not None]
    if promised and history.lr_expected is None:
        history = replace(history, lr_expected=promised[-1])
    if wrong_since:  # a checkpoint saved under the wrong LR holds that LR
        usable = [c for c in usable if c.step <= min(wrong_since)]
    if all(event.kind in EXACT for event in cluster):
        # the first wrong step is known: no margin. A wrong LR at this step spoils only what comes after it
        limit = onset if all(event.kind is Kind.LR_MISMATCH for event in cluster) else low - 1
        older = [c for c in usable if c.step <= limit]
        if not older:
            reasons.append(_no_target(limit, onset, checkpoints))
    elif action is Action.FIX_LR and wrong_since:  # the cause is known, and its first step
        limit = min(wrong_since)
        older = [c for c in usable if c.step <= limit]
        if not older:
            reasons.append(_no_target(limit, onset, checkpoints))
    else:
        limit = _newest_target(onset, low, interval)
        short = min(low - interval, onset - max(SHORT_MARGIN * interval, 2 * (onset - low)))
        older = _before_onset(usable, limit, short)
        if not older:
            reasons.append(_no_target(max(0, limit), onset, checkpoints))
    target = older[-1] if older else None
    if target is not None:
        found = f"the newest sound checkpoint up to there is of step {target.step}"
        if target.step > limit:
            found = f"no sound checkpoint lies there; that of step {target.step} is {onset - target.step} steps before it"
        reasons.append(f"the trouble begins at step {onset}; {onset - limit} steps earlier is step {limit}; {found}")
    honours = history.honours if target is None or target.honours is None else target.honours
    if action is Action.SKIP and target is not None:
        reasons.append(_data_action(honours))
    if action is Action.STOP:
        reasons.append("every action was tried in this region: no further rollback is proposed")
    lr_scale = LR_SCALES.get(action, 1.0)
    if history.lr_factor * lr_scale < MIN_LR_FACTOR:
        lr_scale, action = 1.0, Action.STOP
        reasons.append(f"the LR is already {history.lr_factor:.4g} × the original: it is not reduced further")
    exhausted = _exhausted(history, relapses, target, onset)
    by_hand = _by_hand(target, action, lr_scale, history)
    return Proposal(
        events=tuple(event.id for event in cluster), cluster=calling[-1].cluster, onset_step=onset,
        onset_low_step=low, before_step=limit, target_step=target.step if target else None,
        target_launch=target.launch if target else None, action=action, lr_scale=lr_scale,
        cost_steps=_cost(history, target) if target else None,
        cost_hours=_hours(history, target), alternatives=tuple(_alternative(history, c) for c in older[-3:-1][::-1]),
        reasons=tuple(reasons), exhausted=exhausted,
        command=_command(target, checkpoints, action, lr_scale, history, onset, honours) if target else None,
        by_hand=by_hand,
    )  # fmt: skip


def _standing(events: Sequence[Event]) -> list[Event]:
    """Leave out events that a later rewind has undone: those that began at or after the step it went back to."""
    standing: list[Event] = []
    for event in events:
        if event.kind is Kind.RESTART_REWIND and event.onset_step is not None:
            back_to = event.onset_step
            standing = [known for known in standing if known.onset_low_step is None or known.onset_low_step < back_to]
        standing.append(event)
    return standing


def _was_in_trouble(step: int, events: Sequence[Event]) -> bool:
    """Whether this step is inside an event that recovered: a checkpoint saved in a spike holds its moments."""
    return any(
        event.kind in (Kind.INSTANT_SPIKE, Kind.GRADUAL_DIVERGENCE, Kind.NAN) and event.onset_step is not None
        and event.recovered_step is not None and event.onset_step <= step < event.recovered_step
        for event in events
    )  # fmt: skip


def _counts(event: Event) -> bool:
    """Whether an event counts for the onset: what calls for a rollback itself, and else not what another order of the data
    explains, nor a restart or one point that recovered.
    """
    harmless = event.is_lone or event.kind in (Kind.RESUME_BUMP, Kind.RESTART_REWIND)
    by_order = event.kind is Kind.DATA_ORDER and event.tier is not Tier.PROPOSE
    passed = by_order or (harmless and event.status is Status.RECOVERED)
    return event.onset_step is not None and not passed


def _onset(cluster: Sequence[Event]) -> tuple[int, int, float]:
    onset = min(event.onset_step for event in cluster if event.onset_step is not None)
    low = min(event.onset_low_step for event in cluster if event.onset_low_step is not None)
    return onset, min(low, onset), max(1.0, *(event.interval for event in cluster))


def _story(cluster: Sequence[Event], onset: int, low: int) -> str:
    last = cluster[-1]
    many = f"{len(cluster)} events, the latest: " if len(cluster) > 1 else ""
    since = f"onset at step {onset}" if onset == low else f"onset at step {onset}, {low} at the earliest"
    return f"{many}{last.kind.value} on {', '.join(last.channels) or 'the log'}, {last.status.value}, {since}"


def _newest_target(onset: int, low: int, interval: float) -> int:
    """Return the newest step with the full margin: in steps or logged points, and at least twice the onset's doubt."""
    doubt = 2 * (onset - low)
    return math.floor(min(low - max(MARGIN_LOW, MARGIN_LOW * interval), onset - max(MARGIN, MARGIN * interval, doubt)))


def _before_onset(usable: Sequence[CandidateCheckpoint], limit: int, short: float) -> list[CandidateCheckpoint]:
    """Checkpoints up to `limit`, with the full margin; those up to `short` only where there is none."""
    return [c for c in usable if c.step <= limit] or [c for c in usable if c.step <= short]


NO_TARGET = "no verified checkpoint at or before step"


def _no_target(limit: int, onset: int, known: Sequence[CandidateCheckpoint]) -> str:
    if not known:
        return f"{NO_TARGET} {limit} (onset {onset}): no checkpoint is known here; name their directory with --checkpoints DIR"
    oldest = f"the oldest one is of step {min(c.step for c in known)}"
    return f"{NO_TARGET} {limit} (onset {onset}): {oldest}; look for an older one or restart from scratch"


def _relapses(history: History, onset: int) -> list[PastRollback]:
    """Return the earlier rollbacks whose onset was in the same region."""
    return [
        past for past in history.rollbacks
        if abs(onset - past.onset_step)
        <= max(RELAPSE_STEPS, RELAPSE_DISTANCES * abs(past.onset_step - past.target_step))
    ]  # fmt: skip


def _choose_action(
    events: Sequence[Event], history: History, relapses: Sequence[PastRollback], onset: int, low: int,
    reasons: list[str],
) -> Action:  # fmt: skip
    if relapses:
        rung = min(len(LADDER) - 1, max(past.action.rung for past in relapses) + 1)
        reasons.append(f"relapse: {len(relapses)} earlier rollback{'s' * (len(relapses) > 1)} in this region")
        return LADDER[rung]
    odd = [event for event in events if _is_wrong_lr(event, onset)]
    if odd and odd[-1].tier is Tier.PROPOSE:  # it differs from a promised LR; else the schedule itself does this
        reasons.append(f"{odd[-1].evidence[0]}: correct the LR, nothing else has to change")
        return Action.FIX_LR
    if odd:
        reasons.append(odd[-1].evidence[0])
        return Action.LR_50
    if history.lr_raised >= RAISED_LR:
        reasons.append(f"this launch trains at {history.lr_raised:.3g} × its parent's LR")
        return Action.LR_50
    doubt = max(HARDWARE_STEPS // 2, onset - low)
    known = [*_slower_nodes(events), *history.hardware]
    near = [text for step, text in known if low - HARDWARE_STEPS <= step <= onset + doubt]
    if near:
        reasons.append(f"hardware: {near[-1]}; exclude the node and replay the same data: a relapse then rules the node out")
        return Action.HARDWARE
    reasons.append("first rollback in this region: same LR, different data")
    return Action.SKIP


def _data_action(honours: frozenset[str]) -> str:
    if SKIP in honours:
        return "data: the batches around the onset are skipped"
    if RESHUFFLE in honours:
        return "data: reshuffled"
    return "data: change it in the trainer; this run does not declare support for skipping or reshuffling batches"


def _slower_nodes(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return (step, text) of each throughput that fell and stayed low: a node that throttles."""
    return [
        (event.onset_step, f"{', '.join(event.channels)} lower since step {event.onset_step}")
        for event in events
        if event.onset_step is not None and event.channels and all(role_of(c) is Role.SPEED for c in event.channels)
    ]


def _is_wrong_lr(event: Event, onset: int) -> bool:
    """Whether an event is a wrong LR that is still open or began shortly before the onset."""
    step = event.onset_step
    if event.kind is not Kind.LR_MISMATCH or step is None or step > onset:
        return False
    return event.status is Status.OPEN or onset - step <= RELAPSE_STEPS


def _exhausted(
    history: History, relapses: Sequence[PastRollback], target: CandidateCheckpoint | None, onset: int
) -> tuple[str, ...]:
    """Return a sentence for each budget that this rollback would overdraw."""
    spent = []
    if len(relapses) >= PER_REGION:
        spent.append(f"{len(relapses)} rollbacks in the region of step {onset} (budget {PER_REGION})")
    today = [past for past in history.rollbacks if past.day is not None and past.day == history.day]
    if len(today) >= PER_DAY:
        spent.append(f"{len(today)} rollbacks in one day (budget {PER_DAY})")
    cost = _cost(history, target) if target else 0
    if history.last_step and history.rollbacks:
        share = (history.discarded_steps + cost) / (history.last_step + history.discarded_steps)
        if share > DISCARDED_FRACTION:
            spent.append(f"{share:.0%} of all steps discarded (budget {DISCARDED_FRACTION:.0%})")
    return tuple(spent)


def _cost(history: History, target: CandidateCheckpoint) -> int:
    """The steps that going back to it discards."""
    return max(0, history.last_step - target.step)


def _hours(history: History, target: CandidateCheckpoint | None) -> float | None:
    if target is None or history.seconds_per_step is None:
        return None
    return round(_cost(history, target) * history.seconds_per_step / 3600.0, 3)


def _alternative(history: History, candidate: CandidateCheckpoint) -> Alternative:
    cost, hours = _cost(history, candidate), _hours(history, candidate)
    return Alternative(step=candidate.step, launch=candidate.launch, cost_steps=cost, cost_hours=hours)


def _by_hand(target: CandidateCheckpoint | None, action: Action, lr_scale: float, history: History) -> str:
    """The change of the LR where the checkpoint cannot carry it; "" where it can, or where none is proposed."""
    if target is None or (not target.lr_elsewhere and target.one_lr):
        return ""
    if lr_scale != 1.0 and target.lr_elsewhere:
        return f"multiply by {lr_scale:g} the LR that the next launch is given ({target.lr_elsewhere})"
    if action is Action.FIX_LR and history.lr_expected is not None:
        why = target.lr_elsewhere or "the checkpoint's parameter groups have LRs of their own, or 0"
        return f"give the next launch the LR {history.lr_expected:.6g} ({why})"
    return ""


def _command(
    target: CandidateCheckpoint, checkpoints: Sequence[CandidateCheckpoint], action: Action, lr_scale: float,
    history: History, onset: int, honours: frozenset[str],
) -> str | None:  # fmt: skip
    """Return the command to type; STOP has none, because no rung is left."""
    if action is Action.STOP:
        return None
    twins = {c.launch for c in checkpoints if c.step == target.step}
    where = f"{target.step}@{target.launch}" if len(twins) > 1 and target.launch is not None else str(target.step)
    parts = ["chronicle rollback", f"--to {where}"]
    if lr_scale != 1.0:
        parts += [] if target.lr_elsewhere else [f"--lr-scale {lr_scale:g}"]
    elif action is Action.SKIP and SKIP in honours:
        parts.append(f"--skip-batches {onset + SKIP_AFTER_ONSET - target.step}")
    elif action is Action.SKIP and RESHUFFLE in honours:
        parts.append("--reshuffle")
    elif action is Action.FIX_LR and history.lr_expected is not None and target.one_lr and not target.lr_elsewhere:
        parts.append(f"--lr {history.lr_expected:.6g}")
    if history.run is not None:
        parts.append(f"--run {history.run}")
    parts.extend(history.options)
    return " ".join(parts)
