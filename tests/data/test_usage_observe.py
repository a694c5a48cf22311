"""Accounting: what the lineage read, what a restart skipped or read again, and foreign loaders under watch."""

import json
from pathlib import Path

import numpy as np
import pytest

from chronicle.data import DataError, DataPlan, RatioAlarm, Segments, SourceSpec, observe
from chronicle.data.story import read_readings, write_start
from chronicle.data.usage import Reading, keep_lineage, restart_lines, source_use
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

PLAN = DataPlan(seed=1, batch_size=10, sources=(
    SourceSpec(name="code", num_samples=700, digest="a", weight=7),
    SourceSpec(name="prose", num_samples=300, digest="b", weight=3)))


def _reading(launch: int, first: int, end: int, segments: Segments | None = None) -> Reading:
    return Reading(launch=launch, first_step=first, end_step=end, segments=segments or Segments())


def test_rollback_re_reads_but_repeats_nothing() -> None:
    """60 steps, back to 40, on to 80: 200 samples are read again that only abandoned weights saw; no repeat."""
    readings = [_reading(1, 0, 60), _reading(2, 40, 80)]
    line = restart_lines(PLAN, readings)[0]
    assert (line.from_step, line.to_step, line.reread, line.skipped) == (60, 40, 200, 0)
    assert [(r.launch, r.first_step, r.end_step) for r in keep_lineage(readings)] == [(1, 0, 40), (2, 40, 80)]
    assert [(use.drawn, use.repeats) for use in source_use(PLAN, readings)] == [(560, 0), (240, 0)]


def test_skipped_samples_are_counted_by_source() -> None:
    """Forty batches skipped are 400 samples, 280 of code and 120 of prose, and they stay unseen."""
    readings = [_reading(1, 0, 60), _reading(2, 40, 50, Segments().resumed(40, skip_batches=40))]
    line = restart_lines(PLAN, readings)[0]
    assert line.skipped == 400 and line.skipped_by_source == {"code": 280, "prose": 120}
    assert "skips 400 samples (code 280, prose 120)" in line.text() and "data_pos 60→80" in line.text()
    assert source_use(PLAN, readings)[0].unseen_fraction == pytest.approx(0.5)


def test_reshuffle_of_the_rest_repeats_nothing() -> None:
    """A whole epoch with a reshuffle in its middle: every sample once."""
    readings = [_reading(1, 0, 50), _reading(2, 50, 100, Segments().resumed(50, reshuffle=True))]
    assert [(use.distinct, use.repeats, use.unseen_fraction) for use in source_use(PLAN, readings)] == [
        (700, 0, 0.0), (300, 0, 0.0)]
    assert "reshuffled" in restart_lines(PLAN, readings)[0].text()


def test_second_epoch_is_counted_as_repeats() -> None:
    """150 steps of a 100-step epoch: half of the samples came twice."""
    assert [use.repeats for use in source_use(PLAN, [_reading(1, 0, 150)])] == [350, 150]


def test_journal_tells_the_story_of_the_restart(tmp_path: Path) -> None:
    """Two launches write their entries; usage rebuilds from journal and metrics what each of them read."""
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(DataError, match="no data plan in its journal"):
        read_readings(paths)
    write_start(paths, PLAN, Segments(), first_step=0, launch=1)
    with MetricsWriter(paths.metrics_path(1)) as metrics:
        for step in range(1, 61):
            metrics.write(step, {"loss": 1.0})
    title = write_start(paths, PLAN, Segments().resumed(40, skip_batches=5), first_step=40, launch=2)
    assert title.startswith("launch 2: opt_step 60→40, data_pos 60→45: re-reads 150, skips 50 samples")
    plan, readings = read_readings(paths)
    assert plan == PLAN and [(r.launch, r.first_step, r.end_step) for r in readings] == [(1, 0, 60), (2, 40, 40)]


def _samples(order: np.ndarray, image_share: float) -> list[dict[str, str]]:
    return [{"key": f"k{i}", "source": "image" if i % 100 < image_share * 100 else "text"} for i in order]


def _watch(samples: list[dict[str, str]], directory: Path, launch: int, alarms: list[RatioAlarm]) -> int:
    return len(list(observe(samples, directory, key=lambda s: s["key"], source=lambda s: s["source"], launch=launch,
                            alarm=alarms.append)))


def test_foreign_loader_is_counted_and_passed_through(tmp_path: Path) -> None:
    """A loader that reshuffles everything after a restart repeats: the number is exact, the samples are untouched."""
    rng = np.random.default_rng(0)
    first, second = rng.permutation(4000)[:2000], rng.permutation(4000)[:2000]
    alarms: list[RatioAlarm] = []
    assert _watch(_samples(first, 0.3), tmp_path, 1, alarms) == 2000
    assert _watch(_samples(second, 0.3), tmp_path, 2, alarms) == 2000
    assert not alarms
    summary = (tmp_path / "observed-0002.json").read_text()
    assert f'"repeats": {len(set(first.tolist()) & set(second.tolist()))}' in summary


def test_dip_of_a_sources_share_after_a_restart_raises_one_alarm(tmp_path: Path) -> None:
    """The image-to-text dip of seed 003: images first come too rarely; named with share, band and place."""
    alarms: list[RatioAlarm] = []
    _watch(_samples(np.random.default_rng(0).permutation(4000), 0.3), tmp_path, 1, alarms)
    rare = [s for s in _samples(np.arange(4000, 8000), 0.3) if s["source"] == "text"][:500]
    _watch(rare, tmp_path, 2, alarms)
    assert [alarm.source for alarm in alarms if alarm.source == "image"] == ["image"]
    image = next(alarm for alarm in alarms if alarm.source == "image")
    assert image.text() == ("share of `image` is 0.000 over the first 64 samples of this launch, 0.300 ± 0.229 before")


def test_stock_webdataset_is_watched(tmp_path: Path) -> None:
    """Shards read by WebDataset itself, twice: the second launch's repeats are counted exactly."""
    webdataset = pytest.importorskip("webdataset")
    for source, count in (("text", 70), ("image", 30)):
        (tmp_path / source).mkdir()
        with webdataset.TarWriter(str(tmp_path / source / "0.tar")) as writer:
            for number in range(count):
                writer.write({"__key__": f"{source}{number}", "txt": "x"})
    shards = [str(tmp_path / source / "0.tar") for source in ("text", "image")]
    for launch, expected in ((1, 0), (2, 100)):
        loader = webdataset.WebDataset(shards, shardshuffle=False)
        seen = list(observe(loader, tmp_path / "accounts", key=lambda s: s["__key__"],
                            source=lambda s: Path(s["__url__"]).parent.name, launch=launch))
        assert len(seen) == 100
        account = json.loads((tmp_path / f"accounts/observed-{launch:04d}.json").read_text())
        assert account == {"samples": 100, "repeats": expected, "by_source": {"text": 70, "image": 30}}
