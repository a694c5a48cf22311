"""The detector: processes logged points one by one; live and offline runs give the same answer.

    detector = Detector()
    for point in points:
        for event in detector.feed(point.step, point.values):
            ...                                # opened or changed by this point

Each channel folds alone (`channel.py`), the stream follows steps and launches, the watches follow LR, loss scale, hidden
NaN, resumes and plateaus, and the fusion makes events of what they find. A detector that was pickled between two
points goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollback.channels import EXPECTED_LR, JUDGED, Role, role_of, totality_of
from rollback.detect.channel import Channel
from rollback.detect.constants import JOIN_ROWS
from rollback.detect.events import Event, Kind, Status, Tier
from rollback.detect.fusion import MARKS, Fusion
from rollback.detect.stream import CONFIRM, ORDINARY, REPEATED, Placement, Stream
from rollback.detect.watches import Finding
from rollback.detect.watches.hidden import HiddenWatch
from rollback.detect.watches.lr import LrWatch
from rollback.detect.watches.mixture import MIX_POINTS, MIXTURE, is_mixture, source_sentence
from rollback.detect.watches.plateau import BLOCK_POINTS, SENTENCE, PlateauWatch
from rollback.detect.watches.resume import ResumeWatch
from rollback.detect.watches.scale import ScaleWatch

FOLDED = (*JUDGED, Role.NORM, Role.OTHER, Role.SPEED)  # the losses of a point first
IN_DECADES = (Role.NORM, Role.SPEED)
SINGLES = (Role.LOSS, Role.LR, Role.NORM, Role.LOSS_SCALE, Role.SKIPPED)
MIX_KINDS = (Kind.INSTANT_SPIKE, Kind.GRADUAL_DIVERGENCE, Kind.LEVEL_SHIFT, Kind.REINIT, Kind.MIX_SHIFT)
FRESH_ROWS = 4  # points that count as the start of a launch

Values = Mapping[str, float | None]


class Detector:
    """Fold points into events; `events` are all so far, in order of opening.

    `role_of` says what a channel is, where a person knows it better than the table of names.
    """

    def __init__(self, role_of: Callable[[str], Role] = role_of) -> None:
        self._role_of = role_of
        self.row = 0
        self._step = 0
        self._launch: int | None = None
        self._changed: list[Event] = []
        self._stream = Stream()
        self._fusion = Fusion()
        self._channels: dict[str, Channel] = {}
        self._roles: dict[str, Role] = {}
        self._parts: dict[str, None] = {}  # parts of a loss that decide because no total has been logged
        self._singles: dict[Role, str] = {}  # the first channel of each role that the watches read
        self._held: list[tuple[int, int, Values, int | None]] = []  # points that wait until the log interval is known
        self._segment_row = -(10**9)
        self._rewound = False
        self._opened: dict[str, int] = {}  # the open event of each watch
        self._begin_watches()

    def _begin_watches(self) -> None:
        self._lr, self._scale, self._hidden = LrWatch(), ScaleWatch(), HiddenWatch()
        self._plateau, self._resume = PlateauWatch(), ResumeWatch()
        self._opened.clear()

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, in order of opening."""
        return tuple(self._fusion.events)

    def skip_to(self, row: int) -> None:
        """Count the rows before `row` as read: the log holds rows that are no points."""
        if row > self.row:
            self.row = row

    def feed(self, step: int, values: Values, *, time: float | None = None, launch: int | None = None) -> list[Event]:
        """Fold one logged point; returns the events that it opened or changed. A value of None was not recorded."""
        row = self.row
        self.row = row + 1
        self._changed = []
        placement = self._stream.feed(step, launch)
        if placement is not ORDINARY or self._held:
            if placement.unsettled and len(self._held) < CONFIRM - 1:
                self._held.append((row, step, dict(values), launch))
                return self._changed
            if placement.new_interval:
                self._place(placement, row, step, launch)
            self._fold_held()
            if placement is not REPEATED and not placement.new_interval:
                self._place(placement, row, step, launch)
        if not placement.foreign:
            self._fold(row, step, values, launch, placement.repeated)
        return self._changed

    def finish(self) -> list[Event]:
        """Judge the events that are still open by their last points: the log is complete. Not part of the fold."""
        self._changed = []
        self._fold_held()
        for name, channel in self._channels.items():
            channel.finish()
            self._fuse(self._roles[name], channel, self.row - 1)
        return self._changed

    # --- One point

    def _fold_held(self) -> None:
        held, self._held = self._held, []
        for point in held:
            self._fold(*point, False)

    def _fold(self, row: int, step: int, values: Values, launch: int | None, repeated: bool) -> None:
        """Fold the values of a point whose place is known into its channels and watches."""
        roles = self._roles
        for name, value in values.items():
            if name not in roles and value is not None:
                self._meet(name)
        self._step, self._launch = step, launch
        for name, channel in self._channels.items():
            value = values.get(name)
            if value is None or (repeated and channel.last_step == step and value - value == 0.0):
                continue
            channel.feed(row, step, value)
            if channel.changed:
                self._fuse(roles[name], channel, row)
        if repeated:
            return
        one = self._singles
        lead = one.get(Role.LOSS)
        if lead is not None:
            self._watch_loss(row, step, values, lead)
        if len(roles) == len(self._channels):
            return
        if Role.LR in one and (lr := values.get(one[Role.LR])) is not None:
            age = row - self._segment_row
            fresh, rewound = age < FRESH_ROWS, self._rewound and age == 0
            finding = self._lr.feed(lr, values.get(EXPECTED_LR), row=row, step=step, fresh=fresh, rewound=rewound)
            self._fusion.lr_wrong = self._lr.mismatch
            self._tell("lr", finding, "lr", row)
        if Role.LOSS_SCALE in one and (scale := values.get(one[Role.LOSS_SCALE])) is not None:
            self._tell("scale", self._scale.feed(row, step, scale), one[Role.LOSS_SCALE], row)

    def _watch_loss(self, row: int, step: int, values: Values, lead: str) -> None:
        """Feed the watches of the leading loss."""
        loss, channel, one = values.get(lead), self._channels[lead], self._singles
        if loss is not None and loss - loss == 0.0:
            if self._fusion.first_loss is None:
                self._fusion.first_loss = loss
            if self._resume.count < 0 and channel.life is None:
                self._resume.past.append((step, loss))
            else:
                self._watch_resume(row, step, loss, lead, channel)
            plateau = self._plateau
            plateau.total += loss
            plateau.count += 1
            if plateau.count >= BLOCK_POINTS and plateau.end_block():
                flat = Finding(kind=Kind.PLATEAU, sentence=SENTENCE, row=row, step=step, status=Status.RECOVERED)
                self._tell("plateau", flat, lead, row)
        norm = values.get(one[Role.NORM]) if Role.NORM in one else None
        counted = Role.SKIPPED in one
        if loss is not None and not counted and self._hidden.pass_by(step, loss, normed=norm is not None):
            return
        skipped = values.get(one[Role.SKIPPED]) if counted else None
        lr = values.get(one[Role.LR]) if Role.LR in one else None
        told = not values or norm is not None or skipped is not None or lr is not None
        finding = self._hidden.feed(
            row, step, loss=loss, norm=norm, skipped=skipped, level=channel.middle, noise=channel.scale, told=told
        )
        self._tell("hidden", finding, lead, row)

    def _watch_resume(self, row: int, step: int, loss: float, lead: str, channel: Channel) -> None:
        finding = self._resume.feed(step, loss, channel.scale, troubled=channel.life is not None)
        if finding is None:
            return
        seen = [event for event in self._fusion.events[-8:] if lead in event.channels]
        if not any((event.onset_row or 0) >= finding.row - 1 for event in seen):  # else the channel has seen it by itself
            self._tell("resume", finding, lead, row)

    # --- Channels

    def _meet(self, name: str) -> None:
        """Decide the role of a new channel. Of several losses the total leads, the others are parts of it.

        Without any total every part decides for itself. Among rewards and objectives a loss is an objective, too.
        """
        role = self._role_of(name)
        if role is Role.LOSS:
            role = self._meet_loss(name)
        elif role is Role.SOURCE and (self._parts or Role.LOSS not in self._roles.values()):
            self._parts[name] = None
            role = Role.LOSS
        elif role in (Role.OBJECTIVE, Role.REWARD):
            self._fusion.objective = True
        self._roles[name] = role
        if role in SINGLES and (role not in self._singles or role is Role.LOSS):
            self._singles[role] = name
        if role in FOLDED:
            log, falling = role in IN_DECADES, role in (Role.REWARD, Role.SPEED)
            self._channels[name] = Channel(name, log=log, falling=falling)
            ordered = sorted(self._channels.items(), key=lambda item: self._roles[item[0]] not in JUDGED)
            self._channels = dict(ordered)

    def _meet_loss(self, name: str) -> Role:
        leads = [known for known, role in self._roles.items() if role is Role.LOSS and known not in self._parts]
        for part in self._parts:
            self._roles[part] = Role.SOURCE
        self._parts.clear()
        if leads and totality_of(name) >= totality_of(leads[0]):
            return Role.SOURCE
        if leads:
            self._roles[leads[0]] = Role.SOURCE
            self._fusion.first_loss = None
        return Role.LOSS

    def _place(self, placement: Placement, row: int, step: int, launch: int | None) -> None:
        """Handle a point of another launch, log interval or writer."""
        self._step, self._launch = step, launch
        if placement.interleaved:
            sentence = "two writers append to this log: only the one with the higher steps is scanned"
            self._note(Kind.INTERLEAVED_WRITERS, Tier.WARN, sentence, row)
        if not placement.segment_start and not placement.new_interval:
            return
        back_from = placement.rewound_from
        rewound = back_from is not None
        if placement.segment_start:
            self._segment_row, self._rewound = row, rewound
            self._resume.restart(row, step, rewound=rewound)
            self._scale.restart()
        for name, channel in self._channels.items():
            channel.begin_segment(
                row, step, new_interval=placement.new_interval, rewound=rewound, denser=placement.denser
            )
            self._fuse(self._roles[name], channel, row)
        if not rewound:
            return
        self._fusion.forget_after(step)
        sentence = f"step goes back from {back_from} to {step}"
        if placement.another_run:
            self._begin_another_run()
            sentence += ": another run begins"
        self._note(Kind.RESTART_REWIND, Tier.NOTICE, sentence, row)

    def _begin_another_run(self) -> None:
        """Forget what was usual: the points that follow are of another run in the same log."""
        for name, channel in self._channels.items():
            self._channels[name] = Channel(name, log=channel.log, falling=channel.falling)
        self._begin_watches()
        self._fusion.begin_run()

    # --- Events

    def _note(self, kind: Kind, tier: Tier, sentence: str, row: int) -> None:
        """Tell of something that is over when it is found."""
        finding = Finding(kind=kind, tier=tier, sentence=sentence, row=row, step=self._step, status=Status.RECOVERED)
        self._tell("stream", finding, "", row)

    def _tell(self, watch: str, finding: Finding | None, channel: str, row: int) -> None:
        """Make an event of what a watch found, or end the one that it began."""
        if finding is None:
            return
        step = self._step
        if finding.ends:
            number = self._opened.pop(watch, None)
            if number is not None:
                over = self._fusion.change(number, status=Status.RECOVERED, recovered_row=row, recovered_step=step)
                self._changed.append(over)
            return
        closed = finding.status is Status.RECOVERED
        low_step = finding.step if finding.low_step is None else finding.low_step
        event = self._fusion.add(
            Event(
                id=0, kind=finding.kind, tier=finding.tier, status=finding.status, onset_step=finding.step,
                onset_low_step=low_step, onset_row=finding.row, onset_low_row=finding.row, alarm_step=step, alarm_row=row,
                recovered_row=row if closed else None, recovered_step=step if closed else None,
                channels=(channel,) if channel else (), launch=self._launch, excess=finding.excess, sigmas=finding.sigmas,
                interval=self._stream.interval, expected=finding.expected, evidence=(finding.sentence,),
            )
        )  # fmt: skip
        if not closed:
            self._opened[watch] = event.id
        self._changed.append(event)

    def _fuse(self, role: Role, channel: Channel, row: int) -> None:
        items, channel.changed = channel.changed, []
        for item in items:
            event = self._fusion.feed(
                role, item, row=row, step=self._step, interval=self._stream.interval, launch=self._launch
            )
            if event is not None:
                self._changed.append(self._attribute(event, row) if role is Role.LOSS else event)

    def _attribute(self, event: Event, row: int) -> Event:
        """Add evidence to an event of the loss; name the mixture as its kind where no source moved."""
        onset = event.onset_row if event.onset_row is not None else row
        sources = {name: self._channels[name] for name, role in self._roles.items() if role is Role.SOURCE}
        moved = source_sentence(sources, onset)
        evidence = [] if moved is None else [moved]
        if 0 <= onset - self._segment_row <= JOIN_ROWS:
            evidence.append(f"a launch began {onset - self._segment_row} points before the onset")
        if "lr" in self._opened:
            evidence.append(self._fusion.events[self._opened["lr"]].evidence[0])
        kind, tier = event.kind, event.tier
        if kind in MIX_KINDS and row - onset >= MIX_POINTS:
            total = next(self._channels[name] for name, role in self._roles.items() if role is Role.LOSS)
            mixed = is_mixture(total, sources, onset)
            if mixed is None:  # the points before the onset are forgotten by now: the earlier finding holds
                mixed = MIXTURE in event.evidence
            if mixed:
                kind = Kind.MIX_SHIFT
                tier = Tier.WARN if tier is Tier.PROPOSE else tier
                evidence.append(MIXTURE)
        if not evidence and kind is event.kind:
            return event
        evidence += [line for line in event.evidence if line.startswith(MARKS)]
        return self._fusion.change(event.id, evidence=tuple(dict.fromkeys(evidence)), kind=kind, tier=tier)
