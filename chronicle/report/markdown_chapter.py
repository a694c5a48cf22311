"""One chapter of `CHRONICLE.md`: what was seen, suspected, done and expected, what came out, and the evidence. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from chronicle.report.markup import anchor_of, link_target, markdown_cell, markdown_line, markdown_text
from chronicle.report.machine_words import TOLD_KINDS, machine_words
from chronicle.story.chapters import Chapter
from chronicle.story.launches import LaunchStory
from chronicle.story.plain import format_factor, format_when, plain

__all__ = ["IMAGES", "changed", "chapter_section"]

MARKS = {"supported": "☑", "refuted": "☒"}
IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
WORDS = "text tags symptom suspects action expect outcome rule evidence hosts"
TOLD = frozenset((*WORDS.split(), "arms", "questions", "confounders", "base", "event", "import"))  # told by a paragraph


def chapter_section(chapter: Chapter, imported: Mapping[str, Chapter]) -> Iterator[str]:
    """The lines of one chapter, with its anchor. `imported`: chapters by the number they had in an older chronicle."""
    entry, data = chapter.entry, chapter.data
    yield f'<a id="{anchor_of(entry.id)}"></a>'
    yield ""
    yield f"## {chapter.number}. {markdown_line(chapter.title)} ({format_when(entry.ts)})"
    yield ""
    yield " · ".join(_where(chapter)) + "."
    for paragraph in _paragraphs(chapter, data, imported):
        yield ""
        yield paragraph
    yield ""


def _where(chapter: Chapter) -> Iterator[str]:
    entry = chapter.entry
    if entry.launch is not None:
        yield f"Launch {entry.launch}"
    if entry.step is not None:
        yield f"step **{entry.step}**"
    for name in ("hosts", "tags"):
        listed = chapter.data.get(name)
        if isinstance(listed, list | tuple) and listed:
            yield f"{name} " + ", ".join(_code(item) for item in listed)
    yield f"{markdown_line(entry.kind)} {_code(entry.id)}"


def _paragraphs(chapter: Chapter, data: Mapping[str, Any], imported: Mapping[str, Chapter]) -> Iterator[str]:
    if data.get("text"):
        yield markdown_text(data["text"])
    if data.get("symptom"):
        yield f"**Seen.** {markdown_text(data['symptom'])}"
    for name, sentence in machine_words(chapter.entry):
        yield f"**{name}.** {markdown_line(sentence)}"
    yield from _suspects(data.get("suspects"))
    yield from _did(chapter, data)
    if chapter.launch is not None:
        yield from _launch_paragraphs(chapter.launch)
    if data.get("expect"):
        yield f"**Expected.** {markdown_text(data['expect'])}"
    if chapter.outcome and chapter.launch is None:
        yield f"**Came out.** {_came_out(chapter, imported)}"
    for rule in chapter.rules:
        yield f"> Rule learnt: {markdown_line(rule)}"
    yield from _checks(data.get("checks"))
    yield from _experiment(data)
    yield from _evidence(data.get("evidence"), chapter.title)
    yield from _rest(chapter)


def _suspects(suspects: object) -> Iterator[str]:
    rows = [s for s in suspects if isinstance(s, Mapping)] if isinstance(suspects, list | tuple) else []
    if rows:
        yield "**Suspects.**\n\n" + "\n".join(_suspect(row) for row in rows)


def _suspect(row: Mapping[str, Any]) -> str:
    verdict = str(row.get("verdict") or "open")
    claim = f": {markdown_line(row['claim'])}" if row.get("claim") else ""
    test = f"; test: {markdown_line(row['test'])}" if row.get("test") else ""
    return f"- {MARKS.get(verdict, '☐')} {markdown_line(row.get('cause', 'unknown'))}{claim}{test}; *{markdown_line(verdict)}*"


def _did(chapter: Chapter, data: Mapping[str, Any]) -> Iterator[str]:
    if not chapter.action:
        return
    target = "" if chapter.to is None else f" to **{chapter.to}**"
    changes = "".join("; " + changed(*change) for change in chapter.changes)
    action = data.get("action")
    note = f" ({markdown_line(action['note'])})" if isinstance(action, Mapping) and action.get("note") else ""
    yield f"**Did.** {markdown_line(chapter.action)}{target}{changes}{note}"


def _launch_paragraphs(launch: LaunchStory) -> Iterator[str]:
    lines = []
    if launch.argv:
        lines.append(f"Command: {_code(' '.join(launch.argv))}")
    lines.append(f"Steps: {_steps(launch)}.")
    if launch.lr is not None:
        lines.append(f"LR: {format_factor(launch.lr.factor)} of the first schedule ({markdown_line(launch.lr.reason)}).")
    if launch.verdict is not None or launch.resumed:
        lines.append(f"Guard: {markdown_line(launch.verdict or 'did not speak')}.")
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


def _checks(checks: object) -> Iterator[str]:
    rows = [c for c in checks if isinstance(c, Mapping)] if isinstance(checks, list | tuple) else []
    if not rows:
        return
    lines = ["| check | expected | found | where |", "|---|---|---|---|"]
    for row in rows:
        cells = (markdown_cell(row.get(name, "")) for name in ("name", "expected", "found", "where"))
        lines.append("| " + " | ".join(cells) + " |")
    yield "\n".join(lines)


def _experiment(data: Mapping[str, Any]) -> Iterator[str]:
    arms = [a for a in data.get("arms") or () if isinstance(a, Mapping)]
    if arms:
        lines = ["| arm | name | restarts | data |", "|---|---|--:|---|"]
        for arm in arms:
            cells = (markdown_cell(arm.get(name, "")) for name in ("id", "name", "restarts", "data"))
            lines.append("| " + " | ".join(cells) + " |")
        yield "\n".join(lines)
    questions = [q for q in data.get("questions") or () if isinstance(q, Mapping)]
    if questions:
        yield "\n".join(f"- **{markdown_line(q.get('q', ''))}** {markdown_line(q.get('answer', ''))}" for q in questions)
    confounders = data.get("confounders")
    if isinstance(confounders, list | tuple) and confounders:
        yield "Confounders: " + "; ".join(markdown_line(c) for c in confounders) + "."
    if data.get("base"):
        yield f"Base: {markdown_line(data['base'])}."


def _evidence(evidence: object, title: str) -> Iterator[str]:
    rows = [e for e in evidence if isinstance(e, Mapping)] if isinstance(evidence, list | tuple) else []
    if rows:
        yield "\n".join(_piece(row, title) for row in rows)


def _piece(row: Mapping[str, Any], title: str) -> str:
    path, what = str(row.get("path") or ""), str(row.get("what") or "")
    digest = row.get("sha256")
    if isinstance(digest, str) and digest.isalnum() and len(digest) == 64:
        target: str | None = f"objects/{digest[:2]}/{digest}"
    else:
        target = link_target(path)
    if target and path.lower().endswith(IMAGES):
        return f"![{markdown_line(what or title)}]({target})"
    named = f"[{markdown_line(path)}]({target})" if target and (digest or row.get("kind") == "link") else _code(path)
    return f"- {markdown_line(row.get('kind', 'evidence'))}: {named}" + (f": {markdown_line(what)}" if what else "")


def _rest(chapter: Chapter) -> Iterator[str]:
    """Fields that no paragraph above tells, for kinds that this program does not know."""
    told = (*TOLD_KINDS, "rollback.receipt", "guard.verdict", "undo.receipt", "experiment.report")
    known = chapter.launch is not None or chapter.entry.kind in told
    rest = {} if known else {k: v for k, v in chapter.data.items() if k not in TOLD and k != "checks"}
    if rest:
        yield "\n".join(f"- {markdown_line(key)}: {markdown_line(value)}" for key, value in rest.items())


def changed(name: str, before: str, after: str) -> str:
    """One field as it was and as it is."""
    return f"{_code(name)} {markdown_line(before)} → {markdown_line(after)}"


def _code(text: object) -> str:
    return "`" + plain(text).replace("`", "'") + "`"
