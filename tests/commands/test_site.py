"""The site of all runs: one index that says what is running and what is open, one page a run, with what its notes attach."""

import hashlib
import math
import re
from pathlib import Path

import pytest

from chronicle.cli.report import _many_runs
from chronicle.journal.events import Incident
from chronicle.report.index import _drawn, render_index
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli
from tests.report.chromium import needs_browser
from tests.report.devtools import browser


def make(root: Path, name: str, *, opened: bool = False, steps: int = 20) -> StoryRun:
    run = StoryRun(root, name)
    run.start(1, 0)
    run.metrics(1, {step: {"loss": 3.0 - step / steps, "lr": 1e-3} for step in range(1, steps + 1)})
    run.end(1, steps)
    if opened:
        run.writer.write(Incident(kind="instant-spike", tier="warn", status="open"), step=9, launch=1, title="spike at 9")
    return run


def test_a_site_has_an_index_and_a_page_for_each_run(tmp_path: Path, chronicle: Cli) -> None:
    make(tmp_path, "quiet run")
    make(tmp_path, "spiky", opened=True)
    toy_run(tmp_path)
    done = chronicle("report", "--public", "site", "--json")
    assert done.code == 0 and done.json["runs"] == ["quiet run", "spiky", "toy"] and done.json["unreadable"] == []
    site = tmp_path / "site"
    index = (site / "index.html").read_text()
    assert re.findall(r'href="(runs/[^"]*)"', index) == ["runs/spiky.html", *_sorted_rest(index)], "what is open comes first"
    for name in done.json["runs"]:
        assert 30_000 < (site / "runs" / f"{name}.html").stat().st_size < 100_000
    # the loss of the lineage: 100 was abandoned
    row = index[index.index("runs/toy.html") :]
    assert "loss from 9.9 to 8.2, 8 points" in row and ">5</td>" in row


def _sorted_rest(index: str) -> list[str]:
    return [found for found in re.findall(r'href="(runs/[^"]*)"', index) if "spiky" not in found]


def test_fifty_runs_are_a_small_page() -> None:
    """Fifty rows with a line each; names of people are text."""
    values = [3 - math.sin(i / 100) for i in range(5_000)]
    names = [f"<b>run {n}</b>" for n in range(50)]
    common = {"status": "running", "step": 10, "loss": 2.0, "lr": 1e-3, "launches": 3, "abandoned": 0, "tags": ["a"]}
    rows = [{"name": name, "started": "2026-11-01T00:00:00+00:00", "ended": None, **common} for name in names]
    page = render_index([(row, _drawn(values)) for row in rows], lambda name: "x", now=1.8e9)
    assert len(page.encode()) < 500_000 and page.count("<svg") == 50 and "<b>run" not in page


def test_attachments_go_with_the_site_and_a_missing_one_is_no_link(tmp_path: Path, chronicle: Cli) -> None:
    make(tmp_path, "one")
    (tmp_path / "plot <b>.txt").write_text("what was seen")
    (tmp_path / "gone.txt").write_text("removed later")
    assert chronicle("note", "look", "--attach", "plot <b>.txt", "--attach", "gone.txt", "--run", "one").code == 0
    lost = hashlib.sha256(b"removed later").hexdigest()
    (tmp_path / "logs" / "one" / "objects" / lost[:2] / lost).unlink()
    assert chronicle("report", "--public", "site").code == 0
    page = (tmp_path / "site" / "runs" / "one.html").read_text()
    (link,) = re.findall(r'download="plot &lt;b&gt;.txt" href="(objects/[^"]*)"', page)
    assert (tmp_path / "site" / "runs" / link).read_text() == "what was seen"
    assert "gone.txt (missing)" in page and lost not in page


def test_a_run_that_cannot_be_read_is_said_and_the_others_are_written(tmp_path: Path, chronicle: Cli) -> None:
    make(tmp_path, "sound")
    make(tmp_path, "broken").paths.metrics_path(1).unlink()
    (tmp_path / "logs" / "broken" / "launches" / "0001" / "metrics.jsonl").mkdir()
    done = chronicle("report", "--public", "site")
    assert done.code == 0 and (tmp_path / "site/runs/sound.html").is_file()
    assert "sound.html" in (tmp_path / "site/index.html").read_text()


@pytest.mark.parametrize("values", [[], [1.0], [math.nan] * 5])
def test_too_few_values_are_no_line(values: list[float]) -> None:
    assert _drawn(values) == ""


def test_values_that_are_not_finite_leave_a_line_of_the_others() -> None:
    assert "M0 " in _drawn([3.0, math.nan, 2.0, math.inf, 1.0])


def test_what_cannot_be_together_is_refused(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    for more in (["--markdown"], ["-o", "x.html"], ["--run", "toy"]):
        assert chronicle("report", "--public", "site", *more).code == 2
    (tmp_path / "file").write_text("")
    assert chronicle("report", "--public", "file").code == 2
    assert chronicle("report", "--public", "site", "--logs", str(tmp_path / "none")).code == 2
    assert not (tmp_path / "site").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.html").write_text("my page")
    assert chronicle("report", "--public", "mine").code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["index.html"]


@pytest.mark.slow
@pytest.mark.sample
@needs_browser
def test_the_index_is_searched_by_the_keyboard(tmp_path: Path, chronicle: Cli) -> None:
    make(tmp_path, "alpha")
    make(tmp_path, "beta")
    assert chronicle("report", "--public", "site").code == 0
    with browser(tmp_path / "profile") as running:
        tab = running.open((tmp_path / "site/index.html").as_uri())
        tab.until("document.readyState === 'complete' && document.getElementById('find') !== null")
        tab.ask("Page.bringToFront")
        tab.key("/")
        tab.until("document.activeElement === document.getElementById('find')")
        tab.ask("Input.insertText", text="bet")
        tab.until("document.getElementById('found').textContent === '1 of 2'")
        shown = "[...document.querySelectorAll('#runs tbody tr:not([hidden])')].map((row) => row.cells[0].textContent)"
        assert tab.value(shown) == ["beta"]
        tab.value("location.href = document.querySelector('#runs a[href*=beta]').href; 1")
        tab.until("document.documentElement.dataset.ready === 'yes'")
        tab.until("document.querySelector('#plot-lineage[data-drawn] svg path') !== null")
        assert tab.console == []


def test_serve_takes_the_index_only_where_no_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHRONICLE_RUN", raising=False)
    make(tmp_path, "alpha")
    assert _many_runs(None, None) is None
    make(tmp_path, "beta")
    found = _many_runs(None, None)
    assert found is not None and [paths.run for paths in found.runs()] == ["alpha", "beta"]
    assert _many_runs("beta", None) is None and _many_runs("nobody", None) is None
    monkeypatch.setenv("CHRONICLE_RUN", "beta")
    assert _many_runs(None, None) is None
