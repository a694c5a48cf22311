"""report.html in a real browser: it draws, says nothing on the console, listens to keys, and asks the net for nothing."""

import json
import math
import re
import time
from pathlib import Path

import pytest

from chronicle.report.html import render_html
from chronicle.report.page_data import build_page_data, drawn
from chronicle.story import read_story
from chronicle.story.series import ChannelCurve, LaunchSeries, read_series
from tests.builders.story_runs import StoryRun, toy_run
from tests.report.chromium import needs_browser, screenshot, visit
from tests.report.devtools import browser

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> ${1} @@DATA@@"


def rich_run(root: Path) -> StoryRun:
    """Three launches with sources, gradients, samples, an incident with a band, hardware, a study and evil words."""
    run = StoryRun(root, "rich")
    for number, (start, last) in enumerate(((0, 400), (300, 600), (600, 700)), start=1):
        if number == 2:
            run.rollback(300, 0.5)
        run.start(number, start)
        points = {}
        for step in range(start + 1, last + 1):
            bump = 0.3 * math.exp(-(step - start) / 20) if number == 3 else 0.0
            spike = 3.0 if number == 1 and step > 360 else 0.0
            loss = 2 + math.exp(-step / 100) + 0.01 * math.sin(step) + bump + spike
            mix = 0.5 + 0.01 * math.cos(step) - (0.2 if number == 3 and step < start + 40 else 0.0)
            points[step] = {
                "loss": loss, "lr": 1e-3 * (0.5 if number > 1 else 1), "grad_norm": 1 + abs(math.sin(step)),
                "loss/code": loss + 0.1, "loss/prose": loss - 0.1, "share/code": mix,
                "samples": 64.0 * (step - (start if number == 3 else 0)),  # launch 3 counts from its own beginning
                "tokens": 1000.0 * step,
            }  # fmt: skip
        run.metrics(number, points)
        for step in range(start + 50, last + 1, 50):
            run.add("checkpoint", launch=number, step=step, data={"path": f"opt_step-{step}"})
        if number == 1:
            event = {"id": 1, "kind": "gradual-divergence", "tier": "propose", "status": "diverging"}
            event |= {"onset_step": 361, "onset_low_step": 340}
            run.add("incident", launch=1, step=361, title=EVIL, data=event)
            run.add("hardware", launch=1, step=350, title="Xid 64")
        run.end(number, last)
    run.add("plan", data={"declared": {"params": 2_000_000}})
    add_study(run)
    run.add("note", title=EVIL, data={"text": EVIL, "suspects": [{"cause": EVIL, "claim": EVIL}], "rule": EVIL})
    return run


def add_study(run: StoryRun) -> None:
    """A study's report as docs/studies.md describes it."""
    data = {"study": "restart-impact", "questions": [{"q": "Does it hurt?", "answer": "inconclusive"}]}
    run.add("experiment.report", title="restart-impact", data=data | {"arms": [{"id": "A", "name": EVIL}]})


def page_of(run: StoryRun, path: Path, extra: str = "") -> Path:
    story = read_story(run.paths, signs_of_life=False)
    series = read_series(run.paths, [x.number for x in story.launches])
    page = render_html(story, series)
    path.write_text(page.replace("</body>", f"{extra}</body>"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def rich_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    return page_of(rich_run(root), root / "report.html")


def test_the_page_is_alone_in_the_world(rich_page: Path) -> None:
    page = rich_page.read_text()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page) == []
    assert "default-src 'none'" in page


def test_the_same_story_gives_the_same_page(tmp_path: Path) -> None:
    first, second = (page_of(toy_run(tmp_path / n), tmp_path / f"{n}.html").read_bytes() for n in ("a", "b"))
    assert first == second


def test_of_a_studys_many_entries_only_its_newest_report_is_an_experiment(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    for number in range(3):
        run.add("experiment.launch", title=f"launch {number}", data={"study": "restart-impact"})
        add_study(run)
    page = page_of(run, tmp_path / "report.html").read_text()
    section = page[page.index('<section id="experiments">'):]
    assert section[: section.index("</section>")].count("<h3>") == 1


def test_words_of_people_are_never_markup(rich_page: Path) -> None:
    page = rich_page.read_text()
    assert page.count("<script") == 2
    assert "<img" not in page


@needs_browser
def test_the_page_draws_every_plot_without_a_word_on_the_console(rich_page: Path, tmp_path: Path) -> None:
    seen = visit(rich_page, tmp_path / "profile")
    assert seen.console == []
    assert 'data-ready="yes"' in seen.dom
    assert "<title>rich: chronicle</title>" in seen.dom  # nothing of EVIL ran
    plots = re.findall(r'<div class="plot(?: [^"]*)?"[^>]*>', seen.dom)
    assert len(plots) >= 10
    assert [p for p in plots if "data-drawn" not in p] == []
    assert seen.dom.count('<svg class="chart"') == len(plots)


@needs_browser
def test_keys_and_buttons_change_axis_and_theme(tmp_path: Path) -> None:
    script = """<script>const waits = setInterval(() => {
      if (!document.getElementById("plot-lineage").data) return;  // drawn when the browser makes its first frame
      clearInterval(waits);
      const key = (k) => document.dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
      const plot = document.getElementById("plot-lineage"), seen = [];
      const end = () => Math.max(...plot.data.flatMap((t) => t.x || []).filter((x) => x !== null));
      seen.push(end()); key("2"); seen.push(end()); key("3"); seen.push(end()); key("4"); seen.push(end());
      const root = document.documentElement.dataset, reach = "input:not([disabled]),button,select,summary,a[href]";
      key("1"); key("t"); seen.push(root.theme); key("t"); seen.push(root.theme);
      const lost = [...document.querySelectorAll(reach)].filter((e) => e.tabIndex < 0);
      document.body.dataset.seen = JSON.stringify([...seen, lost.length]);
    }, 100)</script>"""
    page = page_of(rich_run(tmp_path), tmp_path / "keys.html", script)
    seen = visit(page, tmp_path / "profile")
    assert seen.console == []
    found = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert found is not None
    steps, minutes, samples, flops, first_theme, second_theme, unreachable = json.loads(found[1].replace("&quot;", '"'))
    assert steps == 700 and 0 < minutes < 60
    assert samples == 64 * 700  # launch 3 counted from 0 and is carried on from where launch 2 stood at its start
    assert flops == pytest.approx(6 * 2_000_000 * 1000.0 * 700)
    assert {first_theme, second_theme} == {"dark", "light"}
    assert unreachable == 0


@needs_browser
def test_log_axis_smoothing_panels_held_out_loss_and_search(tmp_path: Path) -> None:
    """The smoothed line lies over the raw one, which stays; a panel has any channel; the story shows what has the words."""
    script = """<script>const waits = setInterval(() => {
      const plot = document.getElementById("plot-lineage"), byId = (id) => document.getElementById(id);
      if (!plot.data) return;
      clearInterval(waits);
      const raw = () => plot.data.filter((t) => t.yaxis === "y2" && t.opacity === 0.32).flatMap((t) => t.y).length;
      const smooth = () => plot.data.filter((t) => t.yaxis === "y2" && t.line.width === 2.2);
      const seen = { held: plot.data.filter((t) => t.marker?.open).length, kinds: [plot.layout.yaxis2.type] };
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "l", bubbles: true }));
      seen.kinds.push(plot.layout.yaxis2.type);
      byId("smooth").value = 10;
      byId("smooth").dispatchEvent(new Event("input"));
      byId("more").click();
      byId("panels").querySelector("select").value = "share/code";
      byId("panels").querySelector("select").dispatchEvent(new Event("change"));
      byId("find").value = "xid 64";
      byId("find").dispatchEvent(new Event("input"));
      seen.found = byId("found").textContent;
      seen.chapters = [...document.querySelectorAll("#story article")].filter((one) => !one.hidden).length;
      setTimeout(() => {
        Object.assign(seen, { raw: raw(), smooth: smooth().map((t) => Math.max(...t.y) - Math.min(...t.y)) });
        document.body.dataset.seen = JSON.stringify(seen);
      }, 500);
    }, 100)</script>"""
    run = rich_run(tmp_path)
    run.start(4, 700)
    run.metrics(4, {s: {"loss": 2 + math.sin(s), "eval/loss": 2.1} for s in range(701, 1001)})
    seen = visit(page_of(run, tmp_path / "more.html", script), tmp_path / "profile")
    found = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert found is not None and seen.console == []
    told = json.loads(found[1].replace("&quot;", '"'))
    assert told["held"] == 1 and told["kinds"] == ["linear", "log"]
    assert told["found"].startswith("1 of ") and told["chapters"] == 1
    assert told["raw"] >= 300 and min(told["smooth"]) < 0.5  # of a sine of amplitude 1
    assert "<h2>Machine</h2>" not in seen.dom and 'id="panel-1"' in seen.dom


@pytest.mark.slow
@needs_browser
def test_a_divergence_over_36_decades_is_drawn_on_a_log_axis_until_someone_chooses(tmp_path: Path) -> None:
    """On a linear one everything before it is a line at zero. A grad norm beside it keeps its own."""
    script = """<script>const waits = setInterval(() => {
      const plot = document.getElementById("plot-lineage");
      if (!plot.data) return;
      clearInterval(waits);
      const kinds = [plot.layout.yaxis2.type, document.getElementById("log").checked];
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "l", bubbles: true }));
      kinds.push(plot.layout.yaxis2.type);
      document.body.dataset.seen = JSON.stringify(kinds);
    }, 100)</script>"""
    run = StoryRun(tmp_path, "bare")
    run.start(1, 0)
    run.metrics(1, {s: {"loss": 2.0 if s < 80 else 2 * 10 ** (36 * (s - 79) / 21), "grad_norm": 1.0} for s in range(1, 101)})
    seen = visit(page_of(run, tmp_path / "wide.html", script), tmp_path / "profile")
    found = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert found is not None and seen.console == []
    assert json.loads(found[1].replace("&quot;", '"')) == ["log", True, "linear"]


@pytest.mark.slow
@needs_browser
def test_an_axis_that_nobody_logged_is_off(tmp_path: Path) -> None:
    script = """<script>setTimeout(() => {
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "4", bubbles: true }));
      const axis = (name) => document.querySelector(`input[name=axis][value=${name}]`);
      document.body.dataset.seen = [axis("flops").disabled, axis("samples").disabled, axis("step").checked].join();
    }, 2000)</script>"""
    seen = visit(page_of(toy_run(tmp_path), tmp_path / "toy.html", script), tmp_path / "profile")
    assert 'data-seen="true,true,true"' in seen.dom and seen.console == []


@pytest.mark.slow
@pytest.mark.sample
@needs_browser
def test_zoom_hover_legend_and_keys_by_hand(rich_page: Path, tmp_path: Path) -> None:
    """A drag zooms all panels, a double click goes back, a hover names launch and step, a click hides a launch, keys work."""
    with browser(tmp_path / "profile") as running:
        tab = running.open(rich_page.as_uri())
        plot = "document.getElementById('plot-lineage')"
        tab.until(f"{plot}?.querySelector('.legend button') && true")
        tab.value(f"{plot}.scrollIntoView()")  # whole: no mouse moves below the window
        where = f"const r = {plot}.querySelector('svg').getBoundingClientRect(), {{ xaxis, yaxis2 }} = {plot}.layout; "
        where += "return [r.left + xaxis.start, r.top + yaxis2.stop, xaxis.stop - xaxis.start, yaxis2.start - yaxis2.stop];"
        left, top, width, height = tab.value(f"(() => {{ {where} }})()")
        middle = top + height / 2
        full = tab.value(f"{plot}.layout.xaxis.range")
        tab.mouse("mousePressed", left + width / 4, middle, down=True)
        for part in (0.3, 0.4, 0.5):
            tab.mouse("mouseMoved", left + width * part, middle, down=True)
        tab.mouse("mouseReleased", left + width / 2, middle)
        zoomed = tab.until(f"({plot}.layout.xaxis.range[1] < {full[1]} * 0.6) && {plot}.layout.xaxis.range")
        assert full[0] < zoomed[0] < zoomed[1] < full[1]
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                at = {"x": left + width / 2, "y": middle, "button": "left", "clickCount": count}
                tab.ask("Input.dispatchMouseEvent", type=kind, **at)
        assert tab.until(f"({plot}.layout.xaxis.range[1] > {zoomed[1]}) && {plot}.layout.xaxis.range") == full
        told = f"[...{plot}.querySelectorAll('.tip:not([hidden])')].map((e) => e.textContent).join()"
        seen = ""
        for part in range(1, 40):  # from the top down: the curve is somewhere, below the mark of the hardware
            tab.mouse("mouseMoved", left + width / 2, top + height * part / 40)
            time.sleep(0.15)
            seen += tab.value(told)
        assert re.search(r"launch \d.*step \d+", seen), seen
        x, y = tab.value(
            f"(() => {{ const toggle = {plot}.querySelector('.legend button'); toggle.scrollIntoView({{ block: 'center' }});"
            " const r = toggle.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        tab.mouse("mousePressed", x, y, down=True)
        tab.mouse("mouseReleased", x, y)
        tab.until(f"{plot}.data.filter((t) => t.visible === 'legendonly').length >= 2")
        tab.key("3")
        tab.until(f"{plot}.layout.xaxis.title.text === 'samples'")
        tab.key("t")
        assert tab.until("document.documentElement.dataset.theme") in ("dark", "light")
        assert tab.console == []


@pytest.mark.slow
@pytest.mark.sample
@needs_browser
def test_by_keyboard_alone_every_control_is_reached_and_notices_are_marked_quietly(tmp_path: Path) -> None:
    """At 390 px, on a page whose run logged no LR: there is no panel of it. Tab passes no plot by, Enter keeps the focus."""
    run = StoryRun(tmp_path, "walked")
    run.start(1, 0)
    run.metrics(1, {s: {"loss": 2 + math.sin(s), "norm": 1.0, "gpu/0 %": 50.0} for s in range(1, 201)})
    for number, (tier, step) in enumerate((("notice", 60), ("warn", 120)), start=1):
        event = {"id": number, "kind": "instant-spike", "tier": tier, "status": "recovered", "onset_step": step}
        event |= {"channels": ["loss"]}
        title = f"{'warn: ' if tier == 'warn' else ''}instant-spike on loss since step {step}, recovered"
        run.add("incident", launch=1, step=step, title=title, data=event)
    run.end(1, 200)
    page = page_of(run, tmp_path / "walked.html")
    here = """(() => {
      const at = document.activeElement, look = (one) => getComputedStyle(one);
      const ring = (one) => parseFloat(look(one).outlineWidth) > 0 && look(one).outlineStyle !== "none";
      if (!at || at === document.body) return "end";
      at.dataset.walked = "yes";
      const shown = at.matches(".choice input") ? at.nextElementSibling : at, place = shown.getBoundingClientRect();
      const isSeen = place.bottom > 0 && place.top < innerHeight && place.right <= innerWidth;
      return ring(shown) && isSeen ? "fine" : shown.outerHTML.slice(0, 200);
    })()"""
    missed = """[...document.querySelectorAll("a[href], button, select, input, summary, svg.chart")].filter((one) =>
      !one.dataset.walked && !one.disabled && !(one.type === "radio" && !one.checked)
      && (one.tagName === "SUMMARY" || !one.closest("details:not([open])"))).map((one) => one.outerHTML.slice(0, 99))"""
    with browser(tmp_path / "profile") as running:
        tab = running.open("about:blank")
        tab.ask("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=False)
        tab.ask("Page.navigate", url=page.as_uri())
        plot = "document.getElementById('plot-lineage')"
        tab.until(f"{plot}?.data && {plot}.querySelector('.legend button') && true")
        assert tab.value(f"Object.keys({plot}.layout).filter((one) => /^y/.test(one))") == ["yaxis", "yaxis2", "yaxis4"]
        names = f"{plot}.data.filter((one) => one.mode === 'markers')"
        names += ".map((one) => [one.name, one.x, one.text[0], Boolean(one.marker.open)])"
        assert tab.value(names) == [
            ["notice", [60], "Spike of loss from step 60", True], ["incident", [120], "Spike of loss from step 120", False],
        ]  # fmt: skip
        assert tab.value(f"{plot}.layout.shapes.filter((one) => one.line.dash === 'solid').length") == 1  # the warning's
        stops = []
        while len(stops) < 200 and "end" not in stops:
            tab.key("Tab")
            stops.append(tab.value(here))
        assert {*stops} == {"fine", "end"} and tab.value(missed) == []
        tab.value(f"{plot}.querySelector('.legend button').focus()")
        tab.key("Enter")
        assert tab.value(f"document.activeElement === {plot}.querySelector('.legend button[aria-pressed=\"false\"]')")
        tab.value("document.getElementById('log').focus()")
        tab.key("Tab", shift=True)
        assert tab.value("document.activeElement.name") == "axis"
        tab.key("ArrowRight")
        tab.until(f"{plot}.layout.xaxis.title.text !== 'step'")
        assert tab.console == []


def test_the_page_of_a_study_begins_with_its_answers(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    add_study(run)
    page = page_of(run, tmp_path / "report.html").read_text()
    assert re.findall(r'<section id="([^"]*)"', page) == ["experiments", "story"]
    assert "No launches yet." in page and "Does it hurt?" in page


@pytest.mark.slow
@pytest.mark.sample
@needs_browser
def test_a_long_story_is_folded_and_every_part_is_reached_by_link_and_key(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    for number in range(1, 601):
        run.start(number, number - 1)
        run.metrics(number, {number: {"loss": float(number % 7), "lr": 1e-3}})
        run.end(number, number)
    page = page_of(run, tmp_path / "report.html")
    assert len(re.findall("<article ", page.read_text())) == 600
    first = re.search(r'<article id="([^"]*)"', page.read_text())
    assert first is not None
    with browser(tmp_path / "profile") as running:
        tab = running.open(page.as_uri())
        tab.until("document.documentElement.dataset.ready")
        part = "document.querySelector('#story > details')"
        assert tab.value(f"{part}.open") is False
        assert "chapters 0 to 399" in tab.value(f"{part}.querySelector('summary').textContent")
        tab.value(f"{part}.querySelector('summary').focus()")
        tab.ask("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
        tab.until(f"{part}.open")
        tab.value(f"{part}.open = false; location.hash = '#{first[1]}'")
        tab.until(f"{part}.open")
        assert tab.console == []


@needs_browser
def test_under_every_plot_is_a_table_of_its_numbers(rich_page: Path, tmp_path: Path) -> None:
    script = """<script>addEventListener("load", () => setTimeout(() => {
      const plots = [...document.querySelectorAll(".plot")];
      const bare = plots.filter((p) => !p.nextElementSibling?.matches("details")).map((p) => p.id);
      const fold = document.querySelector("#sources details");
      fold.open = true;
      setTimeout(() => { document.body.dataset.seen = JSON.stringify([bare, fold.querySelectorAll("tr").length]); }, 200);
    }, 1500))</script>"""
    page = tmp_path / "tables.html"
    page.write_text(rich_page.read_text().replace("</body>", f"{script}</body>"))
    seen = visit(page, tmp_path / "profile")
    found = re.search(r'data-seen="([^"]*)"', seen.dom)
    assert found is not None and seen.console == []
    bare, rows = json.loads(found[1].replace("&quot;", '"'))
    assert bare == [] and 40 < rows < 300


def test_a_thousand_launches_are_drawn_from_two_thousand_points(tmp_path: Path) -> None:
    run, series = StoryRun(tmp_path), []
    for number in range(1, 1_001):
        run.start(number, 10 * (number - 1))
        steps = list(range(10 * number - 9, 10 * number + 1))
        loss = [100.0 if (number, i) == (500, 4) else float(i % 3) for i in range(10)]
        series.append(LaunchSeries(launch=number, channels={"loss": ChannelCurve(steps, [float(s) for s in steps], loss)}))
    data = build_page_data(read_story(run.paths), series, {})
    curves = data["curves"]["loss"]
    assert sum(len(part["s"]) for curve in curves for part in curve.values() if isinstance(part, dict)) <= 2_000
    assert [100 in curve["kept"]["v"] for curve in curves].count(True) == 1  # the one high point stays
    assert len(json.dumps(drawn(data))) < 500_000


@needs_browser
def test_dark_and_light_look_different(rich_page: Path, tmp_path: Path) -> None:
    light = screenshot(rich_page, tmp_path / "p1", tmp_path / "light.png")
    dark = screenshot(rich_page, tmp_path / "p2", tmp_path / "dark.png", "--blink-settings=preferredColorScheme=0")
    assert light[:4] == dark[:4] == b"\x89PNG"
    assert len(light) > 50_000 and light != dark


def test_half_a_million_steps_and_thirteen_launches_stay_below_five_megabytes(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    series = []
    for number in range(1, 14):
        run.start(number, (number - 1) * 38_000)
        run.end(number, number * 38_500)
        steps = list(range((number - 1) * 38_000 + 1, number * 38_500 + 1, 25))
        times: list[float | None] = [float(s) for s in steps]
        channels = {f"channel/{c}": ChannelCurve(steps, times, [math.sin(s * c) * 1.23456 for s in steps]) for c in range(1, 9)}
        channels |= {"loss": channels["channel/1"], "lr": channels["channel/2"]}
        series.append(LaunchSeries(launch=number, channels=channels))
    data = build_page_data(read_story(run.paths), series, {})
    assert len(json.dumps(data, separators=(",", ":"))) < 5_000_000
    assert len(data["channels"]) == 10


def test_the_covariate_that_jumped_at_the_resume_comes_first(tmp_path: Path) -> None:
    """The seed's cause was the image-to-text ratio, found by eye."""
    run = rich_run(tmp_path)
    story = read_story(run.paths)
    data = build_page_data(story, read_series(run.paths, [1, 2, 3]), {})
    last = data["resumes"][-1]
    assert last["step"] == 600 and last["bump"] > 0.2
    assert 5 < last["halfLife"] < 30
    assert "share/code" in [s["channel"] for s in last["shifts"][:3]]
