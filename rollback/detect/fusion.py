"""Merges events of channels into events of the run: one per incident, with a kind, a tier, a cluster and evidence.

The loss decides. A gradient norm that moves with it gives an earlier onset and joins the event; alone it warns and
never proposes (a clipped norm is ten times its usual size in many healthy runs). Instant spikes that come back are
notices: of 216 labelled ones 212 did, of 20 gradual divergences one. Evidence names the data sources that moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rollback.channels import Role
from rollback.detect.channel import Channel
from rollback.detect.events import LONE_ROWS, Event, Kind, Status, Tier
from rollback.detect.excursion import EXPLODED_DECADES, ChannelEvent

CLOSED_SHAPES = ("drop", "too-good")  # the loss is lower: never part of a series of spikes
JOIN_ROWS = 200  # channels that alarm this close together belong to one event
SUDDEN_ROWS = 16  # so long before a sudden rise of the loss another channel's onset is its onset, too
CLUSTER_STEPS, CLUSTER_MAX_ROWS, CLUSTER_MIN_ROWS = 250, 250, 16
CHAIN_ROWS = 2000  # so long after an event that never recovered, another one joins its cluster
ORDER = "the noise grew and the lower values stand: the order of the data changed"
PROVISIONAL = "provisional: the log interval has just changed, and its noise is not known yet"
MARKS = (ORDER, PROVISIONAL)  # sentences that come and go with what they say
AS_HIGH = 1.25  # times the peak of what another order of the data explained
UNSTABLE_EVENTS = 3  # in one cluster: the run is unstable
FAR_DECADES = 0.5  # a norm three times its usual size
SLOW_NORM_ROWS = 200
SLOW_DECADES = 0.046  # a throughput a tenth below its usual one
REINIT_SHARE = 0.5  # of the way back to the first loss
CROSSINGS = 4  # changes of sign that show an objective, not a cross-entropy
BEGUN_SHARE = 20  # a log whose first step is below this part of the alarm's holds the beginning of training
RISEN_SIGMAS, NOT_FALLEN_SIGMAS = 3.0, 4.0
UNUSUAL = 2.25  # times its own drift: the third rise in a row is proposed
SETTLED_ROWS = 150  # a loss that was flat for so long and rises then does not rise by nature
REINIT_MOST = 1.5  # without a restart: further up is an explosion


class Group:
    """The channel events behind one event; `leader` is the loss where there is one."""

    __slots__ = ("cluster", "leader", "members", "number", "role", "row", "step")

    def __init__(self, role: Role, leader: ChannelEvent) -> None:
        self.role, self.leader = role, leader
        self.members = [leader]
        self.number: int | None = None  # None: held back until something makes it an event
        self.cluster = -1
        self.row = self.step = -1  # where it was published: the alarm

    @property
    def is_open(self) -> bool:
        """Whether one of the channel events still is open."""
        return not all(member.closed for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """Return the group as plain JSON values."""
        return {
            "number": self.number,
            "role": self.role.value,
            "cluster": self.cluster,
            "row": self.row,
            "step": self.step,
            "leader": self.members.index(self.leader),
            "members": [member.to_json() for member in self.members],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], channels: Mapping[str, Channel]) -> Self:
        """Rebuild a group; events that are open in their channel stay shared with it."""
        members = [_shared(ChannelEvent.from_json(member), channels) for member in record["members"]]
        group = cls(Role(record["role"]), members[record["leader"]])
        group.members, group.number, group.cluster = members, record["number"], record["cluster"]
        group.row, group.step = record["row"], record["step"]
        return group


class Fusion:
    """Fold channel events, in the order in which they happen, into events; `events` holds all of them by number."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.groups: list[Group] = []  # open or recent ones
        self.loss_events: list[int] = []  # numbers of events led by a loss, for clusters
        self.first_loss: float | None = None
        self.first_step = self.first_row = 0  # of the first loss
        self.crossings = 0  # how often the loss changed its sign: no cross-entropy does
        self.sign = 0.0
        self.objective = False  # rewards or objectives are logged: the loss need not fall
        self.lr_wrong = False  # the LR watch has an open mismatch: a lasting rise is proposed at once

    def note_loss(self, value: float, row: int, step: int) -> None:
        """Remember the first loss, and how often the loss crossed zero."""
        if self.first_loss is None:
            self.first_loss, self.first_row, self.first_step = value, row, step
        if value * self.sign < 0.0:
            self.crossings += 1
        if value != 0.0:
            self.sign = 1.0 if value > 0.0 else -1.0

    def begin_run(self) -> None:
        """Another run begins in this log: no earlier event belongs to it."""
        self.first_loss, self.crossings, self.sign = None, 0, 0.0
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
        group = self._group_of(item) or self._place(role, item, interval)
        if group.number is None:
            if not _is_publishable(group, row, self.events):
                return None
            self._publish(group, row, step, interval)
        number = group.number
        assert number is not None
        event = self._describe(group, number, interval, launch)
        marks = (ORDER,) * (event.kind is Kind.DATA_ORDER) + (PROVISIONAL,) * _is_provisional(group.leader)
        if number == len(self.events):
            event = replace(event, evidence=marks)
            self.events.append(event)
            return event
        known = self.events[number]
        event = replace(event, evidence=(*(line for line in known.evidence if line not in MARKS), *marks))
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

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "events": [event.to_json() for event in self.events],
            "loss_events": list(self.loss_events),
            "first_loss": self.first_loss,
            "lr_wrong": self.lr_wrong,
            "objective": self.objective,
            "first_step": self.first_step,
            "first_row": self.first_row,
            "crossings": self.crossings,
            "sign": self.sign,
            "groups": [group.to_json() for group in self.groups],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], channels: Mapping[str, Channel]) -> Self:
        """Rebuild the fusion over channels that are rebuilt already."""
        fusion = cls()
        fusion.events = [Event.from_json(event) for event in record["events"]]
        fusion.loss_events = list(record["loss_events"])
        fusion.first_loss, fusion.lr_wrong = record["first_loss"], record["lr_wrong"]
        fusion.objective = record["objective"]
        fusion.first_step, fusion.first_row = record["first_step"], record["first_row"]
        fusion.crossings, fusion.sign = record["crossings"], record["sign"]
        fusion.groups = [Group.from_json(group, channels) for group in record["groups"]]
        return fusion

    def _group_of(self, item: ChannelEvent) -> Group | None:
        for group in self.groups:
            if any(member.id == item.id and member.channel == item.channel for member in group.members):
                return group
        return None

    def _place(self, role: Role, item: ChannelEvent, interval: float) -> Group:
        """Join the group of the same incident, or begin one."""
        row = item.alarm_row
        self.groups = [g for g in self.groups if g.is_open or row - g.leader.alarm_row <= 4 * JOIN_ROWS]
        for group in reversed(self.groups):
            if _belongs(group, role, item):
                group.members.append(item)
                if role is Role.LOSS:
                    group.leader, group.role = item, role
                    if group.number is not None:
                        group.cluster = self._cluster_for(item, interval, group.number)
                        self.loss_events.append(group.number)
                return group
        self.groups.append(Group(role, item))
        return self.groups[-1]

    def _publish(self, group: Group, row: int, step: int, interval: float) -> None:
        number = len(self.events)
        group.number, group.row, group.step, group.cluster = number, row, step, number
        if group.role is Role.LOSS and group.leader.shape not in CLOSED_SHAPES:
            group.cluster = self._cluster_for(group.leader, interval, number)
            self.loss_events.append(number)

    def _cluster_for(self, item: ChannelEvent, interval: float, number: int) -> int:
        """Return the cluster of an event: that of an unresolved one before it, or of one that ended shortly before."""
        if not self.loss_events:
            return number
        reach = min(CLUSTER_MAX_ROWS, max(CLUSTER_STEPS / max(interval, 1e-9), CLUSTER_MIN_ROWS))
        chain = max(CHAIN_ROWS, CHAIN_ROWS / max(interval, 1e-9))
        for known in reversed(self.loss_events[-16:]):
            last = self.events[known]
            end = last.recovered_row
            if last.status is not Status.RECOVERED or end is None:
                if item.onset_row - last.alarm_row <= chain:
                    return last.cluster
            elif item.onset_row - end <= reach * (2 if self._size_of(last.cluster) >= 2 else 1):
                return last.cluster
        return number

    def _size_of(self, cluster: int, before: int | None = None) -> int:
        """How many events of a cluster count, of those before a number where one is given."""
        end = len(self.events) if before is None else min(before, len(self.events))
        events = (self.events[number] for number in self.loss_events if number < end)
        return sum(event.cluster == cluster and not event.is_lone and event.kind is not Kind.DATA_ORDER for event in events)

    def _describe(self, group: Group, number: int, interval: float, launch: int | None) -> Event:
        """Build the event from its channel events as they are now."""
        leader = group.leader
        first = leader
        reach = SUDDEN_ROWS if leader.shape == "instant" else JOIN_ROWS
        for member in group.members:
            if leader.alarm_row - reach <= member.onset_row < first.onset_row:
                first = member
        low = min(group.members, key=lambda member: member.onset_low_row)
        if leader.alarm_row - low.onset_low_row > 2 * JOIN_ROWS:
            low = leader
        known = self.events[number] if number < len(self.events) else None
        return Event(
            id=number, kind=self._kind(leader, group.role), tier=self._tier(group, number, known), status=leader.status,
            onset_step=first.onset_step, onset_low_step=low.onset_low_step, onset_row=first.onset_row,
            onset_low_row=low.onset_low_row, alarm_step=group.step, alarm_row=group.row,
            peak_step=leader.peak_step, peak_row=leader.peak_row, recovered_step=leader.recovered_step,
            recovered_row=leader.recovered_row, channels=_channels_of(group),
            cluster=group.cluster, launch=known.launch if known else launch, excess=leader.excess,
            sigmas=leader.sigmas, interval=interval,
        )  # fmt: skip

    def _kind(self, leader: ChannelEvent, role: Role = Role.LOSS) -> Kind:
        if role is Role.SPEED:
            return Kind.LEVEL_SHIFT
        if leader.shape == "nan":
            return Kind.NAN
        if role in OBJECTIVES:
            return Kind.INSTANT_SPIKE if leader.shape == "instant" and not leader.unresolved else Kind.LEVEL_SHIFT
        if leader.shape == "too-good":
            return Kind.TOO_GOOD
        if leader.shape == "drop":
            return Kind.RESUME_DROP if leader.after_restart else Kind.LEVEL_DROP
        if self._is_reinit(leader):
            return Kind.REINIT
        if leader.scattered and not leader.unresolved:
            return Kind.DATA_ORDER
        if leader.after_restart and not leader.unresolved:
            return Kind.RESUME_BUMP
        if leader.shape == "instant":
            return Kind.LEVEL_SHIFT if leader.unresolved else Kind.INSTANT_SPIKE
        return Kind.GRADUAL_DIVERGENCE

    def _is_reinit(self, leader: ChannelEvent) -> bool:
        """Whether the loss is back near its first value; without a restart it must also stay there."""
        if self.first_loss is None or leader.excess is None or leader.shape != "instant" or _is_provisional(leader):
            return False
        descent = self.first_loss - leader.level
        if descent <= 20.0 * leader.sigma or leader.excess <= REINIT_SHARE * descent:
            return False
        if leader.after_restart:
            return True
        if self._is_of_order(leader):
            return False
        stays = leader.unresolved or (leader.lasting and leader.status is not Status.RECOVERED)
        return stays and leader.excess <= REINIT_MOST * descent

    def _tier(self, group: Group, number: int, known: Event | None) -> Tier:
        """Return the tier; it never falls below what was recorded before."""
        leader, tier = group.leader, Tier.NOTICE
        if group.role is Role.LOSS:
            tier = self._loss_tier(group, number)
            if _is_provisional(leader) and tier is Tier.PROPOSE:
                tier = Tier.WARN
        elif group.role in OBJECTIVES:
            tier = _objective_tier(leader)
        elif group.role is not Role.SPEED and (leader.unresolved or (leader.persistent and not self._orders())):
            tier = Tier.WARN
        if known is not None and known.tier.rank > tier.rank:
            return known.tier
        return tier

    def _is_unstable(self, group: Group, number: int) -> bool:
        """Whether this is the third event of a cluster; outliers of a point or two do not count, nor does what came after."""
        leader = group.leader
        alone = leader.closed and leader.recovered_row is not None and leader.recovered_row - leader.onset_row <= LONE_ROWS
        if alone or not (leader.closed or leader.persistent or leader.lasting):
            return False
        if leader.shape == "gradual" and leader.crest <= leader.wander * leader.sigma:
            return False  # no higher than this run has drifted, and come back, by itself
        if leader.strays and not leader.lasting:
            return False  # in a run that wanders, what has not lasted is no sign of more
        if leader.local and leader.lasting and not _is_unusual(leader):
            return False
        if leader.closed:
            return self._size_of(group.cluster, number) + 1 >= UNSTABLE_EVENTS
        earlier = self.events[number] if number < len(self.events) else None
        return self._size_of(group.cluster) + (earlier is None or earlier.is_lone) >= UNSTABLE_EVENTS

    def _orders(self) -> list[Event]:
        """The events of this run that another order of the data explains, among the last ones."""
        known = (self.events[number] for number in self.loss_events[-16:] if number < len(self.events))
        return [event for event in known if event.kind is Kind.DATA_ORDER]

    def _is_of_order(self, leader: ChannelEvent) -> bool:
        """Whether an earlier event, no lower than this one, was of another order of the data: documents come in stretches."""
        before = (event.excess or 0.0 for event in self._orders() if (event.onset_row or 0) < leader.onset_row)
        top, peak = max(before, default=0.0), leader.excess or 0.0
        return not leader.unresolved and (0.0 < leader.crest <= top or 0.0 < peak <= AS_HIGH * top)

    def _need_not_fall(self, leader: ChannelEvent) -> bool:
        """Whether this loss moves by nature: among rewards, with changing sign, or rising since training began."""
        if self.objective or self.crossings >= CROSSINGS:
            return True
        if self.first_loss is None or self.first_step * BEGUN_SHARE > leader.alarm_step:
            return False
        risen = leader.level - self.first_loss
        early = leader.onset_row - self.first_row < SETTLED_ROWS
        return risen > RISEN_SIGMAS * leader.sigma or (early and risen > -NOT_FALLEN_SIGMAS * leader.sigma)

    def _loss_tier(self, group: Group, number: int) -> Tier:
        leader = group.leader
        if leader.shape != "nan" and self._need_not_fall(leader):
            return _objective_tier(leader)
        if leader.lasting and self.lr_wrong:
            return Tier.PROPOSE
        if leader.shape in ("drop", "too-good"):
            return Tier.WARN if leader.shape == "too-good" else Tier.NOTICE
        if leader.unresolved or (leader.after_restart and self._kind(leader) is Kind.REINIT):
            return Tier.PROPOSE
        if leader.shape == "nan":
            return Tier.WARN
        if self._kind(leader) in (Kind.RESUME_BUMP, Kind.DATA_ORDER):
            return Tier.NOTICE
        if self._is_of_order(leader):
            return Tier.NOTICE
        if self._is_unstable(group, number):
            lasts = leader.lasting and leader.shape == "gradual" and not leader.closed
            unusual = leader.height > UNUSUAL * leader.wander * leader.sigma  # than the run has drifted by itself
            return Tier.PROPOSE if lasts and unusual else Tier.WARN
        slow = leader.shape == "gradual"  # of which one batch with a large gradient tells nothing
        members = group.members
        exploded = any(m.decades and (m.excess or 0.0) >= EXPLODED_DECADES and (m.persistent or not slow) for m in members)
        stayed = leader.status is Status.PARTIAL and (leader.closed or leader.lasting)
        own = (leader.local or leader.overlaps) and not _is_unusual(leader)  # the run has drifted so far by itself
        return Tier.WARN if exploded or ((stayed or leader.status is Status.DIVERGING) and not own) else Tier.NOTICE


def _is_provisional(leader: ChannelEvent) -> bool:
    """Whether only the noise of another log interval tells this event: what is logged may have changed with it."""
    return leader.provisional and not leader.confirmed


def _is_unusual(leader: ChannelEvent) -> bool:
    """Whether an event rose above what the run has drifted by itself."""
    return leader.crest > UNUSUAL * leader.wander * leader.sigma


def _channels_of(group: Group) -> tuple[str, ...]:
    """The channel that decides first, the others by name: their order in the log says nothing."""
    return tuple(dict.fromkeys((group.leader.channel, *sorted(member.channel for member in group.members))))


OBJECTIVES = (Role.OBJECTIVE, Role.REWARD)
HIGHER = 2.0  # times the highest spike told of an objective: lower ones are its nature
EXPLODED_SIGMAS = 30.0  # of a reward or an objective: as far as no policy moves between two points


def _is_exploded(leader: ChannelEvent) -> bool:
    return leader.unresolved and leader.crest > max(EXPLODED_SIGMAS, 2.0 * leader.wander) * leader.sigma


def _objective_tier(leader: ChannelEvent) -> Tier:
    if leader.shape == "nan":
        return Tier.PROPOSE if leader.unresolved else Tier.WARN
    return Tier.WARN if _is_exploded(leader) else Tier.NOTICE


def _is_publishable(group: Group, row: int, told: Sequence[Event]) -> bool:
    """Whether a group is an event of its own: a loss always is, other channels when they last, a norm when it is far off."""
    leader = group.leader
    if group.role is Role.LOSS:
        return True
    if leader.shape in CLOSED_SHAPES:
        return False
    if group.role in OBJECTIVES:  # they move by nature: a spike higher than before is noted, a level that exploded or collapsed
        before = (abs(event.excess or 0.0) for event in told if event.channels[:1] == (leader.channel,))
        higher = leader.shape == "instant" and abs(leader.excess or 0.0) > HIGHER * max(before, default=0.0)
        return higher or leader.shape == "nan" or _is_exploded(leader)
    if group.role is Role.SPEED:  # one slow step is a save or an evaluation
        return leader.shape != "nan" and leader.unresolved and leader.height >= SLOW_DECADES
    if leader.shape == "nan":
        return leader.unresolved
    if group.role is Role.SOURCE:
        return leader.unresolved
    if leader.young:  # a norm falls or grows severalfold while a run or a log interval is young: it has no usual size yet
        return False
    slow = row - leader.onset_row > SLOW_NORM_ROWS  # a norm that grows for the whole run is no incident
    return leader.persistent or (leader.unresolved and leader.height >= (EXPLODED_DECADES if slow else FAR_DECADES))


def _belongs(group: Group, role: Role, item: ChannelEvent) -> bool:
    """Whether a channel event belongs to the incident of a group: other channel, close in time, no second spike."""
    leader = group.leader
    if item.respike or item.shape == "nan" or leader.respike or leader.shape == "nan":
        return False
    if any(member.channel == item.channel for member in group.members):
        return False
    if (role is Role.LOSS and group.role is Role.LOSS) or Role.SPEED in (role, group.role):
        return False
    age = item.alarm_row - leader.alarm_row
    return age <= 16 or (age <= JOIN_ROWS and group.is_open)


# --- Evidence: which data sources moved, and whether the mixture did

VIEW_POINTS = 16
MOVED_SIGMAS = 3.0
STILL_SIGMAS = 1.0
MIX_POINTS = 24  # points after the onset before a mixture is blamed
WEIGHT_CHANGE = 0.02
SOURCE_SHARE = 0.5  # of the total's rise: a source that moved so far explains the rise
MIXTURE = "no source moved as far as the total"
STANDARD_ERROR = 0.28  # of a difference of two means, 16 against 64 points, in units of one point's noise


@dataclass(frozen=True, slots=True)
class SourceView:
    """Names of the sources whose loss moved from its own reference, and of those that did not."""

    moved: tuple[str, ...]
    still: tuple[str, ...]


def view_sources(sources: Mapping[str, Channel], since_row: int) -> SourceView:
    """Compare the points since `since_row` of every source with the points before it."""
    moved, still = [], []
    for name, channel in sources.items():
        shift = _shift(channel, since_row)
        if shift is None:
            continue
        if shift >= MOVED_SIGMAS:
            moved.append(name)
        elif abs(shift) <= STILL_SIGMAS:
            still.append(name)
    return SourceView(tuple(moved), tuple(still))


def _shift(channel: Channel, since_row: int) -> float | None:
    """Return the mean after minus the mean before, in units of one point's noise; None without points on both sides.

    After means the first or the last points since then, whichever are higher: a spike is over when its event closes.
    """
    since = [item[3] for item in channel.buffer if item[0] >= since_row]
    after = max(since[:VIEW_POINTS], since[-VIEW_POINTS:], key=lambda part: math.fsum(part) / max(1, len(part)))
    before = [item[3] for item in channel.buffer if item[0] < since_row][-4 * VIEW_POINTS :]
    if not after or len(before) < VIEW_POINTS or channel.scale <= 0.0:
        return None
    return (math.fsum(after) / len(after) - math.fsum(before) / len(before)) / channel.scale


def source_sentence(view: SourceView) -> str | None:
    """Return `moved: loss/cm4; not loss/pmd`; None where the sources do not differ."""
    if not view.moved:
        return None
    if view.still:
        return f"moved: {', '.join(view.moved)}; not {', '.join(view.still)}"
    return f"all sources moved: {', '.join(view.moved)}" if len(view.moved) > 1 else None


def mixture_sentence(
    total: Channel, sources: Mapping[str, Channel], shares: Mapping[str, Sequence[tuple[int, float]]], since_row: int
) -> str | None:
    """Return a sentence where the mixture moved the total, "" where a source did, None where it cannot be known.

    The total is the sources' mean weighted by their shares. While the shares are constant, some source moves at least as
    far as the total (Kitagawa 1955). Where shares are logged they must have changed too.
    """
    since = [item for item in total.buffer if item[0] >= since_row]
    if len(sources) < 2 or not since:
        return None
    after = max(since[:VIEW_POINTS], since[-VIEW_POINTS:], key=lambda part: math.fsum(item[3] for item in part))
    window = after[0][0], after[-1][0]
    rise = _move(total, since_row, window)
    moves = [(_move(channel, since_row, window), channel.scale) for channel in sources.values()]
    if rise is None or any(move is None for move, _ in moves):
        return None
    if any((move or 0.0) + STANDARD_ERROR * scale > SOURCE_SHARE * rise for move, scale in moves):
        return ""
    changed = _changed_shares(shares, since_row)
    if shares and not changed:
        return ""
    return MIXTURE + (f"; changed shares: {', '.join(changed)}" if changed else "")


def _move(channel: Channel, since_row: int, window: tuple[int, int]) -> float | None:
    """The mean over the window of rows minus the mean before; None without enough points on both sides."""
    before = [item[3] for item in channel.buffer if item[0] < since_row][-4 * VIEW_POINTS :]
    after = [item[3] for item in channel.buffer if window[0] <= item[0] <= window[1]]
    if len(before) < VIEW_POINTS or not after or channel.scale <= 0.0:
        return None
    return math.fsum(after) / len(after) - math.fsum(before) / len(before)


def _shared(event: ChannelEvent, channels: Mapping[str, Channel]) -> ChannelEvent:
    """Return the channel's own object while the event is open: both sides must see its changes."""
    channel = channels.get(event.channel)
    for candidate in channel.events if channel else ():
        if candidate.id == event.id:
            return candidate
    return event


def _changed_shares(shares: Mapping[str, Sequence[tuple[int, float]]], since_row: int) -> tuple[str, ...]:
    """Names of mixture shares that differ by more than two per cent of the whole from what they were before the row."""
    names = []
    for name, points in shares.items():
        before = [value for row, value in points if row < since_row][-4 * VIEW_POINTS :]
        after = [value for row, value in points if row >= since_row]
        if before and after and abs(math.fsum(after) / len(after) - math.fsum(before) / len(before)) > WEIGHT_CHANGE:
            names.append(name)
    return tuple(names)
