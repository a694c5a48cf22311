"""The detector: processes logged points one by one; live and offline runs give the same answer.

    detector = Detector()
    for point in points:
        for event in detector.feed(point.step, point.values):
            ...                                # opened or changed by this point

Each channel folds alone (`channel.py`), the stream follows steps and launches, the watches follow LR, loss scale and
plateau, and the fusion makes events of what they find. `to_json` is the whole state: folded in two halves, or killed and
resumed at any point, the output is the same to the last byte.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollback.channels import EXPECTED_LR, JUDGED, Role, role_of, totality_of
from rollback.detect.channel import Channel
from rollback.detect.config import ChannelConfig
from rollback.detect.events import Event, Kind, Status, Tier
from rollback.detect.excursion import ChannelEvent
from rollback.detect.fusion import MARKS, MIX_POINTS, MIXTURE, Fusion, mixture_sentence, source_sentence, view_sources
from rollback.detect.stream import CONFIRM, ORDINARY, REPEATED, Placement, Stream
from rollback.detect.watches import (
    BLOCK_POINTS,
    BLOCKS,
    DisguiseWatch,
    LrFinding,
    LrWatch,
    PlateauWatch,
    ResumeWatch,
    ScaleWatch,
)

STATE_VERSION = 12
DECISIVE = JUDGED
EVIDENCE = (Role.NORM, Role.OTHER, Role.SPEED)
LOG_ROLES = (Role.NORM, Role.SPEED)
WATCHED_BESIDE = (Role.NORM, Role.LOSS_SCALE, Role.SKIPPED)
SINGLES = (Role.LOSS, Role.LR, *WATCHED_BESIDE)
MIX_KINDS = (Kind.INSTANT_SPIKE, Kind.GRADUAL_DIVERGENCE, Kind.LEVEL_SHIFT, Kind.REINIT, Kind.MIX_SHIFT)
RESTART_ROWS = 200  # an onset so soon after the start of a launch has that as evidence
SHARE_POINTS = 512  # of the mixture that are remembered
FRESH_ROWS = 4  # points that count as the start of a launch


Held = tuple[int, int, dict[str, float | None], int | None]  # row, step, values, launch


class UnknownState(ValueError):
    """A stored state has a version this detector does not know."""


class Detector:
    """Fold points into events; `events` are all so far, in order of opening.

    `role_of` says what a channel is, where a person knows it better than the table of names.
    """

    def __init__(self, config: ChannelConfig | None = None, role_of: Callable[[str], Role] = role_of) -> None:
        self.config = config or ChannelConfig()
        self._role_of = role_of
        self.row = 0
        self._stream = Stream()
        self._lr = LrWatch()
        self._lr_event: int | None = None
        self._scale = ScaleWatch()
        self._scale_event: int | None = None
        self._plateau = PlateauWatch()
        self._resume = ResumeWatch()
        self._disguise = DisguiseWatch()
        self._disguise_event: int | None = None
        self._singles: dict[Role, str] = {}  # the first channel of each role that the watches read
        self._name_singles()
        self._segment_row = -(10**9)
        self._rewound = False
        self._held: list[Held] = []  # points that wait until the log interval is known
        self._shares: dict[str, deque[tuple[int, float]]] = {}  # the mixture's recent shares by row
        self._fusion = Fusion()
        self._channels: dict[str, Channel] = {}
        self._evidence: dict[str, Channel] = {}
        self._roles: dict[str, Role] = {}
        self._parts: dict[str, None] = {}  # parts of a loss that decide because no total has been logged

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in order of opening."""
        return tuple(self._fusion.events)

    def skip_to(self, row: int) -> None:
        """Count the rows before `row` as read: the log holds rows that are no points."""
        if row > self.row:
            self.row = row

    def feed(
        self, step: int, values: Mapping[str, float | None], *, time: float | None = None, launch: int | None = None
    ) -> list[Event]:
        """Fold one logged point; returns the events that it opened or changed. A value of None was not recorded."""
        row = self.row
        self.row = row + 1
        changed: list[Event] = []
        placement = self._stream.feed(step, launch)
        if placement is not ORDINARY or self._held:
            if placement.unsettled and len(self._held) < CONFIRM - 1 and _are_finite(values):
                self._held.append((row, step, dict(values), launch))
                return changed
            held, self._held = self._held, []
            if placement.new_interval:
                self._place(placement, row, step, launch, changed)
            for point in held:
                self._fold(*point, False, changed)
            if placement is not REPEATED and not placement.new_interval:
                self._place(placement, row, step, launch, changed)
            if placement.foreign:
                return changed
        self._fold(row, step, values, launch, placement.repeated, changed)
        return changed

    def _fold(
        self, row: int, step: int, values: Mapping[str, float | None], launch: int | None, repeated: bool,
        changed: list[Event],
    ) -> None:  # fmt: skip
        """Fold the values of a point whose place is known into its channels and watches."""
        roles, channels = self._roles, self._channels
        if not roles.keys() >= values.keys():
            for name, value in values.items():
                if name not in roles and value is not None:
                    self._meet(name)
        for name, value in values.items():
            if value is None:
                continue
            role = roles[name]
            channel = channels.get(name)
            if channel is None:
                if role is Role.LR:
                    self._watch_lr(row, step, launch, value, values, changed)
                elif role is Role.LOSS_SCALE and not repeated:
                    self._watch_scale(row, step, launch, name, value, changed)
                elif role is Role.WEIGHT:
                    self._shares.setdefault(name, deque(maxlen=SHARE_POINTS)).append((row, value))
                continue
            if role is Role.LOSS and value - value == 0.0 and not repeated:
                if value * self._fusion.sign <= 0.0 or self._fusion.first_loss is None:  # else there is nothing to note
                    self._fusion.note_loss(value, row, step)
                if name == self._lead:
                    if self._resume.count >= 0 or channel.excursion is not None:
                        self._watch_resume(row, step, launch, name, value, changed)
                    else:
                        self._resume.past.append((step, value))
                plateau = self._plateau
                plateau.total += value
                plateau.count += 1
                if plateau.count >= BLOCK_POINTS and plateau.end_block():
                    self._note_plateau(row, step, launch, name, changed)
            if repeated and channel.last_step == step and value - value == 0.0:
                continue
            items = channel.feed(row, step, value)
            if items:
                self._fuse(role, items, row, step, launch, changed)
        self._feed_evidence(row, step, launch, values, repeated, changed)
        if not repeated and self._lead is not None:
            loss, norm = values.get(self._lead), self._norm
            if loss is None or self._counted or not self._disguise.pass_by(
                step, loss, normed=norm is not None and values.get(norm) is not None
            ):
                self._watch_disguise(row, step, launch, values, changed)

    def _feed_evidence(
        self, row: int, step: int, launch: int | None, values: Mapping[str, float | None], repeated: bool,
        changed: list[Event],
    ) -> None:  # fmt: skip
        """Fold norms and throughput after the losses of the same point, so that they can be folded in another process."""
        for name, channel in self._evidence.items():
            value = values.get(name)
            if value is None or (repeated and channel.last_step == step and value - value == 0.0):
                continue
            items = channel.feed(row, step, value)
            if items:
                self._fuse(self._roles[name], items, row, step, launch, changed)

    def finish(self) -> list[Event]:
        """Judge the events that are still open by their last points: the log is complete. Not part of the fold."""
        changed: list[Event] = []
        held, self._held = self._held, []
        for point in held:
            self._fold(*point, False, changed)
        stream = self._stream
        last_step = stream.last_step if stream.last_step is not None else 0
        for name, channel in (*self._channels.items(), *self._evidence.items()):
            self._fuse(self._roles[name], channel.finish(), self.row - 1, last_step, stream.last_launch, changed)
        return changed

    def _meet(self, name: str) -> Role:
        """Decide the role of a new channel. Of several losses the total leads, the others are parts of it.

        Without any total every part decides for itself. Among rewards and objectives a loss is an objective, too.
        """
        role = self._role_of(name)
        if role is Role.LOSS:
            lead = next((known for known, has in self._roles.items() if has is Role.LOSS and known not in self._parts), None)
            for part in self._parts:
                self._roles[part] = Role.SOURCE
            self._parts.clear()
            if lead is not None and totality_of(name) < totality_of(lead):
                self._roles[lead] = Role.SOURCE
                self._fusion.first_loss = None
            elif lead is not None:
                role = Role.SOURCE
        elif role is Role.SOURCE and (self._parts or Role.LOSS not in self._roles.values()):
            self._parts[name] = None
            role = Role.LOSS
        elif role in (Role.OBJECTIVE, Role.REWARD):
            self._fusion.objective = True
        self._roles[name] = role
        if role in SINGLES and (role not in self._singles or role is Role.LOSS):
            self._singles[role] = name
            self._name_singles()
        if role in DECISIVE:
            self._channels[name] = Channel(name, self._config_for(role))
        elif role in EVIDENCE:
            self._evidence[name] = Channel(name, self._config_for(role))
        return role

    def _name_singles(self) -> None:
        """Keep what each point is asked for at hand."""
        self._lead, self._norm = self._singles.get(Role.LOSS), self._singles.get(Role.NORM)
        self._counted = Role.SKIPPED in self._singles or Role.LOSS_SCALE in self._singles

    def _config_for(self, role: Role) -> ChannelConfig:
        if role is Role.REWARD:
            return replace(self.config, falling=True)
        if role not in LOG_ROLES:
            return self.config
        return replace(
            self.config, log=True, falling=role is Role.SPEED, floor_fraction=0.02, level_fraction=0.0, high_fraction=math.inf
        )

    def _place(
        self, placement: Placement, row: int, step: int, launch: int | None, changed: list[Event]
    ) -> None:
        """Handle a point of another launch, log interval or writer."""
        if placement.interleaved:
            sentence = "two writers append to this log: only the one with the higher steps is scanned"
            changed.append(
                self._add(Kind.INTERLEAVED_WRITERS, Tier.WARN, row, step, launch, (), sentence, closed=True)
            )
        if not placement.segment_start and not placement.new_interval:
            return
        if placement.segment_start:
            self._segment_row = row
            self._resume.restart(row, step, rewound=placement.rewound_from is not None)
            self._scale.restart()
            self._rewound = placement.rewound_from is not None
        for name, channel in (*self._channels.items(), *self._evidence.items()):
            items = channel.begin_segment(
                row, step, new_interval=placement.new_interval, rewound=placement.rewound_from is not None,
                denser=placement.denser,
            )  # fmt: skip
            self._fuse(self._roles[name], items, row, step, launch, changed)
        if placement.rewound_from is not None:
            self._fusion.forget_after(step)
            sentence = f"step goes back from {placement.rewound_from} to {step}"
            if placement.another_run:
                self._begin_another_run()
                sentence += ": another run begins"
            changed.append(self._add(Kind.RESTART_REWIND, Tier.NOTICE, row, step, launch, (), sentence, closed=True))

    def _begin_another_run(self) -> None:
        """Forget what was usual: the points that follow are of another run in the same log."""
        for channels in (self._channels, self._evidence):
            for name, channel in channels.items():
                channels[name] = Channel(name, channel.config)
                channels[name].next_id = channel.next_id
        self._lr, self._scale, self._plateau, self._disguise = LrWatch(), ScaleWatch(), PlateauWatch(), DisguiseWatch()
        self._resume = ResumeWatch()
        self._lr_event = self._scale_event = self._disguise_event = None
        self._fusion.begin_run()

    def _watch_lr(
        self, row: int, step: int, launch: int | None, value: float, values: Mapping[str, float | None],
        changed: list[Event],
    ) -> None:  # fmt: skip
        age = row - self._segment_row
        finding = self._lr.feed(
            value, values.get(EXPECTED_LR), step=step, fresh=age < FRESH_ROWS, rewound=self._rewound and age == 0
        )
        if finding is None:
            return
        self._fusion.lr_wrong = finding.begins
        if finding.begins:
            event = self._add(Kind.LR_MISMATCH, lr_tier(finding), row, step, launch, ("lr",), finding.sentence)
            event = self._fusion.change(event.id, expected=finding.expected)
            self._lr_event = event.id
        elif self._lr_event is not None:
            event = self._fusion.change(
                self._lr_event, status=Status.RECOVERED, recovered_row=row, recovered_step=step
            )
            self._lr_event = None
        else:
            return
        changed.append(event)

    def _watch_resume(
        self, row: int, step: int, launch: int | None, name: str, value: float, changed: list[Event]
    ) -> None:
        channel = self._channels[name]
        troubled = channel.excursion is not None
        finding = self._resume.feed(step, value, channel.scale, troubled=troubled)
        if finding is None:
            return
        since = finding.row
        if any(name in e.channels and (e.onset_row or 0) >= since - 1 for e in self._fusion.events[-8:]):
            return  # the channel has seen it by itself
        kind = Kind.RESUME_BUMP if finding.excess > 0.0 else Kind.RESUME_DROP
        event = self._add(kind, Tier.NOTICE, row, step, launch, (name,), finding.sentence, closed=True)
        event = self._fusion.change(
            event.id, onset_row=finding.row, onset_low_row=finding.row, onset_step=finding.step, onset_low_step=finding.step,
            excess=finding.excess, sigmas=finding.sigmas,
        )  # fmt: skip
        changed.append(event)

    def _watch_disguise(
        self, row: int, step: int, launch: int | None, values: Mapping[str, float | None], changed: list[Event]
    ) -> None:
        one = self._singles
        lead = one[Role.LOSS]
        channel = self._channels[lead]
        norm, scale, skipped = (values.get(one[role]) if role in one else None for role in WATCHED_BESIDE)
        told = not values or norm is not None or skipped is not None
        told = told or (Role.LR in one and values.get(one[Role.LR]) is not None)
        finding = self._disguise.feed(
            row, step, loss=values.get(lead), norm=norm, scale=scale, skipped=skipped, level=channel.middle,
            noise=channel.scale, told=told, before=lambda: [item[3] for item in channel.buffer],
        )  # fmt: skip
        if finding is None:
            return
        if finding.begins:
            event = self._add(Kind.NAN, Tier.PROPOSE, row, step, launch, (lead,), finding.sentence)
            event = self._fusion.change(
                event.id, status=Status.DIVERGING, onset_row=finding.row, onset_low_row=finding.row, onset_step=finding.step,
                onset_low_step=min(finding.step, finding.sound_step + 1),
            )  # fmt: skip
            self._disguise_event = event.id
        elif self._disguise_event is not None:
            event = self._fusion.change(
                self._disguise_event, status=Status.RECOVERED, recovered_row=row, recovered_step=step
            )
            self._disguise_event = None
        else:
            return
        changed.append(event)

    def _watch_scale(
        self, row: int, step: int, launch: int | None, name: str, value: float, changed: list[Event]
    ) -> None:
        finding = self._scale.feed(row, step, value)
        if finding is None:
            return
        if finding.begins:
            event = self._add(Kind.LEVEL_SHIFT, Tier.WARN, row, step, launch, (name,), finding.sentence)
            event = self._fusion.change(
                event.id, onset_row=finding.row, onset_low_row=finding.row, onset_step=finding.step,
                onset_low_step=finding.step,
            )  # fmt: skip
            self._scale_event = event.id
        elif self._scale_event is not None:
            event = self._fusion.change(
                self._scale_event, status=Status.RECOVERED, recovered_row=row, recovered_step=step
            )
            self._scale_event = None
        else:
            return
        changed.append(event)

    def _add(
        self, kind: Kind, tier: Tier, row: int, step: int, launch: int | None, channels: tuple[str, ...],
        sentence: str, *, closed: bool = False,
    ) -> Event:  # fmt: skip
        status = Status.RECOVERED if closed else Status.OPEN
        return self._fusion.add(
            Event(
                id=0, kind=kind, tier=tier, status=status, onset_step=step, onset_low_step=step, onset_row=row,
                onset_low_row=row, alarm_step=step, alarm_row=row, recovered_row=row if closed else None,
                recovered_step=step if closed else None, channels=channels, launch=launch,
                interval=self._stream.interval, evidence=(sentence,),
            )
        )  # fmt: skip

    def _fuse(
        self, role: Role, items: list[ChannelEvent], row: int, step: int, launch: int | None, changed: list[Event]
    ) -> None:
        interval = self._stream.interval
        for item in items:
            event = self._fusion.feed(role, item, row=row, step=step, interval=interval, launch=launch)
            if event is not None:
                changed.append(self._attribute(event, row) if role is Role.LOSS else event)

    def _attribute(self, event: Event, row: int) -> Event:
        """Add evidence to an event of the loss; name the mixture as its kind where no source moved."""
        onset = event.onset_row if event.onset_row is not None else row
        evidence: dict[str, None] = {}
        sources = {name: self._channels[name] for name, role in self._roles.items() if role is Role.SOURCE}
        view = view_sources(sources, onset)
        sentence = source_sentence(view)
        if sentence is not None:
            evidence[sentence] = None
        if 0 <= onset - self._segment_row <= RESTART_ROWS:
            evidence[f"a launch began {onset - self._segment_row} points before the onset"] = None
        if self._lr_event is not None:
            evidence[self._fusion.events[self._lr_event].evidence[0]] = None
        kind = event.kind
        if event.kind in MIX_KINDS and row - onset >= MIX_POINTS:
            total = next(self._channels[name] for name, role in self._roles.items() if role is Role.LOSS)
            sentence = mixture_sentence(total, sources, self._shares, onset)
            if sentence is None:  # the points before the onset are forgotten by now: the earlier finding holds
                sentence = next((line for line in event.evidence if line.startswith(MIXTURE)), None)
            if sentence:
                kind, evidence = Kind.MIX_SHIFT, {**evidence, sentence: None}
        if not evidence and kind is event.kind:
            return event
        evidence |= dict.fromkeys(line for line in event.evidence if line in MARKS)
        tier = Tier.WARN if kind is Kind.MIX_SHIFT and event.tier is Tier.PROPOSE else event.tier
        return self._fusion.change(event.id, evidence=tuple(evidence), kind=kind, tier=tier)

    def _note_plateau(self, row: int, step: int, launch: int | None, name: str, changed: list[Event]) -> None:
        sentence = f"no significant fall over the last {BLOCKS * BLOCK_POINTS} points"
        changed.append(self._add(Kind.PLATEAU, Tier.NOTICE, row, step, launch, (name,), sentence, closed=True))

    def to_json(self) -> dict[str, Any]:
        """The whole state as plain JSON values; floats keep every bit through repr."""
        return {
            "v": STATE_VERSION,
            "row": self.row,
            "stream": self._stream.to_json(),
            "lr": self._lr.to_json(),
            "lr_event": self._lr_event,
            "scale": self._scale.to_json(),
            "scale_event": self._scale_event,
            "plateau": self._plateau.to_json(),
            "disguise": self._disguise.to_json(),
            "resume": self._resume.to_json(),
            "disguise_event": self._disguise_event,
            "singles": {role.value: name for role, name in self._singles.items()},
            "segment_row": self._segment_row,
            "rewound": self._rewound,
            "held": [list(point) for point in self._held],
            "shares": {name: [list(item) for item in points] for name, points in self._shares.items()},
            "roles": {name: role.value for name, role in self._roles.items()},
            "parts": list(self._parts),
            "channels": [channel.to_json() for channel in (*self._channels.values(), *self._evidence.values())],
            "fusion": self._fusion.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], config: ChannelConfig | None = None) -> Detector:
        """Rebuild a detector; raises UnknownState for a version that is not known."""
        if record.get("v") != STATE_VERSION:
            raise UnknownState(f"detector state version {record.get('v')!r}: expected {STATE_VERSION}")
        detector = cls(config)
        detector.row = record["row"]
        detector._stream = Stream.from_json(record["stream"])
        detector._lr = LrWatch.from_json(record["lr"])
        detector._lr_event = record["lr_event"]
        detector._scale = ScaleWatch.from_json(record["scale"])
        detector._scale_event = record["scale_event"]
        detector._plateau = PlateauWatch.from_json(record["plateau"])
        detector._resume = ResumeWatch.from_json(record["resume"])
        detector._disguise = DisguiseWatch.from_json(record["disguise"])
        detector._disguise_event = record["disguise_event"]
        detector._singles = {Role(role): name for role, name in record["singles"].items()}
        detector._name_singles()
        detector._segment_row = record["segment_row"]
        detector._rewound = record["rewound"]
        detector._held = [(row, step, values, launch) for row, step, values, launch in record["held"]]
        for name, points in record["shares"].items():
            detector._shares[name] = deque(((row, value) for row, value in points), maxlen=SHARE_POINTS)
        detector._roles = {name: Role(role) for name, role in record["roles"].items()}
        detector._parts = dict.fromkeys(record["parts"])
        for stored in record["channels"]:
            role = detector._roles[stored["name"]]
            place = detector._evidence if role in EVIDENCE else detector._channels
            place[stored["name"]] = Channel.from_json(detector._config_for(role), stored)
        detector._fusion = Fusion.from_json(record["fusion"], {**detector._channels, **detector._evidence})
        return detector


def lr_tier(finding: LrFinding) -> Tier:
    """Propose where the LR differs from a promised one; warn where it only looks wrong against the run's own past."""
    return Tier.PROPOSE if finding.expected is not None else Tier.WARN



def _are_finite(values: Mapping[str, float | None]) -> bool:
    return all(value is None or value - value == 0.0 for value in values.values())
