"""`CHRONICLE.md`: the whole story as a table and one section per chapter. The same journal gives the same bytes.

The file is generated. What people wrote is in the journal (`chronicle note`, `note --amend`, `close`) and is escaped here.
Newest last, one sentence a line, numbers aligned to the right, images by relative path.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chronicle.journal import Entry
from chronicle.journal.events import (
    EntryKind,
    GuardVerdict,
    Incident,
    Proposed,
    Rehearsed,
    Replayed,
    StepsRetaken,
    StudyReport,
    Words,
    read,
)
from chronicle.journal.place import describe_parent
from chronicle.report.markup import Raw, anchor_of, evidence_target, markdown_line, markdown_table, markdown_text
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.chapters import Chapter, tell_chapters
from chronicle.story.plain import format_age, format_factor, format_number, format_when, plain

LINEAGE_PICTURE = "plots/lineage.png"
CHECK_HEADS = ("check", "expected", "found", "where")
ARM_HEADS = ("arm", "name", "restarts", "data")
MARKS = {"supported": "☑", "refuted": "☒"}
IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
# Fields that a paragraph shows; the other fields are listed by name, except of `TOLD_KINDS`
TOLD = frozenset(
    (*(field.key for field in Words.FIELDS.values()), "arms", "questions", "confounders", "base", "event", "checks")
)


# --- what the detector and a proposal recorded, as sentences ------------------------------------------------------------


def machine_words(entry: Entry) -> Iterator[tuple[str, str]]:
    """(name of the paragraph, sentence) of what a program measured or compared; nothing for other entries."""
    if entry.kind in TELLERS:
        yield from TELLERS[entry.kind](read(entry))


def check_rows(verdict: GuardVerdict) -> list[list[object]]:
    """The checks of a verdict, under `CHECK_HEADS`."""
    return [[check.get(name) for name in ("name", *CHECK_HEADS[1:])] for check in verdict.checks]


def arm_rows(report: StudyReport) -> list[list[object]]:
    """The arms of a study, under `ARM_HEADS`."""
    arms = [arm for arm in report.arms if isinstance(arm, Mapping)]
    return [[arm.get(name) for name in ("id", *ARM_HEADS[1:])] for arm in arms]


def _rehearsal(event: Rehearsed) -> Iterator[tuple[str, str]]:
    played = f"killed with {event.signal} at step {event.at} and resumed to step {event.to}"
    if not event.signal:
        played = f"its save of step {event.at} was loaded in a second process"
    yield "Verdict", f"{played}: the script {event.verdict}"
    if event.findings:
        yield "Differs", "; ".join(event.findings)
    if event.not_compared:
        yield "Not compared", "; ".join(event.not_compared)
    counted = f"{event.leaves or 0} values in files, {event.logged_values or 0} logged"
    yield "Compared", f"{counted}, in {format_age(event.seconds or 0.0)}"


def _retaken(event: StepsRetaken) -> Iterator[tuple[str, str]]:
    yield "Verdict", f"{event.verdict}: {event.why}"
    yield "Compared", f"steps {event.first} to {event.last} with launch {event.earlier}: {', '.join(event.parts) or 'losses'}"
    if event.changed:
        yield "Changed since", "; ".join(event.changed)


def _replay(event: Replayed) -> Iterator[tuple[str, str]]:
    begun = "from the beginning" if event.checkpoint is None else f"from the checkpoint of step {event.start}"
    yield "Verdict", f"{event.verdict}: {event.why}"
    if event.evidence:
        yield "Evidence", "; ".join(event.evidence)
    times = {None: "once", 1: "once", 2: "twice"}.get(event.replays, f"{event.replays} times")
    steps = "1 step" if event.compared == 1 else f"{event.compared or 0} steps"
    yield "Compared", f"{steps} {begun}, {times}, in {format_age(event.seconds or 0.0)}"


def _incident(event: Incident) -> Iterator[tuple[str, str]]:
    onset, low = event.onset_step, event.onset_low_step
    if onset is None:
        return  # written by a person
    where = f" on {', '.join(event.channels)}" if event.channels else ""
    parts = [f"{event.kind or 'incident'}{where}, onset at step {onset}"]
    if low is not None and low != onset:
        parts[0] += f" (at the earliest {low})"
    if event.alarm_step is not None:
        parts.append(f"alarm at {event.alarm_step}")
    if event.excess is not None:
        size = "" if event.sigmas is None else f" ({format_number(event.sigmas)} σ)"
        at = "" if event.peak_step is None else f" at {event.peak_step}"
        parts.append(f"peak {'+' if event.excess >= 0 else ''}{format_number(event.excess)}{size}{at}")
    if event.recovered_step is not None:
        parts.append(f"back at {event.recovered_step}")
    yield "Measured", ", ".join(parts)


def _proposal(proposed: Proposed) -> Iterator[tuple[str, str]]:
    if proposed.command:
        cost = "" if proposed.cost_steps is None else f" discards {proposed.cost_steps} steps"
        command = proposed.command.replace("`", "'")
        yield "Proposed", f"`{command}`{cost}"
    if proposed.reasons:
        yield "Reasons", "; ".join(proposed.reasons)
    others = proposed.alternatives
    if others:
        words = (f"to {x.get('step')} of launch {x.get('launch')} ({x.get('cost_steps')} steps)" for x in others)
        yield "Alternatives", "; ".join(words)


TELLERS: Mapping[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    EntryKind.INCIDENT: _incident,
    EntryKind.PROPOSAL: _proposal,
    EntryKind.REPLAY: _replay,
    EntryKind.RETAKEN: _retaken,
    EntryKind.REHEARSAL: _rehearsal,
}
TOLD_KINDS = frozenset(
    (
        *TELLERS,
        *(EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT, EntryKind.GUARD_VERDICT, EntryKind.EXPERIMENT_REPORT),
    )
)


# --- one chapter --------------------------------------------------------------------------------------------------------


def chapter_section(chapter: Chapter, imported: Mapping[str, Chapter]) -> Iterator[str]:
    """The lines of one chapter with its anchor. `imported`: chapters by their number in an older chronicle."""
    entry = chapter.entry
    yield f'<a id="{anchor_of(entry.id)}"></a>'
    yield ""
    yield f"## {chapter.number}. {markdown_line(chapter.title)} ({format_when(entry.ts)})"
    yield ""
    yield " · ".join(_where(chapter)) + "."
    for paragraph in _paragraphs(chapter, imported):
        yield ""
        yield paragraph
    yield ""


def _where(chapter: Chapter) -> Iterator[str]:
    entry = chapter.entry
    if entry.launch is not None:
        yield f"Launch {entry.launch}"
    if entry.step is not None:
        yield f"step **{entry.step}**"
    words = chapter.words
    for name, listed in (("hosts", words.hosts), ("tags", words.tags)):
        if listed:
            yield f"{name} " + ", ".join(_code(item) for item in listed)
    yield f"{markdown_line(entry.kind)} {_code(entry.id)}"


def _paragraphs(chapter: Chapter, imported: Mapping[str, Chapter]) -> Iterator[str]:
    words = chapter.words
    if words.text:
        yield markdown_text(words.text)
    if words.symptom:
        yield f"**Seen.** {markdown_text(words.symptom)}"
    for name, sentence in machine_words(chapter.entry):
        yield f"**{name}.** {markdown_line(sentence)}"
    if words.suspects:
        yield "**Suspects.**\n\n" + "\n".join(_suspect(row) for row in words.suspects)
    yield from _did(chapter)
    if chapter.launch is not None:
        yield from _launch_paragraphs(chapter.launch)
    if words.expect:
        yield f"**Expected.** {markdown_text(words.expect)}"
    if chapter.outcome and chapter.launch is None:
        yield f"**Outcome.** {_came_out(chapter, imported)}"
    for rule in chapter.rules:
        yield f"> Rule learnt: {markdown_line(rule)}"
    checks = check_rows(GuardVerdict.view(chapter.data))
    if checks:
        yield markdown_table(CHECK_HEADS, checks)
    yield from _study(StudyReport.view(chapter.data))
    pieces = [row for row in words.evidence if isinstance(row, Mapping)]
    if pieces:
        yield "\n".join(_piece(row, chapter.title) for row in pieces)
    yield from _rest(chapter)


def _suspect(row: Mapping[str, Any]) -> str:
    verdict = str(row.get("verdict") or "open")
    claim = f": {markdown_line(row['claim'])}" if row.get("claim") else ""
    test = f"; test: {markdown_line(row['test'])}" if row.get("test") else ""
    return f"- {MARKS.get(verdict, '☐')} {markdown_line(row.get('cause', 'unknown'))}{claim}{test}; *{markdown_line(verdict)}*"


def _did(chapter: Chapter) -> Iterator[str]:
    if not chapter.action:
        return
    target = "" if chapter.to is None else f" to **{chapter.to}**"
    changes = "".join("; " + changed(*change) for change in chapter.changes)
    note = (chapter.words.action or {}).get("note")
    note = f" ({markdown_line(note)})" if note else ""
    yield f"**Action.** {markdown_line(chapter.action)}{target}{changes}{note}"


def _launch_paragraphs(launch: LaunchStory) -> Iterator[str]:
    lines = []
    if launch.argv:
        lines.append(f"Command: {_code(' '.join(launch.argv))}")
    lines.append(f"Steps: {_steps(launch)}.")
    if launch.lr is not None:
        lines.append(f"LR: {format_factor(launch.lr.factor)} of the first schedule ({markdown_line(launch.lr.reason)}).")
    if launch.verdict is not None or launch.resumed:
        lines.append(f"Guard: {markdown_line(launch.verdict or 'no verdict')}.")
    lines.append(f"Ended: {markdown_line(launch.outcome)}.")
    if launch.checkpoints:
        lines.append("Checkpoints: " + ", ".join(str(saved.step) for saved in launch.checkpoints) + ".")
    yield "\n".join(f"- {line}" for line in lines)


def _steps(launch: LaunchStory) -> str:
    span, entry = launch.span, launch.verdict_entry
    if launch.verdict == "refused" and not span.has_steps:
        return "none" + ("" if entry is None or entry.step is None else f"; it would have resumed at step {entry.step}")
    begun = f"resumed at step {span.start_step}" if launch.resumed else "started from scratch"
    abandoned = "" if span.abandoned_after is None else f"; abandoned after step {span.abandoned_after}"
    return f"{begun}, completed {'?' if span.last_step is None else span.last_step}{abandoned}"


def _came_out(chapter: Chapter, imported: Mapping[str, Chapter]) -> str:
    words = f": {markdown_text(chapter.outcome_text)}" if chapter.outcome_text else ""
    other = imported.get(chapter.closed_by) if chapter.closed_by else None
    link = "" if other is None else f" → [{other.number}](#{anchor_of(other.entry.id)})"
    return f"{markdown_line(chapter.outcome)}{words}{link}"


def _study(report: StudyReport) -> Iterator[str]:
    arms = arm_rows(report)
    if arms:
        yield markdown_table(ARM_HEADS, arms, numeric=(2,))
    answers = report.questions
    if answers:
        yield "\n".join(f"- **{markdown_line(q.get('q', ''))}** {markdown_line(q.get('answer', ''))}" for q in answers)
    if report.confounders:
        yield "Confounders: " + "; ".join(markdown_line(c) for c in report.confounders) + "."
    if report.base:
        yield f"Base: {markdown_line(report.base)}."


def _piece(row: Mapping[str, Any], title: str) -> str:
    path, what = str(row.get("path") or ""), str(row.get("what") or "")
    target, stored = evidence_target(row)
    if target and path.lower().endswith(IMAGES):
        return f"![{markdown_line(what or title)}]({target})"
    named = f"[{markdown_line(path)}]({target})" if target and (stored or row.get("kind") == "link") else _code(path)
    return f"- {markdown_line(row.get('kind', 'evidence'))}: {named}" + (f": {markdown_line(what)}" if what else "")


def _rest(chapter: Chapter) -> Iterator[str]:
    """The fields that no paragraph above shows, by name."""
    known = chapter.launch is not None or chapter.entry.kind in TOLD_KINDS
    rest = {} if known else {key: value for key, value in chapter.data.items() if key not in TOLD}
    if rest:
        yield "\n".join(f"- {markdown_line(key)}: {markdown_line(value)}" for key, value in rest.items())


def changed(name: str, before: str, after: str) -> str:
    """One changed field, before and after."""
    return f"{_code(name)} {markdown_line(before)} → {markdown_line(after)}"


def _code(text: object) -> str:
    return "`" + plain(text).replace("`", "'") + "`"


# --- the document -------------------------------------------------------------------------------------------------------


def render_markdown(story: Story, *, picture: bool, lost_seconds: Mapping[str, float] | None = None) -> str:
    """The document. `lost_seconds`: wall-clock seconds that each rollback discarded, by the id of its receipt."""
    chapters = tell_chapters(story)
    lines = [*_front(story, picture), *_table(chapters), *_launches(story), *_costs(story, chapters, lost_seconds or {})]
    lines += _rules(chapters)
    imported = {str(origin.get("n")): c for c in chapters if (origin := c.words.import_) is not None}
    for chapter in chapters:
        lines += chapter_section(chapter, imported)
    return "\n".join(lines).rstrip("\n") + "\n"


def _front(story: Story, picture: bool) -> Iterator[str]:
    seal = hashlib.sha256("\n".join(f"{w} {h}" for w, h in story.heads).encode()).hexdigest()[:16]
    yield f"# {markdown_line(story.run)}"
    yield ""
    counts = f"{len(story.entries)} entries, {len(story.heads)} writers"
    yield f"<!-- generated by `chronicle report --markdown`, do not edit; {counts}, seal {seal} -->"
    yield ""
    head = story.headline
    place = f"Step **{head.step}**" + (f" of launch {head.launch}" if head.launch else "")
    values = [f"loss {format_number(head.loss)}"] if head.loss is not None else []
    if head.lr is not None:
        values.append(f"LR {format_number(head.lr)}")
    yield ", ".join([place, *values]) + "."
    factors = story.lr_path
    if story.parent is not None:
        yield f"Begins from {markdown_line(describe_parent(story.parent))}."
    if story.lineage.doubt:
        yield f"The lineage is {story.lineage.doubt}."
    if len(factors) > 1:
        yield f"LR ledger: {' → '.join(format_factor(f) for f in factors)} of the first schedule."
    if story.problems:
        yield f"The journal has {len(story.problems)} problem(s): see `chronicle audit`."
    if picture:
        yield ""
        yield f"![{_alt(story)}]({LINEAGE_PICTURE})"
    yield ""


def _alt(story: Story) -> str:
    lost = sum(launch.span.abandoned_steps for launch in story.launches)
    counts = f"{len(story.launches)} launches, head at step {story.headline.step}, {lost} steps abandoned (grey)"
    return f"learning rate and loss by launch: {counts}"


def _table(chapters: Sequence[Chapter]) -> Iterator[str]:
    yield "## The whole story\n"
    rows = []
    for chapter in chapters:
        entry = chapter.entry
        changes = ", ".join(changed(*change) for change in chapter.changes).replace("|", "\\|")
        where = (_link(chapter), format_when(entry.ts), entry.launch, entry.step)
        rows.append((*where, chapter.title, chapter.action, chapter.to, Raw(changes), chapter.outcome))
    heads = ["#", "when", "launch", "step", "what", "action", "to", "changes", "outcome"]
    yield markdown_table(heads, rows, numeric=(0, 2, 3, 6))
    yield ""


def _link(chapter: Chapter) -> Raw:
    return Raw(f"[{chapter.number}](#{anchor_of(chapter.entry.id)})")


def _launches(story: Story) -> Iterator[str]:
    if not story.launches:
        return
    yield "## Launches\n"
    rows = [_launch_cells(launch, story.lineage.is_guess(launch.span)) for launch in story.launches]
    heads = ["launch", "from", "to", "kept to", "LR", "guard", "checkpoints", "ended"]
    yield markdown_table(heads, rows, numeric=(0, 1, 2, 3, 4, 6))
    yield ""


def _launch_cells(launch: LaunchStory, guess: bool) -> list[object]:
    span = launch.span
    kept = span.last_step if span.abandoned_after is None else span.abandoned_after
    none_kept = span.abandoned_after is not None and span.abandoned_after <= (span.start_step or 0)
    factor = "" if launch.lr is None else format_factor(launch.lr.factor)
    if launch.lr is not None and launch.lr.factor is None:
        factor += f" ({launch.lr.reason})"
    return [
        launch.number,
        _step(span.start_step) + (" (inferred)" if guess else ""),
        _step(span.last_step),
        "–" if none_kept else _step(kept),
        factor,
        launch.verdict or ("no guard" if launch.resumed else ""),
        len(launch.checkpoints),
        launch.outcome,
    ]


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)


def _costs(story: Story, chapters: Sequence[Chapter], lost_seconds: Mapping[str, float]) -> Iterator[str]:
    rows: list[tuple[object, ...]] = []
    steps, seconds = 0, []
    for chapter in chapters:
        mark = chapter.mark
        if mark is not None:
            lost, took = max(0, mark.from_step - mark.to_step), lost_seconds.get(mark.entry_id)
            rows.append((_link(chapter), mark.from_step, mark.to_step, lost, format_lost(took)))
            steps += lost
            seconds.append(took)
    if rows:
        known = [one for one in seconds if one is not None]
        rows.append(("all", None, None, steps, format_lost(sum(known) if known == seconds else None)))
        yield "## What the rollbacks cost\n"
        yield markdown_table(["rollback", "from", "to", "steps lost", "time lost"], rows, numeric=(1, 2, 3, 4))
        yield ""


def format_lost(seconds: float | None) -> str:
    """The time that a rollback discarded."""
    return "unknown" if seconds is None else format_age(seconds)


def _rules(chapters: Sequence[Chapter]) -> Iterator[str]:
    rules = [(chapter, rule) for chapter in chapters for rule in chapter.rules]
    if not rules:
        return
    yield "## Rules learnt"
    yield ""
    for chapter, rule in rules:
        yield f"- {markdown_line(rule)} ([{chapter.number}](#{anchor_of(chapter.entry.id)}))"
    yield ""
