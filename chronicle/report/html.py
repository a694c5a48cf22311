"""`report.html`: one self-contained page: facts, plots with a table each, and the whole story.

The plots are drawn by the page's own script as SVG (`page_chart.js`). A content security policy forbids requests. Text is
escaped. The data of the plots comes from `chronicle.report.page_data`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chronicle.journal.events import EntryKind, FirstBatchSeen, GuardVerdict, StudyReport
from chronicle.report.markdown import (
    ARM_HEADS,
    CHECK_HEADS,
    IMAGES,
    arm_rows,
    check_rows,
    format_lost,
    machine_words,
)
from chronicle.report.markup import (
    Raw,
    anchor_of,
    evidence_target,
    fill,
    folded,
    html_table,
    html_text,
    own_file,
    plot,
    section,
)
from chronicle.report.page_data import build_page_data, drawn
from chronicle.story.assemble import Story
from chronicle.story.chapters import Chapter, tell_chapters
from chronicle.story.learning import MOST_WINDOWS
from chronicle.story.matters import incident_title
from chronicle.story.plain import format_factor, format_number, format_when, plain_block
from chronicle.story.series import LaunchSeries, ParentSeries

FOLD = 400  # of more chapters the newest `SHOWN` are open, the older ones are in closed parts
SHOWN, PART = 200, 1_000
EXPERIMENT = "experiment"  # kind of studies in imported chronicles
MOST_FACTORS = 40  # of the LR ledger in the head of the page; the table of launches has all
SCRIPTS = ("page_axis.js", "page_chart.js", "page_draw.js", "page_plots.js", "page.js")  # one module


# --- the story at the end of the page -----------------------------------------------------------------------------------


def page_story(chapters: Sequence[Chapter]) -> Iterator[str]:
    """A table of all chapters, then each chapter, oldest first. The older parts of a long story are closed."""
    heads = ["#", "when", "launch", "step", "what", "action", "to", "outcome"]
    fold = len(chapters) > FOLD
    older, newest = (chapters[:-SHOWN], chapters[-SHOWN:]) if fold else ((), chapters)
    parts = []
    for first in range(0, len(older), PART):
        part = older[first : first + PART]
        title = f"chapters {part[0].number} to {part[-1].number}, from {format_when(part[0].entry.ts)}"
        parts.append(folded("".join(_chapter(c) for c in part), title))
    listed = html_table(heads, (_row(c) for c in newest), numeric=(0, 2, 3, 6))
    listed = listed.replace("<table>", '<table class="chapters">', 1)
    search = '<p><label>find <input id="find" type="search" placeholder="words of a chapter"></label> '
    search += '<span class="soft" id="found" role="status"></span></p>'
    yield section("story", "The whole story", search, *parts, listed, *(_chapter(c) for c in newest))


def _row(chapter: Chapter) -> list[object]:
    entry = chapter.entry
    return [
        Raw(f'<a href="#{anchor_of(entry.id)}">{chapter.number}</a>'),
        Raw(f'<span class="when">{html_text(format_when(entry.ts))}</span>'),
        entry.launch,
        entry.step,
        _title(chapter),
        chapter.action,
        chapter.to,
        chapter.outcome,
    ]


def _title(chapter: Chapter) -> str:
    """The chapter's title; that of an incident in words, unless a person has given it another one."""
    entry = chapter.entry
    return incident_title(entry) if entry.kind == EntryKind.INCIDENT and chapter.title == entry.title else chapter.title


def _chapter(chapter: Chapter) -> str:
    entry, words = chapter.entry, chapter.words
    launch = "" if entry.launch is None else f"launch {entry.launch}"
    step = "" if entry.step is None else f"step {entry.step}"
    line = " · ".join(word for word in (launch, step, format_when(entry.ts), entry.kind, entry.id) if word)
    parts = [f'<article id="{anchor_of(entry.id)}"><h3>{chapter.number}. {html_text(_title(chapter))}</h3>']
    parts.append(f'<p class="soft">{html_text(line)}</p>')
    rows = list(_batch_rows(chapter)) if entry.kind == EntryKind.GUARD_FIRST_BATCH else []
    parts += rows or [_words("", words.text)]
    parts += [_words(*said) for said in (("Seen", words.symptom), *machine_words(entry))]
    cells = [[s.get("verdict", "open"), s.get("cause"), s.get("claim"), s.get("test")] for s in words.suspects]
    parts += [html_table(["verdict", "suspect", "claim", "test"], cells)] if cells else []
    outcome = ": ".join(x for x in (chapter.outcome, chapter.outcome_text) if x) if chapter.outcome else ""
    done = [("Action", _action(chapter)), ("Expected", words.expect), ("Outcome", outcome)]
    parts += [_words(*said) for said in (*done, *(("Rule learnt", rule) for rule in chapter.rules))]
    checks = check_rows(GuardVerdict.view(chapter.data))
    parts += [folded(html_table(CHECK_HEADS, checks), f"{len(checks)} checks")] if checks else []
    items = [_evidence(row) for row in words.evidence if isinstance(row, Mapping)]
    parts += ["<ul>", *items, "</ul>"] if items else []
    return "".join(parts) + "</article>"


def _batch_rows(chapter: Chapter) -> Iterator[str]:
    """The first batch: what is wrong with it, and its rows with what is trained, masked and padding told apart."""
    seen = FirstBatchSeen.view(chapter.data)
    rows = seen.batch.get("rows") or ()
    for finding in seen.findings if rows else ():
        yield f'<p class="warn">{html_text(finding.get("name"))}: {html_text(finding.get("text"))}</p>'
    for number, row in enumerate(rows, 1):
        shown = "".join(_batch_part(part) for part in row.get("parts") or ())
        yield f'<p class="soft">row {number}, {row.get("tokens")} tokens</p><p class="tokens">{shown}</p>'


def _batch_part(part: Mapping[str, Any]) -> str:
    kind, tokens = str(part.get("kind")), part.get("tokens")
    named = f"{tokens} {'token' if tokens == 1 else 'tokens'} {kind}"
    kept = kind if kind in ("trained", "masked", "padding", "text") else "text"
    shown = part.get("text") or f"[{named}]"
    return f'<span class="{kept}" title="{html_text(named)}">{html_text(shown)}</span> '


def _words(name: str, text: object) -> str:
    if not text:
        return ""
    label = f"<b>{html_text(name)}.</b> " if name else ""
    lines = "\n".join(html_text(line) for line in plain_block(text).split("\n"))
    return f'<pre class="text">{label}{lines}</pre>'


def _action(chapter: Chapter) -> str:
    if not chapter.action:
        return ""
    target = "" if chapter.to is None else f" to {chapter.to}"
    return f"{chapter.action}{target}" + "".join(f"; {name} {before} → {after}" for name, before, after in chapter.changes)


def _evidence(row: Mapping[str, Any]) -> str:
    path = str(row.get("path") or "")
    target, stored = evidence_target(row)
    named = f"<code>{html_text(path)}</code>"
    if target and (stored or path.lower().endswith(IMAGES)):
        named = f'<a href="{html_text(target)}">{html_text(path)}</a>'
    return f"<li>{html_text(row.get('kind', 'evidence'))}: {named} {html_text(row.get('what') or '')}</li>"


# --- sections and tables ------------------------------------------------------------------------------------------------


def page_header(story: Story) -> str:
    """The state of the run in a few facts."""
    head, last = story.headline, story.last_launch
    if last is None:
        return '<p class="soft">No launches yet.</p>' + _problems(story)
    line = story.ledger.line(head.launch)
    factor = 1 if line is None else line.factor
    lost = sum(launch.span.abandoned_steps for launch in story.launches)
    facts = {
        "step": f"{head.step:,}",
        "loss": format_number(head.loss),
        "LR": format_number(head.lr),
        "of the first LR": "" if factor == 1 else format_factor(factor),
        "launches": f"{len(story.launches):,}",
        "steps abandoned": f"{lost:,}" if lost else "",
        "open incidents": f"{len(story.open_matters):,}",
    }
    lead = f'<p class="lead">Launch {last.number} {html_text(last.outcome)}'
    when = (last.ended or last.started) if story.is_dated else ""
    lead += f", {html_text(format_when(when))}." if when else "." if story.is_dated else "; its log has no times."
    lead += f' <b class="warn">{html_text(_worst(story))}</b></p>' if story.open_matters else "</p>"
    known = [(name, html_text(value)) for name, value in facts.items() if value]
    shown = (f'<li data-fact="{name}"><b>{value}</b><span>{name}</span></li>' for name, value in known)
    factors = [format_factor(one) for one in story.lr_path]
    path = " → ".join(factors if len(factors) <= MOST_FACTORS else [*factors[:4], "…", *factors[4 - MOST_FACTORS :]])
    doubt = f" · lineage {html_text(story.lineage.doubt)}" if story.lineage.doubt else ""
    told = f'<p class="soft">LR ledger: {html_text(path or "unknown")}{doubt}</p>'
    ledger = told if doubt or factor != 1 or len(factors) != 1 else ""
    return f'{lead}<ul class="facts">{"".join(shown)}</ul>{ledger}' + _problems(story)


def _worst(story: Story) -> str:
    """The newest open incident in one line."""
    count = len(story.open_matters)
    title = incident_title(story.open_matters[-1].entry) or "an incident"
    return f"Open: {title}" + (f", and {count - 1} more" if count > 1 else "")


def _problems(story: Story) -> str:
    count = len(story.problems)
    return f'<p class="warn">The journal has {count} problem(s): see chronicle audit.</p>' if count else ""


def page_body(story: Story, data: Mapping[str, Any]) -> str:
    """All sections that have something to show."""
    chapters = tell_chapters(story)
    return "\n".join(
        [
            *_lineage(data),
            *_incidents(data),
            *_resumes(data),
            *_channels(data),
            *_costs(data),
            *_experiments(chapters),
            *page_story(chapters),
        ]
    )


def _lineage(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["launches"]:
        return
    heads = ["launch", "from", "to", "kept to", "LR", "why", "guard", "ended", "started"]
    keys = ("number", "start", "last", "keptTo", "lr", "why", "guard", "outcome")
    rows = [[*(x[key] for key in keys), format_when(x["started"])] for x in data["launches"]]
    if any(x["inferred"] for x in data["launches"]):
        heads.append("parent")
        rows = [[*row, _origin(x)] for row, x in zip(rows, data["launches"], strict=True)]
    words = f'<p class="soft">{_caption(data)}'
    if data["parent"]:
        words += f" Grey line before the first launch: the parent. This run {html_text(data['parent']['words'])}."
    if data["every"] > 1:
        words += f" The graph shows one of {data['every']} launches; the table has all {len(rows)}."
    label = f"learning rate, loss and tree of {len(rows)} launches"
    listed = folded(html_table(heads, rows, numeric=(0, 1, 2, 3)), "launches as a table")
    yield section("lineage", "The life of the run", f"{words}</p>", plot("plot-lineage", label), listed)


def _caption(data: Mapping[str, Any]) -> str:
    """What is drawn, and only that."""
    panels = [word for word, is_drawn in (("LR", data["lr"]), ("loss by launch", data["loss"])) if is_drawn]
    tiers = [row["tier"] for row in data["incidents"] if row["onset"] is not None]
    marks = (
        ("Grey: abandoned", any((x["last"] or 0) > (x["keptTo"] or 0) for x in data["launches"])),
        ("Dashed: target of a rollback", data["rollbacks"]),
        ("Dotted: restart", data["restarts"]),
        ("Red triangle: incident", any(tier != "notice" for tier in tiers)),
        ("Hollow triangle: notice", "notice" in tiers),
        ("Violet: hardware", data["hardware"]),
    )
    drawn_here = ", ".join([*panels, "which launch continues which"])
    return ". ".join([f"From the top: {drawn_here}", *(words for words, is_there in marks if is_there)]) + "."


def _origin(launch: Mapping[str, Any]) -> str:
    """What a launch continues, in the table of launches."""
    parent = "" if launch["parent"] is None else f"launch {launch['parent']}"
    return f"{parent} (inferred)".strip() if launch["inferred"] else parent


def _incidents(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["incidents"]:
        return
    keys = ("words", "launch", "low", "onset", "detail")
    rows = [
        [Raw(f'<a href="#{html_text(x["id"])}">{html_text(x["title"])}</a>'), *(x[key] for key in keys)]
        for x in data["incidents"]
    ]
    heads = ["incident", "how it stands", "launch", "earliest onset", "onset", "seen beside it"]
    listed = folded(html_table(heads, rows, numeric=(2, 3, 4)), "incidents as a table")
    words = (
        '<p class="soft">Red: onset, with a band back to its lower bound. '
        "Ticks: checkpoints. Dashed: target of the rollback.</p>"
    )
    yield section("incidents", "Incidents", words, '<div class="grid" id="cards"></div>', listed)


def _resumes(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["resumes"]:
        return
    rows = [[x["launch"], x["step"], x["bump"], x["halfLife"], _shifts(x["shifts"])] for x in data["resumes"]]
    heads = ["launch", "resumed at", "loss bump", "half-life (steps)", "largest jumps of channels (σ)"]
    listed = html_table(heads, rows, numeric=(0, 1, 2, 3))
    drawn = plot("plot-resumes", "loss around each resume, aligned at the resume")
    newest = f"<p class='soft'>The newest {len(rows)} restarts.</p>" if len(rows) == MOST_WINDOWS else ""
    yield section("resumes", "Restarts", newest, drawn, folded(listed))


def _shifts(shifts: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{shift['channel']} {shift['sigmas']:+.1f}" for shift in shifts[:3])


def _channels(data: Mapping[str, Any]) -> Iterator[str]:
    rest = [name for name in data["channels"] if name not in (data["loss"], data["lr"])]
    if rest:
        more = '<button id="more" type="button">add a panel</button>'
        chooser = f'<p><label>channel <select id="channel"></select></label> {more}</p>'
        drawn = plot("plot-channel", "one channel by launch")
        yield section("channels", "Channels", chooser, drawn, '<div id="panels"></div>')
    if data["groups"]["sources"]:
        words = "<p class='soft'>Each data source on its own scale.</p>"
        yield section("by-source", "By data source", words, '<div class="grid" id="sources"></div>')
    if data["groups"]["health"]:
        yield section("gradients", "Gradient and optimizer health", '<div class="grid" id="health"></div>')
    if data["groups"]["machine"]:
        yield section("machines", "Machine", '<div class="grid" id="machine"></div>')


def _costs(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [[x["from"], x["to"], x["lost"], format_lost(x["seconds"])] for x in data["rollbacks"]]
    total = sum(x["lost"] for x in data["rollbacks"])
    count = "1 rollback" if len(rows) == 1 else f"{len(rows)} rollbacks"
    words = f"<p class='soft'>{count} discarded {total} steps. Grey: lost.</p>"
    listed = folded(html_table(["from", "to", "steps lost", "time lost"], rows, numeric=(0, 1, 2)))
    if any(x["time"][0] for x in data["clocks"]):
        drawn = plot("plot-staircase", "step against wall clock")
        yield section("costs", "Where the time went", words, drawn, listed if rows else "")


def _experiments(chapters: Sequence[Chapter]) -> Iterator[str]:
    reports = [c for c in chapters if c.entry.kind == EntryKind.EXPERIMENT_REPORT]
    newest = {StudyReport.view(c.data).study or c.title: c for c in reports}
    found = [c for c in chapters if c.entry.kind == EXPERIMENT or c in newest.values()]  # its runs are in its journal
    if found:
        yield section("experiments", "Experiments", *map(_experiment, found))


def _experiment(chapter: Chapter) -> str:
    report = StudyReport.view(chapter.data)
    rows = (f"<li><b>{html_text(q.get('q', ''))}</b> {html_text(q.get('answer', ''))}</li>" for q in report.questions)
    answers, arms = "".join(rows), arm_rows(report)
    parts = [f'<h3><a href="#{anchor_of(chapter.entry.id)}">{html_text(chapter.title)}</a></h3>']
    parts.append(f"<ul>{answers}</ul>" if answers else "")
    parts.append(html_table(ARM_HEADS, arms) if arms else "")
    return "".join(parts)


# --- the page -----------------------------------------------------------------------------------------------------------


def render_html(
    story: Story,
    series: Sequence[LaunchSeries],
    *,
    lost_seconds: Mapping[str, float] | None = None,
    parent: ParentSeries | None = None,
    mark: str | None = None,
) -> str:
    """The page. `mark`: of a served page, the name of what the run was like; it then listens for what is new."""
    data = build_page_data(story, series, lost_seconds or {}, parent)
    live = mark is not None
    parts = {
        "TITLE": html_text(f"{story.run}: chronicle"),
        "NAME": html_text(story.run),
        "CSS": own_file("page.css"),
        "HEADER": page_header(story),
        "BODY": page_body(story, data),
        "DATA": _inline(drawn(data) | ({"mark": mark} if live else {})),
        "SCRIPT": "\n".join(own_file(name) for name in (*SCRIPTS, *(("page_live.js",) if live else ()))),
    }
    return fill("page.html", parts)


def render_state(
    story: Story,
    series: Sequence[LaunchSeries],
    *,
    mark: str,
    lost_seconds: Mapping[str, float],
    parent: ParentSeries | None = None,
) -> str:
    """What of a served page changes with the run, as JSON: `header` and `body` (HTML), `data` of the plots with its mark."""
    data = build_page_data(story, series, lost_seconds, parent)
    parts = {"header": page_header(story), "body": page_body(story, data), "data": drawn(data) | {"mark": mark}}
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _inline(data: Mapping[str, Any]) -> str:
    """JSON inside a script element, with `<` escaped so that no text can close the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
