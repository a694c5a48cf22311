"""Entries, curves and checkpoints of others, where the shared data lie beside the checkout: nothing lost, nothing invented."""

import json
from pathlib import Path

import pytest

from chronicle.journal import Entry, read_journal
from chronicle.metrics.readers import read_log
from chronicle.paths import RunPaths
from chronicle.story import read_story
from tests.commands.cli import Cli
from tests.conftest import DATA

ENTRIES = DATA / "tr190_entries.jsonl"


def to_record(entry: Entry) -> dict[str, object]:
    """The line of the source that an imported entry was made from: shows that nothing of it was lost."""
    data = dict(entry.data)
    record: dict[str, object] = {**data.pop("import"), **data}
    record["kind"] = record.pop("kind_there", entry.kind)
    if entry.title:
        record["title"] = entry.title
    if entry.step is not None:
        record["step"] = entry.step
    return record


def test_the_seeds_nineteen_entries_come_back_field_for_field(tmp_path: Path, chronicle: Cli) -> None:
    assert chronicle("import", str(ENTRIES), "--run", "tr-190").code == 0
    entries = read_journal(RunPaths(tmp_path / "logs" / "tr-190")).entries
    originals = [json.loads(line) for line in ENTRIES.read_text().splitlines()]
    returned = [to_record(e) for e in entries if "import" in e.data]
    assert len(originals) == 19
    assert returned == originals


def test_importing_twice_changes_nothing(tmp_path: Path, chronicle: Cli) -> None:
    chronicle("import", str(ENTRIES), "--run", "tr-190")
    before = len(read_journal(RunPaths(tmp_path / "logs" / "tr-190")).entries)
    again = chronicle("import", str(ENTRIES), "--run", "tr-190")
    assert "imported before" in again.out
    assert len(read_journal(RunPaths(tmp_path / "logs" / "tr-190")).entries) == before


def test_every_entry_of_the_seed_is_on_the_rendered_page(tmp_path: Path, chronicle: Cli) -> None:
    chronicle("import", str(ENTRIES), "--run", "tr-190")
    chronicle("render", "--no-plots", "--run", "tr-190")
    page = (tmp_path / "logs" / "tr-190" / "CHRONICLE.md").read_text()
    for line in ENTRIES.read_text().splitlines():
        assert json.loads(line)["title"] in page
    assert "☑ infra" in page and "☒ hardware" in page and "Rule learnt" in page
    assert "**Expected.** if it was hardware" in page and "images/tr-190-01-image2text.png" in page


def test_a_table_of_incidents_gives_one_entry_a_row(tmp_path: Path, chronicle: Cli) -> None:
    source = DATA / "chronicle_events.csv"
    assert chronicle("import", str(source), "--run", "events").code == 0
    incidents = list(read_journal(RunPaths(tmp_path / "logs" / "events")).of_kind("incident"))
    assert len(incidents) == len(source.read_text().strip().splitlines()) - 1


@pytest.mark.parametrize("source", sorted(p.relative_to(DATA) for p in DATA.glob("curves/*/*.csv"))[::9], ids=str)
def test_curves_of_others_become_launches(source: Path, tmp_path: Path, chronicle: Cli) -> None:
    done = chronicle("import", str(DATA / source), "--run", "curve", "--json")
    assert done.code == 0
    (told,) = done.json["imports"]
    assert told["points"] > 0 and told["launches"] >= 1
    story = read_story(RunPaths(tmp_path / "logs" / "curve"))
    assert story.headline.step > 0 and story.headline.loss is not None


def test_a_trainer_state_keeps_every_logged_step(tmp_path: Path, chronicle: Cli) -> None:
    source = next(DATA.glob("checkpoints/*/trainer_state.json"))
    history = json.loads(source.read_text())["log_history"]
    chronicle("import", str(source), "--run", "hf")
    story = read_story(RunPaths(tmp_path / "logs" / "hf"))
    assert story.headline.step == history[-1]["step"]
    assert "learning_rate" in story.headline.values


def test_trainer_state_in_the_shared_data() -> None:
    (path,) = (DATA / "checkpoints").rglob("trainer_state.json")
    points = list(read_log(path))
    assert points[-1].step == 7000 and len([p for p in points if "loss" in p.values]) >= 10
