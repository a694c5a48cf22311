"""Standing still: notice that a launch makes no progress, find out which rank the others wait for, and say so.

    signs of progress ─ silent beyond its rhythm ─ looked at for 9 s ─┬─ works (its stack changes, data moves): left alone
                                                                      └─ stands: stacks of all ranks, an incident `stall`

Silence alone is no alarm: saves, evaluations, compilation and first steps are silent too. A rank stands when it uses no CPU and
moves no data, when it is stopped, or when it uses the CPU without leaving its function. It works when data moves, when its own
processes work, or when its stack changes. A launch stands when no silent rank works. What is unknown is no alarm, and is shown.

`StallWatch.tick` is called once a second and never waits: an answer is read at a later tick.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.journal.events import Incident
from chronicle.launch.processes import Process, read_command, read_environment, walk_children
from chronicle.launch.pulse import Announcement, Pulse, ask_for_stacks, read_announcements, read_pulses
from chronicle.launch.ranks import rank_of
from chronicle.launch.rhythm import Rhythm, Silences
from chronicle.launch.stacks import (
    IDLE_CPU,
    PATIENT_SECONDS,
    Autopsy,
    ProcessReading,
    RankDoing,
    Stack,
    Stand,
    judge_rank,
    judge_stands,
    look_at,
    main_stack,
    parse_dump,
)

WINDOW_SECONDS = 8.5
SAMPLE_SECONDS = 0.9  # between two stacks of a rank that uses the CPU
ANSWER_SECONDS = 0.9  # until a dump is read
PAUSES = (2.0, 5.0, 10.0, 30.0, 60.0)  # between two looks at ranks that work
QUIET_SECONDS = 5.0  # a silence that `status` shows
LONGEST_SECONDS = 3600.0  # of work without a step
LAUNCHERS = re.compile(
    r"(?:^|/)(?:accelerate|torchrun|deepspeed)$|torch[./]distributed[./](?:run|launch)|accelerate[./]commands|deepspeed[./]launcher"
)


@dataclass
class _RankLook:
    """What was seen of one rank in a window. Processes are its own and those below it."""

    rank: int
    pid: int
    readings: list[ProcessReading] = field(default_factory=list)
    busy: int | None = None  # the process that used most CPU
    stacks: list[Stack] = field(default_factory=list)  # of that process
    asked: dict[int, int] = field(default_factory=dict)  # process -> size of its file before
    dumps: dict[int, str] = field(default_factory=dict)  # process -> its last dump
    why: dict[int, str] = field(default_factory=dict)  # process -> why it has none
    printed: int = 0  # bytes of dumps


@dataclass
class _Look:
    """One window in which the processes of silent ranks are looked at. `output`: bytes that the launch had printed."""

    began: float
    output: int
    ranks: dict[int, _RankLook] = field(default_factory=dict)
    next_sample: float = 0.0
    answers_at: float | None = None
    final: bool = False


@dataclass(kw_only=True)
class StallWatch:
    """The progress of one launch on this machine.

    `tree()`: the processes of the launch; `rank_pids()`: which of them is which rank.
    `signs()`: printed points, bytes of the metrics file, bytes of output so far. `known`: `rhythm` of an earlier launch.
    `write(event, title=, step=, refs=)` appends to the journal. `others_work()`: which other node of the launch works.
    """

    pulses: Path | None
    tree: Callable[[], Sequence[Process]]
    rank_pids: Callable[[], Mapping[int, int]]
    signs: Callable[[], tuple[int, int, int]]
    step: Callable[[], int | None]
    say: Callable[[str], None]
    write: Callable[..., Any]
    directory: Path
    host: str
    launch: int
    known: Mapping[str, Any] = field(default_factory=dict)
    others_work: Callable[[], str] = lambda: ""
    devices: Callable[[], Mapping[str, float]] = dict
    clock: Callable[[], float] = time.monotonic
    state: str = "starts"  # starts, steps, quiet, looked at, works, stands here (another node works), stands
    words: str = ""

    def __post_init__(self) -> None:
        start = self.known.get("start_seconds")
        self._start = float(start) if isinstance(start, int | float) else 0.0
        self._silences = Silences(self.known.get("silences"))
        self._last_tick = self.clock()
        self._of_launch = Rhythm(self._last_tick, self._start)
        self._of_ranks: dict[int, Rhythm] = {}
        self._counts: dict[int, tuple[int, int, int]] = {}  # rank -> pid, steps, signs
        self._seen_signs = self.signs()
        self._newest: dict[int, Pulse] = {}
        self._look: _Look | None = None
        self._next_look = 0.0
        self._num_works = 0
        self._worked: set[int] = set()  # ranks that an earlier look into this silence saw at work
        self._told: tuple[Any, float, frozenset[str], str] | None = None  # entry, since when, places, words
        self._num_told = 0

    # ---- signs ---------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Look for signs of progress; True at the moment at which the launch is said to stand still."""
        now = self.clock()
        self._take_signs(now)
        silent = self._silent(now)
        if silent is None:
            self._goes_on(now)
            return False
        if self._told is not None or now < self._next_look:
            return False
        if self._look is None:
            self._look = _Look(now, self._seen_signs[2])
            if self.state != "stands here":  # other nodes count on that word until another look says otherwise
                self.state = "looked at"
        return self._look_on(now, self._look, silent)

    def _take_signs(self, now: float) -> None:
        signs = self.signs()
        steps, metrics, output = (new - old for new, old in zip(signs, self._seen_signs, strict=True))
        if steps > 0 or metrics > 0:
            self._of_launch.sign(now, max(1, steps))
        elif output > 0 and not self._of_ranks and signs[0] <= 0 and signs[1] <= 0:
            self._of_launch.sign(now)  # a trainer that logs no step: its output is all there is
        self._seen_signs = signs
        for pulse in read_pulses(self.pulses) if self.pulses is not None else ():
            pid, steps, worked = self._counts.get(pulse.rank, (0, 0, 0))
            if pid != pulse.pid:  # its first steps were done since the last look
                self._of_ranks[pulse.rank] = Rhythm(self._last_tick if pulse.steps else now, self._start)
                steps = worked = 0
            self._counts[pulse.rank] = (pulse.pid, pulse.steps, pulse.signs)
            self._newest[pulse.rank] = pulse
            count = pulse.steps - steps or pulse.signs - worked
            self._of_ranks[pulse.rank].sign(min(now, max(pulse.stepped_at, pulse.signed_at)), count)
        self._last_tick = now
        for rank in [rank for rank in self._of_ranks if not _exists(self._counts[rank][0])]:
            del self._of_ranks[rank]  # it has ended: the launcher knows

    def _silent(self, now: float) -> tuple[int, ...] | None:
        """Ranks that are silent beyond their rhythm; () where all of them are, by the signs of the launch; None for none."""
        launch = self._of_launch
        if not self._of_ranks:
            return () if launch.age(now) > launch.limit else None
        silent = tuple(rank for rank, one in self._of_ranks.items() if one.age(now) > one.limit)
        if len(silent) == len(self._of_ranks) and launch.started and launch.age(now) <= launch.limit:
            return None  # the pulses have stopped, not the training
        return silent or None

    def _age(self, now: float, silent: Sequence[int] = ()) -> float:
        if silent and len(silent) < len(self._of_ranks):
            return max(self._of_ranks[rank].age(now) for rank in silent)  # the others go on
        ages = [one.age(now) for one in self._of_ranks.values()]
        if not ages:
            return self._of_launch.age(now)
        return min(max(ages), self._of_launch.age(now)) if self._of_launch.started else max(ages)

    def _rhythm(self) -> Rhythm:
        """The rhythm that speaks for the launch: of the rank that is silent longest, else of the printed steps."""
        return min(self._of_ranks.values(), key=lambda one: one.last, default=self._of_launch)

    def _goes_on(self, now: float) -> None:
        self._look, self._num_works, self._next_look = None, 0, 0.0
        self._worked.clear()
        rhythm = self._rhythm()
        quiet = rhythm.started and self._age(now) > QUIET_SECONDS + 2.0 * (rhythm.p99 or 0.0)
        self.state = "quiet" if quiet else "steps" if rhythm.started else "starts"
        self.words = ""
        if self._told is not None:
            entry, since, places, words = self._told
            self._told = None
            self._silences.ended(places, now - since)
            text = f"the launch goes on after {_age_text(now - since)} without progress"
            self.say(text)
            event = Incident(
                kind="stall", tier="warn", status="recovered", launch=self.launch, change="closed", channels=("progress",),
                onset_step=self.step(), text=f"{text}; {words}",
            )  # fmt: skip
            refs = () if entry is None else (entry.id,)
            self.write(event, title=f"warn: stall, recovered: {text}", step=self.step(), refs=refs)

    # ---- looking -------------------------------------------------------------------------------------------------

    def _look_on(self, now: float, look: _Look, silent: tuple[int, ...]) -> bool:
        look.ranks = {rank: look.ranks.get(rank) or _RankLook(rank, pid) for rank, pid in self._pids().items()}
        for one in look.ranks.values():
            one.readings.append(look_at(one.pid, walk_children(one.pid)))
        if look.answers_at is not None:
            if now < look.answers_at:
                return False
            self._read_answers(look)
            if look.final:
                return self._judge(now, look, silent)
        announced = self._announced()
        if now - look.began >= WINDOW_SECONDS:
            look.final, look.answers_at = True, now + ANSWER_SECONDS
            for one in look.ranks.values():
                _ask(one, one.pid, announced)
        elif now >= look.next_sample:
            look.next_sample = now + SAMPLE_SECONDS
            for one in look.ranks.values():
                busy = _busiest(one)
                if busy is not None:
                    one.busy = busy
                    _ask(one, busy, announced)
            if any(one.asked for one in look.ranks.values()):
                look.answers_at = now + 0.5
        return False

    def _announced(self) -> dict[int, Announcement]:
        return {} if self.pulses is None else read_announcements(self.pulses)

    def _pids(self) -> dict[int, int]:
        """The process of each rank on this machine: from its pulse, else below the launcher."""
        found = {rank: self._counts[rank][0] for rank in self._of_ranks}
        announced = self._announced()
        for rank, pid in self.rank_pids().items():
            if rank not in found and _exists(pid):
                tree = [pid, *(one.pid for one in walk_children(pid))]
                named = (one for one in tree if one in announced and not announced[one].forked and _is_rank(one, rank))
                found[rank] = next(named, pid)
        if found:
            return found
        tree = [one.pid for one in self.tree() if one.alive]
        own = [pid for pid in tree if pid in announced and not announced[pid].forked and not _launches(pid)]
        return {0: (own or tree)[0]} if tree else {}

    def _read_answers(self, look: _Look) -> None:
        announced = self._announced()
        for one in look.ranks.values():
            for pid, size in one.asked.items():
                text = _read_from(announced[pid].path, size) if pid in announced else ""
                if not text:
                    one.why[pid] = "it did not answer the signal"
                    continue
                one.dumps[pid] = text
                one.printed += len(text)
                if pid == one.busy:
                    one.stacks.append(main_stack(parse_dump(text)))
            one.asked.clear()
        look.answers_at = None

    # ---- judging -------------------------------------------------------------------------------------------------

    def _judge(self, now: float, look: _Look, silent: tuple[int, ...]) -> bool:
        seconds = max(1.0, now - look.began)
        evidence = {}
        for rank, one in look.ranks.items():
            why = one.why.get(one.pid if one.busy is None else one.busy, "")
            evidence[rank] = judge_rank(one.readings, seconds, one.printed, one.stacks, why)
        printed, started = self._seen_signs[2] > look.output, self._rhythm().started
        for rank, doing in evidence.items():
            # a rank that was seen to work, that waits for a device in a loop, or prints, may be in one place in each sample
            if doing.busy and (rank in self._worked or printed or not started):
                evidence[rank] = doing._replace(patience=PATIENT_SECONDS)
        concerned = {rank: doing for rank, doing in evidence.items() if not silent or rank in silent}
        stands = [self._stand(one, is_idle=not evidence[rank].busy) for rank, one in look.ranks.items()]
        working = {rank: doing for rank, doing in concerned.items() if doing.verdict != "stands"}
        age, places = self._age(now, silent), frozenset(str(one.place) for one in stands if one.place is not None)
        patience = max([self._silences.patience(places), *(doing.patience for doing in concerned.values())])
        elsewhere = "" if working else self.others_work()
        longest = max(LONGEST_SECONDS, 3.0 * (self._rhythm().p99 or 0.0))
        if not concerned or ((working or elsewhere) and age < longest) or age < patience:
            self._leave_alone(now, stands, working, elsewhere)
            return False
        stepped = {rank: pulse.stepped_at for rank, pulse in self._newest.items()}
        on = [rank for rank in look.ranks if silent and rank not in silent and now - stepped.get(rank, 0.0) < age / 2]
        self._tell(now, age, stands, places, look, on)
        return True

    def _leave_alone(
        self, now: float, stands: Sequence[Stand], working: Mapping[int, RankDoing], elsewhere: str
    ) -> None:
        doing = [f"rank {one.rank} {one.words} ({working[one.rank].why})" for one in stands if one.rank in working]
        self.state = "stands here" if elsewhere else "works"
        self.words = "; ".join(doing) or elsewhere or "known to take long"
        self._worked |= {rank for rank, one in working.items() if one.busy}
        self._look, self._next_look = None, now + (PAUSES[0] if elsewhere else PAUSES[min(self._num_works, len(PAUSES) - 1)])
        self._num_works += 1

    def _stand(self, one: _RankLook, *, is_idle: bool) -> Stand:
        last, pulse = one.readings[-1], self._newest.get(one.rank)
        return Stand(
            rank=one.rank,
            pid=one.pid,
            state=last.state,
            idle=is_idle,
            stack=main_stack(parse_dump(one.dumps.get(one.pid, ""))),
            wchan=last.wchan,
            syscall=last.syscall,
            stopped_below=last.stopped_below,
            why=one.why.get(one.pid, ""),
            steps=None if pulse is None else pulse.steps,
            ended="" if last.state else "its process is gone",
        )

    def _tell(
        self, now: float, age: float, stands: Sequence[Stand], places: frozenset[str], look: _Look, on: Sequence[int]
    ) -> None:
        """`on`: the ranks that take steps all the same."""
        found = judge_stands(stands, on)
        usual = self._rhythm().p99
        self.words = describe_silence(age, usual, stands, found, self.host, on)
        self.state, self._look, self._num_told = "stands", None, self._num_told + 1
        evidence = self._write_dumps(look, stands, found)
        busy = self.devices()
        lines = [f"STALL: {self.words}", *(f"  {line}" for line in format_groups(found, stands))]
        if busy:
            lines.append("  GPUs: " + ", ".join(f"{name[:12]} {share:.0%} busy" for name, share in sorted(busy.items())))
        if evidence:
            lines.append(f"  all stacks: {self.directory / Path(evidence[0]['file']).name}")
        for line in lines:
            self.say(line)
        step = self.step()
        event = Incident(
            kind="stall", tier="warn", status="open", onset_step=step, alarm_step=step, channels=("progress",),
            launch=self.launch, change="opened", text="\n".join(lines), evidence=tuple(evidence), hosts=(self.host,),
        )  # fmt: skip
        entry = self.write(event, title=f"warn: stall: {self.words}", step=step, refs=())
        self._told = (entry, now - age, places, self.words)

    def _write_dumps(self, look: _Look, stands: Sequence[Stand], found: Autopsy) -> list[dict[str, Any]]:
        """Write every stack to one file of the launch; its place and digest for the journal. [] where that fails."""
        parts = [f"{self.words}\n"]
        for stand in stands:
            one = look.ranks[stand.rank]
            state = f"state {stand.state or '-'}, wchan {stand.wchan or '-'}, syscall {stand.syscall or '-'}"
            parts.append(f"=== rank {stand.rank}, pid {stand.pid}: {stand.words}\n{state}\n{one.dumps.get(one.pid, '')}")
            parts += [f"=== process {pid}\n{text}" for pid, text in one.dumps.items() if pid != one.pid]
        path = self.directory / f"stall-{self.host}-{self._num_told}.txt"
        text = "\n".join(parts)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.say(f"the stacks could not be written to `{path}`: {error.strerror or error}")
            return []
        return [
            {
                "file": f"{path.parent.parent.name}/{path.parent.name}/{path.name}",
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "culprits": list(found.culprits),
                "places": {str(one.rank): str(one.place) for one in stands if one.place},
            }
        ]

    # ---- what others are told ------------------------------------------------------------------------------------

    def progress(self, wall: float) -> dict[str, Any]:
        """For the heartbeat: how long ago the last sign of progress was, and what is usual. `wall`: seconds since the epoch."""
        told = {"state": self.state, "since": round(wall - self._age(self.clock()), 3), **self._usual()}
        return told | ({"words": self.words} if self.words else {})

    def rhythm(self) -> dict[str, Any]:
        """For `launch.end`, and so for the next launch."""
        told = self._usual()
        if told:
            told["start_seconds"] = round(self._rhythm().start_seconds or 0.0, 1)
            told |= {"silences": silences} if (silences := self._silences.to_json()) else {}
            told |= {"stalls": self._num_told} if self._num_told else {}
        return told

    def _usual(self) -> dict[str, Any]:
        """The median and the 99th percentile of the silences between two signs; {} before the steps began."""
        rhythm = self._rhythm()
        if not rhythm.started:
            return {}
        return {"usual": round(rhythm.usual or 0.0, 4), "p99": round(rhythm.p99 or 0.0, 4)}


# --- words


def describe_silence(
    age: float, usual: float | None, stands: Sequence[Stand], found: Autopsy, host: str, on: Sequence[int] = ()
) -> str:
    """One sentence: since when, which rank differs and where it stands. `on`: ranks that take steps all the same."""
    known = "" if usual is None else f" (99 % of them come within {_age_text(usual)})"
    said = f"no step for {_age_text(age)}{known}"
    by_rank = {one.rank: one for one in stands}
    if not found.culprits:
        everywhere = "; ".join(f"{_ranks(ranks)}: {by_rank[ranks[0]].words}" for _, ranks in found.groups[:3])
        return f"{said}: {found.because}: {everywhere}"
    culprit = by_rank[found.culprits[0]]
    others = [one.rank for one in stands if one.rank not in found.culprits and one.rank not in on]
    waiting = f"; {_ranks(others)} wait" + ("s" if len(others) == 1 else "") if others else ""
    stepping = f"; {_ranks(on)} {'goes' if len(on) == 1 else 'go'} on" if on else ""
    return f"{said}: {_ranks(found.culprits)} on {host} (pid {culprit.pid}) {culprit.words}{waiting}{stepping}"


def format_groups(found: Autopsy, stands: Sequence[Stand]) -> list[str]:
    """One line for each group of ranks that stand in one place."""
    by_rank = {one.rank: one for one in stands}
    return [f"{_ranks(ranks)}: {by_rank[ranks[0]].words}" for _, ranks in found.groups]


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _age_text(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- processes


def _ask(one: _RankLook, pid: int, announced: Mapping[int, Announcement]) -> None:
    """Ask a process of this rank for its stacks."""
    place = announced.get(pid)
    if place is None:
        one.why[pid] = "this process announced no signal for it (not a Python under `chronicle run`, or the guard is off)"
        return
    size = place.path.stat().st_size if place.path.exists() else 0
    why = ask_for_stacks(place)
    if why:
        one.why[pid] = why
    else:
        one.asked[pid] = size


def _busiest(one: _RankLook) -> int | None:
    """The process of a rank that used most CPU between the last two readings; None where all were idle."""
    if len(one.readings) < 2:
        return None
    before, now = one.readings[-2:]
    used = {child: cpu - before.below.get(child, 0.0) for child, cpu in now.below.items()}
    used[one.pid] = now.cpu - before.cpu
    busiest = max(used, key=lambda pid: used[pid])
    return busiest if used[busiest] > IDLE_CPU else None


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _is_rank(pid: int, rank: int) -> bool:
    """Whether this process was started as this rank: a launcher under `srun` has a task's number of its own."""
    return rank_of(read_environment(pid) or {}) == rank and not _launches(pid)


def _launches(pid: int) -> bool:
    """Whether this process of our own tree is a launcher's, which waits for its ranks."""
    return any(LAUNCHERS.search(word) for word in read_command(pid)[:4])


def _read_from(path: Path, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(1 << 22).decode("utf-8", "replace")
    except OSError:
        return ""
