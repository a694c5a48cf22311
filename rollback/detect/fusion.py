"""Merges events of channels into events of the run: one per incident, with a kind, a tier and a cluster.

The loss decides. A gradient norm that moves with it gives an earlier onset and joins the event; alone it warns and
never proposes (a clipped norm is ten times its usual size in many healthy runs). Instant spikes that come back are
notices: of 216 labelled ones 212 did, of 20 gradual divergences one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollback.channels import Role
from rollback.detect.constants import JOIN_ROWS, OFTEN_POINTS, WANDERS, WARM_POINTS
from rollback.detect.events import Event, Kind, Status, Tier
from rollback.detect.life import EXPLODED_DECADES, ChannelEvent

OBJECTIVES = (Role.OBJECTIVE, Role.REWARD)
CHAIN_ROWS = 2000  # so long after an event that never recovered, another one joins its cluster
SAW_EVENTS = 16  # the last ones, among which the teeth are sought
FAR_DECADES = 0.5  # a norm three times its usual size
SLOW_DECADES = 0.046  # a throughput a tenth below its usual one
REINIT_SHARE, REINIT_MOST = 0.5, 1.5  # of the way back to the first loss; further up, without a restart, is an explosion
HIGHER = 2.0  # times the highest spike told of an objective: lower ones are its nature
EXPLODED_SIGMAS = 30.0  # of a reward or an objective: as far as no policy moves between two points

ORDER = "the noise grew and the lower values stand: the order of the data changed"
OFTEN = f"the run spikes often, {{}} times in {OFTEN_POINTS} points: only higher spikes are told"
MARKS = (ORDER, OFTEN[:20])  # beginnings of sentences that come and go with what they say


class Group:
    """The channel events behind one event; `first` is the one that decides, the loss's where there is one."""

    def __init__(self, role: Role, first: ChannelEvent) -> None:
        self.role, self.first, self.members = role, first, [first]
        self.number: int | None = None  # None: held back until something makes it an event
        self.cluster = -1
        self.row = self.step = -1  # where it was published: the alarm

    @property
    def is_open(self) -> bool:
        """Whether one of the channel events still is open."""
        return not all(member.closed for member in self.members)


class Fusion:
    """Fold channel events, in the order in which they happen, into events; `events` holds all of them by number."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.groups: list[Group] = []  # open or recent ones
        self.loss_events: list[int] = []  # numbers of events led by a loss, for clusters
        self.first_loss: float | None = None
        self.objective = False  # rewards or objectives are logged beside the loss: it is one of them
        self.lr_wrong = False  # the LR watch has an open mismatch: a lasting rise is proposed at once

    def begin_run(self) -> None:
        """Another run begins in this log: no earlier event belongs to it."""
        self.first_loss = None
        self.loss_events, self.groups = [], []
        self.lr_wrong = False

    def forget_after(self, step: int) -> None:
        """Leave out of later clusters what began after `step`: the log went back to it."""
        self.loss_events = [number for number in self.loss_events if (self.events[number].onset_low_step or 0) < step]
        self.groups = [group for group in self.groups if group.is_open]

    def feed(
        self, role: Role, item: ChannelEvent, *, row: int, step: int, interval: float, launch: int | None
    ) -> Event | None:
        """Fold one channel event opened or changed by this point; returns the event it changed, or None."""
        group = next((known for known in self.groups if item in known.members), None) or self._place(role, item, interval)
        if group.number is None:
            if not self._is_publishable(group, row):
                return None
            self._publish(group, row, step, interval)
        number = group.number
        assert number is not None
        known = self.events[number] if number < len(self.events) else None
        event = self._describe(group, number, interval, launch, known)
        if known is None:
            self.events.append(event)
            return event
        self.events[number] = event
        return event if event != known else None

    def add(self, event: Event) -> Event:
        """Add an event that no channel made (rewind, LR); its number and cluster are filled in here."""
        number = len(self.events)
        self.events.append(replace(event, id=number, cluster=number))
        return self.events[number]

    def change(self, number: int, **changes: Any) -> Event:
        """Replace fields of one event; returns the new one."""
        self.events[number] = replace(self.events[number], **changes)
        return self.events[number]

    # --- Groups and clusters

    def _place(self, role: Role, item: ChannelEvent, interval: float) -> Group:
        """Join the group of the same incident, or begin one."""
        row = item.alarm_row
        self.groups = [g for g in self.groups if g.is_open or row - g.first.alarm_row <= 4 * JOIN_ROWS]
        for group in reversed(self.groups):
            if not _belongs(group, role, item):
                continue
            group.members.append(item)
            if role is Role.LOSS:
                group.first, group.role = item, role
                if group.number is not None:
                    group.cluster = self._cluster_for(item, interval, group.number)
                    self.loss_events.append(group.number)
            return group
        self.groups.append(Group(role, item))
        return self.groups[-1]

    def _publish(self, group: Group, row: int, step: int, interval: float) -> None:
        number = len(self.events)
        group.number, group.row, group.step, group.cluster = number, row, step, number
        if group.role is Role.LOSS:
            group.cluster = self._cluster_for(group.first, interval, number)
            self.loss_events.append(number)

    def _cluster_for(self, item: ChannelEvent, interval: float, number: int) -> int:
        """Return the cluster of an event: that of an unresolved one before it, or of one that ended shortly before."""
        near = min(250.0, max(250.0 / max(interval, 1e-9), 16.0))
        for known in reversed(self.loss_events[-16:]):
            last = self.events[known]
            end, reach = last.recovered_row, near
            if last.status is not Status.RECOVERED or end is None:
                end, reach = last.alarm_row, CHAIN_ROWS
            if item.onset_row - end <= reach:
                return last.cluster
        return number

    def _is_publishable(self, group: Group, row: int) -> bool:
        """Whether a group is an event of its own: a loss is, other channels when they last, a norm when it is far off."""
        leader, role = group.first, group.role
        if role is Role.LOSS:
            return not self._is_saw_tooth(leader, row)
        if role in OBJECTIVES:  # they move by nature: a spike higher than before, a level that exploded or collapsed
            told = [abs(event.excess or 0.0) for event in self.events if event.channels[:1] == (leader.channel,)]
            higher = leader.shape == "instant" and abs(leader.excess or 0.0) > HIGHER * max(told, default=0.0)
            return higher or leader.shape == "nan" or _is_exploded(leader)
        if role is Role.SPEED:  # one slow step is a save or an evaluation
            return leader.shape != "nan" and leader.unresolved and leader.height >= SLOW_DECADES
        if leader.shape == "nan" or role is Role.SOURCE:
            return leader.unresolved
        if leader.young:  # a norm changes severalfold while a run or a log interval is young: it has no usual size yet
            return False
        far = EXPLODED_DECADES if row - leader.onset_row > JOIN_ROWS else FAR_DECADES  # one that grows for the whole run
        return leader.persistent or (leader.unresolved and leader.height >= far)

    def _is_saw_tooth(self, leader: ChannelEvent, row: int) -> bool:
        """Whether the loss rises as it rose at the beginning of each epoch: three rises that lasted lie equally far apart.

        A running mean that begins anew does that, and so does data in the order of the epoch before. Spikes do not last,
        and what lasts for longer than an epoch, or rises far higher, is no tooth.
        """
        before = [
            event for event in self.events[-SAW_EVENTS:]
            if event.channels[:1] == (leader.channel,) and event.recovered_row is not None and event.onset_row is not None
            and event.recovered_row - event.onset_row >= WARM_POINTS
        ][-3:]  # fmt: skip
        if len(before) < 3 or leader.shape == "nan":
            return False
        rows = [event.onset_row or 0 for event in before]
        period = (rows[2] - rows[0]) / 2.0
        apart = max(3.0, 0.05 * period)
        periods = max(1, round((leader.onset_row - rows[2]) / period))
        regular = abs(rows[1] - rows[0] - period) <= apart and abs(leader.onset_row - rows[2] - periods * period) <= apart
        highest = max(event.excess or 0.0 for event in before)
        return regular and row - leader.onset_row < period and (leader.excess or 0.0) <= HIGHER * highest

    # --- What an event is

    def _describe(self, group: Group, number: int, interval: float, launch: int | None, known: Event | None) -> Event:
        """Build the event from its channel events as they are now; the tier never falls below what was told before."""
        leader = group.first
        reach = 2 * WARM_POINTS if leader.shape == "instant" else JOIN_ROWS
        near = [member for member in group.members if leader.alarm_row - reach <= member.onset_row]
        first = min(near, key=lambda member: member.onset_row, default=leader)
        if first.onset_row > leader.onset_row:
            first = leader
        low = min(group.members, key=lambda member: member.onset_low_row)
        if leader.alarm_row - low.onset_low_row > 2 * JOIN_ROWS:
            low = leader
        kind, tier = self._kind(leader, group.role), self._tier(group)
        evidence = [] if known is None else [line for line in known.evidence if not line.startswith(MARKS)]
        if kind is Kind.DATA_ORDER:
            evidence.append(ORDER)
        if leader.often:
            evidence.append(OFTEN.format(leader.often))
        if known is not None and known.tier.rank > tier.rank:
            tier = known.tier
        channels = (leader.channel, *sorted(member.channel for member in group.members))
        return Event(
            id=number, kind=kind, tier=tier, status=leader.status, onset_step=first.onset_step,
            onset_low_step=low.onset_low_step, onset_row=first.onset_row, onset_low_row=low.onset_low_row,
            alarm_step=group.step, alarm_row=group.row, peak_step=leader.peak_step, peak_row=leader.peak_row,
            recovered_step=leader.recovered_step, recovered_row=leader.recovered_row, channels=tuple(dict.fromkeys(channels)),
            cluster=group.cluster, launch=known.launch if known else launch, excess=leader.excess, sigmas=leader.sigmas,
            interval=interval, evidence=tuple(evidence),
        )  # fmt: skip

    def _kind(self, leader: ChannelEvent, role: Role) -> Kind:
        if role is Role.SPEED:
            return Kind.LEVEL_SHIFT
        if leader.shape == "nan":
            return Kind.NAN
        if role not in OBJECTIVES:
            if self._is_reinit(leader):
                return Kind.REINIT
            if leader.scattered and not leader.unresolved:
                return Kind.DATA_ORDER
            if leader.after_restart and not leader.unresolved:
                return Kind.RESUME_BUMP
            if leader.shape == "gradual":
                return Kind.GRADUAL_DIVERGENCE
        return Kind.INSTANT_SPIKE if leader.shape == "instant" and not leader.unresolved else Kind.LEVEL_SHIFT

    def _is_reinit(self, leader: ChannelEvent) -> bool:
        """Whether the loss is back near its first value; without a restart it must also stay there."""
        if self.first_loss is None or leader.excess is None or leader.shape != "instant":
            return False
        descent = self.first_loss - leader.level
        if descent <= 20.0 * leader.sigma or leader.excess <= REINIT_SHARE * descent:
            return False
        if leader.after_restart:
            return True
        stays = leader.unresolved or (leader.lasting and leader.status is not Status.RECOVERED)
        return stays and not leader.scattered and leader.excess <= REINIT_MOST * descent

    def _tier(self, group: Group) -> Tier:
        leader = group.first
        if group.role is Role.SPEED:
            return Tier.NOTICE
        if group.role in OBJECTIVES:
            return _objective_tier(leader)
        if group.role is Role.LOSS:
            tier = self._loss_tier(group)
            return Tier.WARN if leader.provisional and tier is Tier.PROPOSE else tier
        scattered = any(event.kind is Kind.DATA_ORDER for event in self.events[-16:])
        return Tier.WARN if leader.unresolved or (leader.persistent and not scattered) else Tier.NOTICE

    def _loss_tier(self, group: Group) -> Tier:
        leader = group.first
        if leader.shape == "nan":
            return Tier.PROPOSE if leader.unresolved else Tier.WARN
        if self.objective:
            return _objective_tier(leader)
        kind = self._kind(leader, group.role)
        reloaded = leader.after_restart and kind is Kind.REINIT
        if leader.unresolved or reloaded or (leader.lasting and self.lr_wrong):
            return Tier.PROPOSE
        if kind in (Kind.RESUME_BUMP, Kind.DATA_ORDER):
            return Tier.NOTICE
        # of a slow rise one batch with a large gradient tells nothing
        members = [m for m in group.members if m.decades and (m.persistent or leader.shape != "gradual")]
        if any((member.excess or 0.0) >= EXPLODED_DECADES for member in members):
            return Tier.WARN
        stayed = leader.status is Status.PARTIAL and (leader.closed or leader.lasting)
        own = leader.crest <= WANDERS * leader.wander * leader.sigma  # as far as the run drifts by itself
        return Tier.WARN if (stayed or leader.status is Status.DIVERGING) and not own else Tier.NOTICE


def _is_exploded(leader: ChannelEvent) -> bool:
    return leader.unresolved and leader.crest > max(EXPLODED_SIGMAS, 2.0 * leader.wander) * leader.sigma


def _objective_tier(leader: ChannelEvent) -> Tier:
    if leader.shape == "nan" and leader.unresolved:
        return Tier.PROPOSE
    return Tier.WARN if leader.shape == "nan" or _is_exploded(leader) else Tier.NOTICE


def _belongs(group: Group, role: Role, item: ChannelEvent) -> bool:
    """Whether a channel event belongs to the incident of a group: other channel, close in time, no second spike."""
    leader = group.first
    if item.respike or item.shape == "nan" or leader.respike or leader.shape == "nan":
        return False
    if any(member.channel == item.channel for member in group.members):
        return False
    if role is group.role is Role.LOSS or Role.SPEED in (role, group.role):
        return False
    age = item.alarm_row - leader.alarm_row
    return age <= 2 * WARM_POINTS or (age <= JOIN_ROWS and group.is_open)
