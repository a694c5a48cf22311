"""The words of the HTML page: facts, sections, a table under each plot. Everything escaped. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chronicle.report.markup import anchor_of, html_text
from chronicle.report.page_markup import Raw, folded, plot, section, table
from chronicle.report.page_story import page_story
from chronicle.report.study_panels import KIND
from chronicle.story.assemble import Story
from chronicle.story.chapters import Chapter, tell_chapters
from chronicle.story.plain import format_age, format_factor, format_number, format_when
from chronicle.story.resumes import MOST_WINDOWS

__all__ = ["page_body", "page_header"]

EXPERIMENT = "experiment"
MOST_FACTORS = 40  # of the LR ledger in the head of the page; the launches' table has them all


def page_header(story: Story) -> str:
    """Where the run is, in a handful of facts."""
    head, last = story.headline, story.last_launch
    if last is None:
        return '<p class="soft">No launch stands in this journal, so there is no life of a run to draw.</p>' + _problems(story)
    facts = [("step", str(head.step)), ("loss", format_number(head.loss)), ("LR", format_number(head.values.get("lr")))]
    line = story.ledger.line(head.launch)
    if line is not None:
        facts.append(("of the first LR", format_factor(line.factor)))
    lost = sum(launch.span.abandoned_steps for launch in story.launches)
    facts += [("launches", str(len(story.launches))), ("steps abandoned", str(lost))]
    facts.append(("open incidents", str(len(story.open_matters))))
    facts.append((f"launch {last.number}", last.outcome))
    items = "".join(f"<li><b>{html_text(value)}</b><span>{html_text(name)}</span></li>" for name, value in facts)
    factors = [format_factor(factor) for factor in story.lr_path]
    path = " → ".join(factors if len(factors) <= MOST_FACTORS else [*factors[:4], "…", *factors[4 - MOST_FACTORS :]])
    ledger = f'<p class="soft">LR ledger: {html_text(path or "unknown")}</p>'
    return f'<ul class="facts">{items}</ul>{ledger}' + _problems(story)


def _problems(story: Story) -> str:
    count = len(story.problems)
    return f'<p class="warn">The journal has {count} problem(s): chronicle audit names them.</p>' if count else ""


def page_body(story: Story, data: Mapping[str, Any]) -> str:
    """All sections; a section without anything to show is left out. A study's own journal has no launches but answers."""
    chapters = tell_chapters(story)
    return "\n".join(
        [
            *_lineage(data),
            *_incidents(data),
            *_resumes(data),
            *_channels(data),
            *_progress(data),
            *_costs(data),
            *_experiments(chapters, data["studies"]),
            *page_story(chapters),
        ]
    )


def _lineage(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["launches"]:
        return
    heads = ["launch", "from", "to", "kept to", "LR", "why", "guard", "ended", "started"]
    keys = ("number", "start", "last", "keptTo", "lr", "why", "guard", "outcome")
    rows = [[*(x[key] for key in keys), format_when(x["started"])] for x in data["launches"]]
    words = (
        '<p class="soft">LR on top, loss by launch, below which launch came out of which. '
        "Grey: abandoned. Dashed: a rollback went here. Dotted: restart."
    )
    if data["every"] > 1:
        words += f" Of {len(rows)} launches one in {data['every']} is in the graph below; the table has all."
    label = f"learning rate, loss and tree of {len(rows)} launches"
    listed = folded(table(heads, rows, numeric=(0, 1, 2, 3)), "launches as a table")
    yield section("lineage", "The life of the run", f"{words}</p>", plot("plot-lineage", label), listed)


def _incidents(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["incidents"]:
        return
    keys = ("kind", "tier", "launch", "low", "onset", "outcome")
    rows = [
        [Raw(f'<a href="#{html_text(x["id"])}">{html_text(x["title"])}</a>'), *(x[key] for key in keys)]
        for x in data["incidents"]
    ]
    heads = ["incident", "kind", "tier", "launch", "onset at the earliest", "onset", "outcome"]
    listed = folded(table(heads, rows, numeric=(3, 4, 5)), f"all {len(rows)} incidents as a table")
    words = (
        '<p class="soft">Red: onset, with its band back to the earliest. '
        "Ticks: checkpoints. Dashed: where the run went back to.</p>"
    )
    yield section("incidents", "Incidents", words, '<div class="grid" id="cards"></div>', listed)


def _resumes(data: Mapping[str, Any]) -> Iterator[str]:
    if not data["resumes"]:
        return
    rows = [[x["launch"], x["step"], x["bump"], x["halfLife"], _shifts(x["shifts"])] for x in data["resumes"]]
    heads = ["launch", "resumed at", "bump of the loss", "half of it gone after (steps)", "channels that moved most (σ)"]
    listed = table(heads, rows, numeric=(0, 1, 2, 3))
    drawn = plot("plot-resumes", "loss around each resume, aligned at the resume")
    newest = f"<p class='soft'>The newest {len(rows)} restarts.</p>" if len(rows) == MOST_WINDOWS else ""
    yield section("resumes", "What each restart did", newest, drawn, folded(listed))


def _shifts(shifts: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{s['channel']} {s['sigmas']:+.1f}" for s in shifts[:3])


def _channels(data: Mapping[str, Any]) -> Iterator[str]:
    rest = [name for name in data["channels"] if name not in (data["loss"], "lr")]
    if rest:
        chooser = '<p><label>channel <select id="channel"></select></label></p>'
        keys = ("channel", "before", "after", "sigmas")
        shifts = [[x["launch"], *(s[key] for key in keys)] for x in data["resumes"] for s in x["shifts"]]
        shifts.sort(key=lambda row: -abs(float(row[4])))
        heads = ["launch", "channel", "before", "after", "jump (σ)"]
        listed = folded(table(heads, shifts[:60], numeric=(0, 2, 3, 4)), "jumps at resumes, largest first")
        drawn = plot("plot-channel", "one channel by launch")
        yield section("channels", "What moved with it", chooser, drawn, listed if shifts else "")
    if data["groups"]["sources"]:
        words = "<p class='soft'>Every source on its own scale: who moves the mean?</p>"
        yield section("by-source", "By data source", words, '<div class="grid" id="sources"></div>')
    if data["groups"]["health"]:
        yield section("gradients", "Gradient and optimizer health", '<div class="grid" id="health"></div>')


def _progress(data: Mapping[str, Any]) -> Iterator[str]:
    found = data["progress"]
    if not found["s"]:
        return
    words = [f"<p class='soft'>Rolling median of the lineage's loss, {found['masked']} points of spikes masked.</p>"]
    if found["slope"] is not None:
        words.append(f"<p>Last quarter: {found['slope']:+.3g} ± {found['error']:.1g} per 1000 steps.</p>")
    if found["plateau"]:
        words.append('<p class="warn">Plateau: no decrease beyond twice its uncertainty in the last quarter.</p>')
    if found["distinct"] is not None:
        words.append(
            f'<p class="warn">Only {found["distinct"]} distinct values among the last points: '
            "the loss is printed in low precision (bf16?).</p>"
        )
    rows = [[s, v] for s, v in zip(found["s"], found["v"], strict=True)]
    listed = folded(table(["step", "median loss"], rows[:: max(1, len(rows) // 40)], numeric=(0, 1)))
    yield section("progress", "Progress", *words, plot("plot-progress", "rolling median of the loss"), listed)


def _costs(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [[x["from"], x["to"], x["lost"], _time(x["seconds"])] for x in data["rollbacks"]]
    total = sum(x["lost"] for x in data["rollbacks"])
    count = "1 rollback" if len(rows) == 1 else f"{len(rows)} rollbacks"
    words = f"<p class='soft'>{count} threw {total} steps away. Grey: lost.</p>"
    listed = folded(table(["from", "to", "steps lost", "time lost"], rows, numeric=(0, 1, 2)))
    if any(x["time"][0] for x in data["clocks"]):
        drawn = plot("plot-staircase", "step against wall clock")
        yield section("costs", "Where the time went", words, drawn, listed if rows else "")


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_age(seconds)


def _experiments(chapters: Sequence[Chapter], panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    newest = {str(c.data.get("study") or c.title): c for c in chapters if c.entry.kind == KIND}
    found = [c for c in chapters if c.entry.kind == EXPERIMENT or c in newest.values()]  # its runs are in its journal
    if not found:
        return
    by_anchor = {panel["anchor"]: panel for panel in panels}
    yield section("experiments", "Experiments", *(_experiment(c, by_anchor.get(anchor_of(c.entry.id))) for c in found))


def _experiment(chapter: Chapter, panel: Mapping[str, Any] | None) -> str:
    anchor = anchor_of(chapter.entry.id)
    parts = [f'<h3><a href="#{anchor}">{html_text(chapter.title)}</a></h3>']
    questions = [q for q in chapter.data.get("questions") or () if isinstance(q, Mapping)]
    answers = "".join(f"<li><b>{html_text(q.get('q', ''))}</b> {html_text(q.get('answer', ''))}</li>" for q in questions)
    parts.append(f"<ul>{answers}</ul>" if answers else "")
    if panel is not None:
        if panel["outcome"]:
            parts.append(f'<p class="soft">Outcome: {html_text(panel["outcome"])} ({html_text(panel["unit"])}).</p>')
        parts.append(f'<div class="grid wide-cards" id="study-{anchor}"></div>')
        heads = ["contrast", "question", "n", "mean", "low", "high", "verdict"]
        keys = ("name", "question", "n", "mean", "low", "high", "verdict")
        rows = [[c[key] for key in keys] for c in panel["contrasts"]]
        parts.append(folded(table(heads, rows, numeric=(2, 3, 4, 5)), "contrasts as a table") if rows else "")
    arms = [a for a in chapter.data.get("arms") or () if isinstance(a, Mapping)]
    cells = [[a.get("id"), a.get("name"), a.get("restarts"), a.get("data")] for a in arms]
    parts.append(table(["arm", "name", "restarts", "data"], cells) if cells else "")
    return "".join(parts)
