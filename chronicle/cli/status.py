"""`chronicle status`: one screen. The worst news first, then step, loss, LR, the last checkpoint and what is open.

On a terminal every line fits 80 columns, except a command or a path that would be cut in two, and rows have colours. In a pipe
each row is one line, for `grep`; with COLUMNS set it fits that many.
"""

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from chronicle.checkpoints import CheckpointVerdict, describe_verdict, find_verdict, stamp_or_none
from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, Journal
from chronicle.journal.events import (
    EndCause,
    GuardFault,
    GuardVerdict,
    JournalEvent,
    Rehearsed,
    Replayed,
    Restarted,
    StepsRetaken,
    Verified,
    events_of,
)
from chronicle.journal.place import describe_parent
from chronicle.journal.reader import DAMAGED_HINT, describe_damage, find_damage
from chronicle.launch.heartbeat import Heartbeat, read_heartbeats
from chronicle.paths import RunPaths
from chronicle.prints.retaken import RetakenVerdict
from chronicle.story import Headline, LaunchStory, Matter, SavedCheckpoint, Story
from chronicle.story.matters import incident_detail, incident_title
from chronicle.story.plain import Coloured, format_age, format_factor, format_number, format_seconds, plain
from chronicle.story.read import read_story
from chronicle.story.summary import LrCheck, check_lr, summarize
from rollback.channels import Role, find_channel
from rollback.errors import RollbackError

WELL = (EndCause.FINISHED, EndCause.PROPOSAL)  # causes of an end that need no explanation
EXPECTED = (EndCause.STOPPED, EndCause.PREEMPTED, EndCause.TIME_LIMIT)  # nothing broke
SHOWN = 3  # open entries that are listed; the others are counted
HEADS = ("DAMAGED:", "run")  # come first, in this order
NAME_WIDTH = 12
WIDTH, LEAST_WIDTH, ENDLESS = 80, 40, 1 << 20
UNCUT: Mapping[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
UNCUT_SPACE = "\u2007"  # where a line is not cut
LOUD, WARN, PLAIN = "31;1", "33", ""  # how bad a row is, as the terminal's colour: red, yellow, none


E = TypeVar("E", bound=JournalEvent)


class _Row(NamedTuple):
    """One fact: its name in the first column, "" where it continues the row above; the text; how bad it is."""

    name: str
    text: str
    tone: str = PLAIN

    def lines(self, width: int) -> list[str]:
        """The row within `width` columns; what stands between backticks is not cut."""
        parts = plain(self.text).split("`")
        parts[1::2] = [part.replace(" ", UNCUT_SPACE) for part in parts[1::2]]
        lead = f"{self.name} " if self.name in HEADS else f"{self.name:<{NAME_WIDTH - 1}} "
        rest = " " * NAME_WIDTH
        wrapped = textwrap.wrap("`".join(parts), width, initial_indent=lead, subsequent_indent=rest, **UNCUT)
        return [line.replace(UNCUT_SPACE, " ") for line in wrapped or [lead]]


def show_status(at: AtCheckpoints = AT_CHECKPOINTS) -> CommandResult:
    """Show where the run is, what is open and what to do next.

    Prints step, loss and LR of the lineage, the last checkpoint, open entries, and the next command.

    Example: chronicle status --run tr-190
    """
    settings, now = at.existing(stores=True), time.time()
    paths, story = settings.paths, read_story(settings.paths)
    lr = check_lr(story, paths)
    saved, last = story.last_checkpoint, story.last_launch
    verdict = find_verdict(Path(saved.path), story.entries) if saved is not None and saved.path else None
    damage = find_damage(paths, Journal(run=story.run, entries=story.entries, problems=story.problems), quick=True)
    beats = read_heartbeats(paths.heartbeats_dir) if last is not None and last.alive else []
    rows = [_Row("DAMAGED:", describe_damage(paths, damage), LOUD), _Row("", DAMAGED_HINT)] if damage else []
    rows += [*_where(story, now), *_progress(story, beats, now)]
    if not story.launches:
        rows.append(_Row("start", "`chronicle run -- <launcher …>`"))
    rows += [*_values(story.headline), *_lr(story, lr)]
    rows += _checkpoint(story, saved, verdict) if saved is not None else _unrecorded(settings.checkpoints_dir, story)
    rows += [*_guard(story), *_open(story, paths)]
    if story.problems:
        rows.append(_Row("journal", f"{len(story.problems)} problem(s): `chronicle audit` names them", WARN))
    data = summarize(story, lr, verdict)
    data["damage"] = [{"check": x.check, "file": x.path.name, "line": x.line, "message": x.message} for x in damage]
    data["progress"] = {beat.host: beat.progress for beat in beats if beat.progress}
    return CommandResult(lines=_drawn(rows), data=data)


def _newest_on_disk(root: Path | None, story: Story) -> str:
    """The checkpoint with the highest step in the run's directory, for a run whose saves nobody recorded; "" for none."""
    try:
        if root is None or not any(root.iterdir()):
            return ""
        # imports every format: only where something lies
        from chronicle.latest import rolled_back_in_store
        from rollback.checkpoint.listing import list_checkpoints, list_unrecognised, say_unrecognised

        found = list_checkpoints(root, include_abandoned=False)
        left, made = rolled_back_in_store(root, story.entries)
        found = [*made, *(one for one in found if one.path.name not in left or left[one.path.name] != stamp_or_none(one.path))]
    except (RollbackError, OSError):
        return ""  # `verify` says what is wrong with it
    newest = max((one for one in found if one.step is not None), key=lambda one: one.step or 0, default=None)
    words = []
    if newest is not None:
        where = _short_path(str(newest.path))
        words.append(f"step {newest.step} {where} · saved without the guard; check it: `chronicle verify {newest.step}`")
    words.append(say_unrecognised(list_unrecognised(root, found)))
    return " · ".join(filter(None, words))


def _drawn(rows: Sequence[_Row]) -> list[str | Coloured]:
    """The screen: the headline, the worst rows, then the others in their order. A row without a name stays with its own."""
    parts: list[list[_Row]] = []
    for row in rows:
        if row.name or not parts:
            parts.append([])
        parts[-1].append(row)
    order = (*HEADS, LOUD, WARN, PLAIN)
    parts.sort(key=lambda part: order.index(part[0].name if part[0].name in HEADS else part[0].tone))
    columns = os.environ.get("COLUMNS", "")
    width = WIDTH if sys.stdout.isatty() else ENDLESS
    if columns.isdecimal() and int(columns) >= LEAST_WIDTH:
        width = int(columns)
    lines: list[str | Coloured] = []
    for first, *rest in parts:
        for line in (line for row in (first, *rest) for line in row.lines(width)):
            name = line[:NAME_WIDTH]
            is_toned = first.tone and name.strip()
            lines.append(Coloured(first.tone, name, line[NAME_WIDTH:]) if is_toned else line)
    return lines


def _where(story: Story, now: float) -> Iterator[_Row]:
    last, head = story.last_launch, story.headline
    parent = [] if story.parent is None else [_Row("begins from", describe_parent(story.parent))]
    if last is None:
        yield _Row("run", f"{story.run} · no launch yet")
        yield from parent
        return
    place = f"step {head.step} of launch {head.launch}" if head.launch else f"step {head.step}"
    if head.launch is None and not head.step:  # without a guard and a log, steps may have been taken all the same
        place = "no step recorded"
    yield _Row("run", f"{story.run} · {place} · launch {last.number} {last.outcome}{_since(last, now)}")
    yield from parent
    if last.because and not last.alive and last.cause not in WELL:
        yield _Row("ended", last.because, WARN if last.cause in EXPECTED else LOUD)
    for _, event in _of_last(story, Restarted)[-1:]:  # whether the run goes on by itself
        if event.decision not in ("finished", "ended") and not last.alive:
            yield _Row("restarts", f"{event.decision}: {event.reason}")
    yield from _changed(story)
    abandoned = sum(launch.span.abandoned_steps for launch in story.launches)
    if abandoned or story.lineage.doubt:
        launches = "1 launch" if len(story.launches) == 1 else f"{len(story.launches)} launches"
        told = f"{launches}, {abandoned} steps abandoned" if abandoned else launches
        yield _Row("lineage", f"{told} · {story.lineage.doubt}" if story.lineage.doubt else told)


def _progress(story: Story, beats: Sequence[Heartbeat], now: float) -> Iterator[_Row]:
    """How long ago the last step was, on each node of the running launch, and what is usual for this run."""
    for beat in beats:
        said = beat.progress
        if said is None or story.last_launch is None or beat.launch != story.last_launch.number:
            continue
        host = f" · {beat.host}" if len(beats) > 1 else ""
        tone = LOUD if said.get("state") == "stands" else PLAIN
        yield _Row("progress", _standing(said, now, beat.age(now)) + host, tone)
    if beats and story.last_launch is not None:
        yield from _left(story, story.last_launch.number, beats[0].progress or {})


def _left(story: Story, launch: int, said: Mapping[str, Any]) -> Iterator[_Row]:
    """How many steps are left of the run, and how long they take, where the launch says how many there are."""
    from chronicle.story.launch_settings import planned_steps  # a run that has ended does without it

    usual, planned, done = said.get("usual"), planned_steps(story.entries, launch), story.headline.step
    if planned is not None and done is not None and done < planned and isinstance(usual, int | float):
        yield _Row("", f"{planned - done:,} of {planned:,} steps are left: about {format_seconds((planned - done) * usual)}")


def _standing(said: Mapping[str, Any], now: float, beat_age: float) -> str:
    since, usual, state = said.get("since"), said.get("usual"), said.get("state")
    if not isinstance(since, int | float):
        return "not known"
    silent = f"no step for {format_age(max(0.0, now - since))}"
    if state == "starts" or not isinstance(usual, int | float):
        return f"{silent}: the launch is starting"
    often = f"{format_seconds(usual)}/step (p99 {format_seconds(float(said.get('p99') or usual))})"
    if state == "steps":
        return f"{often}, last heartbeat {format_seconds(beat_age)} ago"
    words = str(said.get("words") or "")
    if state == "stands":
        return f"STANDS STILL: {silent} · {words}"
    if state == "stands here":
        return f"{silent} ({often}) · the ranks on this node stand; {words}"
    if state == "works":
        return f"{silent} ({often}) · it works: {words}"
    return f"{silent} ({often})" + (" · the ranks are being looked at" if state == "looked at" else "")


def _changed(story: Story) -> Iterator[_Row]:
    """The settings that the last launch has otherwise than the one before it; nothing where none is known to differ."""
    if len(story.launches) < 2:
        return
    from chronicle.story.launch_settings import changed_before  # the first launch of a run does without it

    last = story.launches[-1].number
    found = changed_before(story.entries, last)
    if found is not None:
        where = f": `chronicle settings @{found.launch} @{last}`" if len(found.changes) > SHOWN else ""
        yield _Row("changed", found.brief(SHOWN) + where)


def _of_last(story: Story, kind: type[E]) -> list[tuple[Entry, E]]:
    """The entries of a kind that the last launch has."""
    number = None if story.last_launch is None else story.last_launch.number
    return [(entry, event) for entry, event in events_of(story.entries, kind) if entry.launch == number]


def _since(launch: LaunchStory, now: float) -> str:
    try:
        age = format_age(now - datetime.fromisoformat(launch.ended or launch.started).timestamp())
    except ValueError:
        return ""
    if launch.alive:
        return f" for {age}"
    return f", {age} ago" if launch.ended else ""


def _values(head: Headline) -> Iterator[_Row]:
    if head.loss is not None:
        where = "" if head.measured_step == head.step else f"  (measured at step {head.measured_step})"
        yield _Row("loss", format_number(head.loss) + where)
    for role in (Role.NORM, Role.SPEED):  # as the script logs them
        name = find_channel(head.values, role)
        if name is not None:
            yield _Row(name, format_number(head.values[name]))


def _lr(story: Story, lr: LrCheck) -> Iterator[_Row]:
    value = story.headline.lr
    factors = story.lr_path
    if value is None and len(factors) < 2:
        return
    line = story.ledger.line(story.headline.launch)
    of_first = "" if line is None or line.factor == 1 else f"  {format_factor(line.factor)} of the first schedule"
    yield _Row("lr", format_number(value) + of_first)
    if len(factors) > 1 or story.ledger.pending is not None:
        path = " → ".join(format_factor(f) for f in factors)
        pending = story.ledger.pending
        coming = "" if pending is None else f", next launch {format_factor(pending)}"
        yield _Row("lr ledger", path + coming + (f": {lr.sentence}" if lr.sentence else ""))


def _unrecorded(root: Path | None, story: Story) -> Iterator[_Row]:
    """What lies in the directory of a run whose saves nobody recorded."""
    seen = _newest_on_disk(root, story)
    yield _Row("checkpoint", seen or "none recorded")
    unguarded = story.launches and all(launch.verdict in (None, "off") for launch in story.launches)
    if not seen and unguarded:
        words = "without a guard saves are not recorded; name their directory with --checkpoints DIR, as in"
        yield _Row("", f'{words} `chronicle verify --checkpoints DIR`, or `checkpoints = "DIR"` in chronicle.toml')


def _checkpoint(story: Story, saved: SavedCheckpoint, verdict: CheckpointVerdict | None) -> Iterator[_Row]:
    """The last checkpoint, and where it is not sound the newest one of the lineage of which every byte was read."""
    hint = "" if verdict is not None and verdict.passes else f"; check it: `chronicle verify {saved.step}`"
    where = f"step {saved.step} (launch {saved.launch}) {_short_path(saved.path)}"
    yield _Row("checkpoint", f"{where} · {describe_verdict(verdict)}{hint}")
    if verdict is not None and verdict.sound:
        return
    read = [
        (entry.step, entry.launch, found)
        for entry, found in events_of(story.entries, Verified)
        if found.full and found.passes and entry.step is not None and entry.launch is not None
    ]
    for step, launch, found in sorted(read, key=lambda one: one[0], reverse=True)[:SHOWN]:
        if story.lineage.contains(launch, step) and stamp_or_none(Path(found.path)) == found.stamp:
            yield _Row("", f"newest verified: step {step} (launch {launch}) {_short_path(found.path)}")
            return


def _short_path(path: str) -> str:
    """The path relative to the working directory, if it is below it."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _guard(story: Story) -> Iterator[_Row]:
    if story.unverified:
        shown = story.unverified[-SHOWN:]
        numbers = ", ".join(f"{one.number}{' (no verdict)' if one.verdict is None else ''}" for one in shown)
        more = len(story.unverified) - SHOWN
        words = f"resumed, and not verified by the guard: launch {numbers}" + (f" and {more} before" if more > 0 else "")
        yield _Row("unverified", words, WARN)
    last = story.last_launch
    if last is not None and last.verdict is not None and last.verdict_entry is not None:
        given = GuardVerdict.of(last.verdict_entry)
        count = f", {len(given.checks)} check{'s' * (len(given.checks) > 1)}" if given.checks else ""
        word = given.words.partition(",")[0]  # what was not compared is named below
        tone = PLAIN if word == "passed" else LOUD if last.verdict == "refused" else WARN
        yield _Row("guard", f"launch {last.number} {word}{count}", tone)
        for one in (check for check in given.checks if check.get("ok") is False):
            why = one.get("cause") or one.get("name")
            yield _Row("", f"{why}. Expected: {one.get('expected')}. Found: {one.get('found')}", tone)
        for one in given.not_compared[:SHOWN]:
            yield _Row("", f"not compared: {one.get('name')} ({one.get('why')})")
    for entry, fault in _of_last(story, GuardFault):
        since = "" if entry.step is None else f" from step {entry.step}"
        words = f"launch {entry.launch} unverified{since}: the guard failed at its {fault.where} ({fault.error})"
        yield _Row("guard fault", words, WARN)
    for _, event in _of_last(story, StepsRetaken)[-1:]:  # beside those of the launch that took them first
        differs = event.verdict in (RetakenVerdict.RANKS, RetakenVerdict.RESULT, RetakenVerdict.CODE)
        yield _Row("again", f"{event.why} (launch {event.earlier} took them first)", WARN if differs else PLAIN)
    for _, found in _of_last(story, Rehearsed):
        if not found.signal:  # a second process loaded the first save
            said = "; ".join([f"step {found.at}: the script {found.verdict}", *found.findings, *found.not_compared])
            yield _Row("first save", said, LOUD if found.findings else PLAIN)


def _cause(story: Story, matter: Matter, paths: RunPaths) -> Iterator[_Row]:
    """What a replay found out about an incident, or the line that asks for one."""
    onset, launch = matter.onset, matter.entry.launch
    if onset is None or onset < 1 or launch is None:
        return
    of_launch = [entry for entry in story.entries if entry.launch == launch]
    is_printed = (paths.launch_dir(launch) / "prints-0.ring").exists()
    again = found = ""
    for entry, event in events_of(story.entries, StepsRetaken):
        if event.earlier == launch and event.rise == onset and event.came_again is not None:
            again = f"taken again by launch {entry.launch}: {event.why}"
    for entry, replay in events_of(of_launch, Replayed):
        if is_printed and entry.step is not None and entry.step <= onset <= (replay.until or entry.step):
            found = f"replayed: {replay.verdict} ({replay.why})"
    yield from (_Row("", words) for words in (again, found) if words)
    if is_printed and not again and not found:
        yield _Row("", f"cause not known: {_how_to_replay(story, onset, launch)}")


def _how_to_replay(story: Story, onset: int, launch: int) -> str:
    """The command that takes the steps again, or why it would be refused here."""
    from chronicle.replay.plan import ensure_replayable  # only where an incident is open

    try:
        ensure_replayable(story.entries, launch)
    except ChronicleError as problem:
        return f"no replay: {problem.message}" + (f" ({problem.remedy})" if problem.remedy else "")
    return f"`chronicle replay {onset} --launch {launch}`"


def _open(story: Story, paths: RunPaths) -> Iterator[_Row]:
    if story.intent is not None:
        yield _Row("unfinished", f"{story.intent.kind} {_short(story.intent.id)} is not finished: `chronicle recover`", LOUD)
    matters = story.open_matters
    for matter in matters[-SHOWN:]:
        launch = f" (launch {matter.entry.launch})" if matter.entry.launch is not None else ""
        told = (f"{incident_title(matter.entry) or 'incident'}{launch}", incident_detail(matter.entry))
        standing = matter.words.removesuffix("open").removesuffix(" · ")
        yield _Row("open", f"{_short(matter.first_id)} {' · '.join(filter(None, (*told, standing)))}", LOUD)
        yield from _cause(story, matter, paths)
        yield _close_row(matter.first_id)
    waiting = [x for x in story.interventions if x.open]
    newest = story.lineage.head_launch
    for entry in (intervention.entry for intervention in waiting[-SHOWN:]):
        answered = [_short(m.first_id) for m in story.matters if m.answer is not None and m.answer.entry_id == entry.id]
        words = f" (answers incident {', '.join(answered)})" if answered else ""
        yield _Row("outcome?", f"{_short(entry.id)} {entry.title}{words}")
        left = next((one.from_launch for one in story.lineage.rollbacks if one.entry_id == entry.id), None)
        if left is not None and newest is not None and newest > left:  # a launch has taken steps again
            yield _Row("", f"did it help: `chronicle compare {story.run}@{left} {story.run}@{newest}`")
        yield _close_row(entry.id)
    hidden = max(0, len(matters) - SHOWN) + max(0, len(waiting) - SHOWN)
    if hidden:
        yield _Row("", f"… and {hidden} more: `chronicle log --open`")
    if story.proposal is not None:
        yield _Row("proposal", story.proposal.entry.title or f"go back to step {story.proposal.target_step}", LOUD)
        yield _Row("", story.proposal.command.replace(" ", UNCUT_SPACE))  # to be pasted: on one line


def _close_row(entry_id: str) -> _Row:
    command = f"chronicle note --close {_short(entry_id)} --outcome worked"
    return _Row("", f"record the outcome (worked, failed, partly): `{command}`")


def _short(entry_id: str) -> str:
    """The last eight characters of an id, which are random; its first ones are the time."""
    return entry_id[-8:]
