"""The story at the end of the HTML page: a table of all chapters, then each with its words. Everything escaped. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from chronicle.report.markup import anchor_of, html_text, link_target
from chronicle.report.machine_words import machine_words
from chronicle.report.markdown_chapter import IMAGES
from chronicle.report.page_markup import Raw, folded, section, table
from chronicle.story.chapters import Chapter
from chronicle.story.plain import format_when, plain_block

__all__ = ["page_story"]


FOLD = 400  # a story of more chapters shows its newest `SHOWN`, the older ones in closed parts
SHOWN, PART = 200, 1_000


def page_story(chapters: Sequence[Chapter]) -> Iterator[str]:
    """Oldest first. Of a long story all but the end is closed: a link, a search or a key opens the part that is meant."""
    heads = ["#", "when", "launch", "step", "what", "action", "to", "outcome"]
    fold = len(chapters) > FOLD
    older, newest = (chapters[:-SHOWN], chapters[-SHOWN:]) if fold else ((), chapters)
    parts = []
    for first in range(0, len(older), PART):
        part = older[first : first + PART]
        title = f"chapters {part[0].number} to {part[-1].number}, from {format_when(part[0].entry.ts)}"
        parts.append(folded("".join(_chapter(c) for c in part), title))
    listed = table(heads, (_row(c) for c in newest), numeric=(0, 2, 3, 6))
    yield section("story", "The whole story", *parts, listed, *(_chapter(c) for c in newest))


def _row(chapter: Chapter) -> list[object]:
    entry = chapter.entry
    return [
        Raw(f'<a href="#{anchor_of(entry.id)}">{chapter.number}</a>'),
        Raw(f'<span class="when">{html_text(format_when(entry.ts))}</span>'),
        entry.launch,
        entry.step,
        chapter.title,
        chapter.action,
        chapter.to,
        chapter.outcome,
    ]


def _chapter(chapter: Chapter) -> str:
    entry, data = chapter.entry, chapter.data
    launch = "" if entry.launch is None else f"launch {entry.launch}"
    step = "" if entry.step is None else f"step {entry.step}"
    line = " · ".join(word for word in (launch, step, format_when(entry.ts), entry.kind, entry.id) if word)
    parts = [f'<article id="{anchor_of(entry.id)}"><h3>{chapter.number}. {html_text(chapter.title)}</h3>']
    parts.append(f'<p class="soft">{html_text(line)}</p>')
    for name, key in (("", "text"), ("Seen", "symptom")):
        parts += _words(name, data.get(key))
    for name, sentence in machine_words(entry):
        parts += _words(name, sentence)
    parts += _suspects(data.get("suspects"))
    if chapter.action:
        parts += _words("Did", _action(chapter))
    parts += _words("Expected", data.get("expect"))
    if chapter.outcome:
        parts += _words("Came out", ": ".join(x for x in (chapter.outcome, chapter.outcome_text) if x))
    parts += [item for rule in chapter.rules for item in _words("Rule learnt", rule)]
    parts += _checks(data.get("checks"))
    parts += _evidence(data.get("evidence"))
    return "".join(parts) + "</article>"


def _words(name: str, text: object) -> list[str]:
    if not text:
        return []
    label = f"<b>{html_text(name)}.</b> " if name else ""
    lines = "\n".join(html_text(line) for line in plain_block(text).split("\n"))
    return [f'<pre class="text">{label}{lines}</pre>']


def _action(chapter: Chapter) -> str:
    target = "" if chapter.to is None else f" to {chapter.to}"
    return f"{chapter.action}{target}" + "".join(f"; {name} {before} → {after}" for name, before, after in chapter.changes)


def _suspects(suspects: object) -> list[str]:
    rows = [s for s in suspects if isinstance(s, Mapping)] if isinstance(suspects, list | tuple) else []
    cells = [[s.get("verdict", "open"), s.get("cause"), s.get("claim"), s.get("test")] for s in rows]
    return [table(["verdict", "suspect", "claim", "test"], cells)] if cells else []


def _checks(checks: object) -> list[str]:
    rows = [c for c in checks if isinstance(c, Mapping)] if isinstance(checks, list | tuple) else []
    cells = [[c.get(name) for name in ("name", "expected", "found", "where")] for c in rows]
    return [folded(table(["check", "expected", "found", "where"], cells), f"{len(cells)} checks")] if cells else []


def _evidence(evidence: object) -> list[str]:
    rows = [e for e in evidence if isinstance(e, Mapping)] if isinstance(evidence, list | tuple) else []
    items = []
    for row in rows:
        path, what = str(row.get("path") or ""), str(row.get("what") or "")
        digest = row.get("sha256")
        stored = isinstance(digest, str) and len(digest) == 64 and digest.isalnum()
        target = f"objects/{str(digest)[:2]}/{digest}" if stored else link_target(path)
        named = f"<code>{html_text(path)}</code>"
        if target and (stored or path.lower().endswith(IMAGES)):
            named = f'<a href="{html_text(target)}">{html_text(path)}</a>'
        items.append(f"<li>{html_text(row.get('kind', 'evidence'))}: {named} {html_text(what)}</li>")
    return [f"<ul>{''.join(items)}</ul>"] if items else []
