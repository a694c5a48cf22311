"""Accounting: what the lineage read, what a restart skipped or read again, and foreign loaders under watch."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from chronicle.cli.main import main as chronicle
from chronicle.data import DataError, DataPlan, RatioAlarm, Segments, SourceSpec, observe
from chronicle.data.observe import SharedAlarm, read_accounts
from chronicle.data.usage import Reading, keep_lineage, read_readings, restart_lines, source_use, write_start
from chronicle.journal import read_journal
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
    account = read_accounts(tmp_path)[-1]
    assert (account.launch, account.repeats) == (2, len(set(first.tolist()) & set(second.tolist())))


def test_ranks_and_epochs_of_a_launch_are_one_account(tmp_path: Path) -> None:
    """Two ranks, one of them with a second epoch: nothing is overwritten, and what came twice is counted."""
    samples = _samples(np.arange(1200), 0.3)
    for rank, part in ((0, samples[:600]), (1, samples[600:]), (0, samples[:600])):
        assert len(list(observe(part, tmp_path, key=lambda s: s["key"], source=lambda s: s["source"], launch=3,
                                rank=rank, environ={}))) == 600
    account, = read_accounts(tmp_path)
    assert (account.samples, account.repeats, account.by_source) == (1800, 600, {"image": 540, "text": 1260})


def test_launch_rank_and_place_are_known_under_chronicle_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No argument beside the two functions: counts in the run, alarm on stderr and in the journal, told by `data usage`."""
    paths = RunPaths(tmp_path / "logs" / "run")
    words = {"key": lambda s: s["key"], "source": lambda s: s["source"]}
    samples = _samples(np.random.default_rng(0).permutation(1000), 0.3)
    for launch, part in ((1, samples), (2, [s for s in samples if s["source"] == "text"])):
        environ = {"CHRONICLE_RUN_DIR": str(paths.run_dir), "CHRONICLE_LAUNCH": str(launch), "RANK": "1"}
        list(observe(part, environ=environ, **words))
    assert capsys.readouterr().err.startswith("chronicle: share of `")
    told = read_journal(paths).entries
    assert [(entry.kind, entry.launch) for entry in told] == [
        ("data.observed", 1), ("data.ratio", 2), ("data.ratio", 2), ("data.observed", 2)]
    assert told[-1].title == "launch 2: 700 samples observed, 700 of them read before (text 100.0%)"
    with pytest.raises(SystemExit, match=r"^0$"):
        chronicle(["data", "usage", "--run", "run", "--logs", str(tmp_path / "logs")])
    assert capsys.readouterr().out.splitlines() == [
        "launch 1: 1,000 samples observed, 0 of them read before (image 30.0%, text 70.0%)", told[-1].title]


def test_without_a_run_the_launch_is_the_next_and_a_place_is_asked_for(tmp_path: Path) -> None:
    """A restart of a script that names only a directory is a new launch; without one it is a sentence, not a guess."""
    for _ in range(2):
        list(observe(_samples(np.arange(10), 0.3), tmp_path, key=lambda s: s["key"], source=lambda s: s["source"], environ={}))
    assert [(one.launch, one.repeats) for one in read_accounts(tmp_path)] == [(1, 0), (2, 10)]
    with pytest.raises(DataError, match="observe has no directory for its counts"):
        observe([], key=str, source=str, environ={})


def test_keys_of_many_launches_stay_small_and_exact(tmp_path: Path) -> None:
    """Written at every seventh sample: no repeat is lost between the sorted arrays, half a key is no key."""
    samples = _samples(np.arange(2000), 0.3)
    assert len(list(observe([*samples, *samples[:700]], tmp_path, key=lambda s: s["key"], source=lambda s: s["source"],
                            launch=1, every=7))) == 2700
    with (tmp_path / "keys-0001-rank-0.bin").open("ab") as stream:
        stream.write(b"abc")
    assert _watch(samples[:50], tmp_path, 2, []) == 50
    assert [account.repeats for account in read_accounts(tmp_path)] == [700, 50]


def test_two_ranks_that_read_the_same_samples_are_seen_at_once_and_counted(tmp_path: Path) -> None:
    """The second to write tells it; the account counts each such sample once."""
    alarms: list[SharedAlarm] = []
    words = {"key": lambda s: s["key"], "source": lambda s: s["source"], "launch": 1, "alarm": alarms.append, "every": 64}
    samples = _samples(np.arange(600), 0.3)
    ranks = [observe(part, tmp_path, rank=rank, **words) for rank, part in enumerate((samples, samples[100:300], samples[:10]))]
    for _ in zip(ranks[0], ranks[1], strict=False):
        pass
    list(ranks[2])
    assert alarms[0].text() == "rank 1 reads what rank 0 reads: 28 of its first 128 samples are the same"
    assert [(alarm.rank, alarm.other) for alarm in alarms] == [(1, 0), (2, 0)]
    account, = read_accounts(tmp_path)
    assert account.shared == 111 and "111 of them by more than one rank" in account.text()
    for rank in (0, 1):  # with a share each nothing is told
        list(observe(_samples(np.arange(rank, 600, 2), 0.3), tmp_path / "apart", rank=rank, **words))
    assert len(alarms) == 2 and read_accounts(tmp_path / "apart")[0].shared == 0


def test_the_keys_of_a_batch_are_the_samples_in_it(tmp_path: Path) -> None:
    """Lists, arrays, tensors: the same keys are the same samples, and a source may be one for all."""
    torch = pytest.importorskip("torch")
    numbers = torch.arange(64)
    batches = [{"id": numbers[:32], "source": ["a"] * 16 + ["b"] * 16},
               {"id": numbers[32:], "source": "b"},
               {"id": numbers[:8].tolist(), "source": ("a",)}, {"id": np.arange(8, 16, dtype=np.int32), "source": "a"}]
    loader = observe(batches, tmp_path, key=lambda b: b["id"], source=lambda b: b["source"], launch=1)
    assert list(loader) == batches and len(loader) == 4
    texts = [["x", "y", "z"], ["x"]]
    list(observe(texts, tmp_path, key=lambda b: b, source=lambda b: "c", launch=1))
    account, = read_accounts(tmp_path)
    assert (account.samples, account.repeats, account.by_source) == (84, 17, {"a": 32, "b": 48, "c": 4})
    for key, source, words in ((1.5, "a", "key of a sample is a float"), ([1, 2, 3], ["a", "b"], "2 sources for 3 keys")):
        with pytest.raises(DataError, match=words):
            list(observe([0], tmp_path, key=lambda _, key=key: key, source=lambda _, source=source: source, launch=2))


def test_a_killed_process_loses_fewer_samples_than_it_writes_at_a_time(tmp_path: Path) -> None:
    code = f"""
import os
from chronicle.data import observe
for number, _ in enumerate(observe(range(2000), {str(tmp_path)!r}, key=lambda n: n, source=lambda n: "a", launch=1, every=50)):
    if number == 519:
        os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    account, = read_accounts(tmp_path)
    assert account.samples == 500 == (tmp_path / "keys-0001-rank-0.bin").stat().st_size // 8


def test_what_only_abandoned_weights_saw_is_read_again_and_does_not_repeat(tmp_path: Path) -> None:
    """Saved at 200 of 400 samples; launch 2 goes on there, is saved at 100 and left; launch 3 descends from both."""
    samples = _samples(np.arange(1000), 0.3)

    def read(launch: int, part: list[dict[str, str]], state: dict[str, object] | None, saved_at: int) -> dict[str, object]:
        loader = observe(part, tmp_path, key=lambda s: s["key"], source=lambda s: s["source"], launch=launch)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for number, _ in enumerate(loader, 1):
            if number == saved_at:
                saved = loader.state_dict()
        return saved

    first = read(1, samples[:400], None, 200)
    second = read(2, samples[200:600], first, 100)
    third = read(3, [*samples[300:700], *samples[:5], *samples[210:215]], second, 1)
    counts = [(account.repeats, account.again, account.placed) for account in read_accounts(tmp_path)]
    assert counts == [(0, 0, False), (0, 200, True), (10, 300, True)]
    assert "0 of them read before, 200 read again that only abandoned weights saw" in read_accounts(tmp_path)[1].text()
    read(4, samples[200:400], first, 1)
    read(5, samples[200:400], None, 1)
    assert [(account.repeats, account.again) for account in read_accounts(tmp_path)][3:] == [(0, 200), (200, 0)]
    assert third["launch"] == 3
    with pytest.raises(DataError, match="has version 7"):
        observe([], tmp_path, key=str, source=str, launch=6).load_state_dict({"v": 7})


def test_an_observed_loader_keeps_its_own_state_length_and_passes(tmp_path: Path) -> None:
    class Loader(list):  # type: ignore[type-arg]
        place = 3

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    loader = observe(Loader("abc"), tmp_path, key=lambda s: s, source=lambda s: "x", launch=2)
    loader.load_state_dict({"v": 1, "launch": 1, "samples": 0, "loader": {"place": 7}})
    assert [*loader, *loader] == list("abcabc") and (len(loader), loader.place) == (3, 7)
    assert loader.state_dict() == {"v": 1, "launch": 2, "samples": 6, "loader": {"place": 7}}
    assert read_accounts(tmp_path)[0].repeats == 3


def test_dip_of_a_sources_share_after_a_restart_raises_one_alarm(tmp_path: Path) -> None:
    """The image-to-text dip of seed 003: images first come too rarely; named with share, band and place."""
    alarms: list[RatioAlarm] = []
    _watch(_samples(np.random.default_rng(0).permutation(4000), 0.3), tmp_path, 1, alarms)
    rare = [s for s in _samples(np.arange(4000, 8000), 0.3) if s["source"] == "text"][:500]
    _watch(rare, tmp_path, 2, alarms)
    assert [alarm.source for alarm in alarms if alarm.source == "image"] == ["image"]
    image = next(alarm for alarm in alarms if alarm.source == "image")
    assert image.text() == ("share of `image` is 0.000 over the first 64 samples of this launch: expected 0.300 ± 0.229")


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
        account = json.loads((tmp_path / f"accounts/observed-{launch:04d}-rank-0.json").read_text())
        assert account == {"samples": 100, "repeats": expected, "again": 0, "by_source": {"text": 70, "image": 30},
                           "after": None}


def _rows(count: int) -> dict[str, list[object]]:
    return {"id": [f"row{number}" for number in range(count)],
            "source": ["text" if number < count * 0.7 else "image" for number in range(count)]}


def _observe_rows(rows: object, directory: Path, launch: int, alarms: list[RatioAlarm]) -> list[str]:
    return [row["id"] for row in observe(rows, directory, key=lambda row: row["id"], source=lambda row: row["source"],  # type: ignore[var-annotated, arg-type]
                                         launch=launch, alarm=alarms.append)]


def test_hugging_face_dataset_with_random_access_is_watched(tmp_path: Path) -> None:
    """Another shuffle seed after a restart, as a script without a saved one has it: repeats are counted exactly, no alarm."""
    datasets = pytest.importorskip("datasets")
    rows, alarms = datasets.Dataset.from_dict(_rows(1000)), list[RatioAlarm]()
    first = _observe_rows(rows.shuffle(seed=1).select(range(600)), tmp_path, 1, alarms)
    second = _observe_rows(rows.shuffle(seed=2).select(range(600)), tmp_path, 2, alarms)
    repeats = len({*first} & {*second})
    assert [account.repeats for account in read_accounts(tmp_path)] == [0, repeats] and 250 < repeats < 450
    assert not alarms


def test_hugging_face_iterable_that_resumes_loses_its_shuffle_buffer_and_that_is_seen(tmp_path: Path) -> None:
    """State saved after 300 rows and loaded in a new dataset: what the buffer held is gone, the accounts show how much."""
    datasets = pytest.importorskip("datasets")
    source, alarms = datasets.Dataset.from_dict(_rows(1000)).shuffle(seed=0), list[RatioAlarm]()

    def stream() -> object:
        return source.to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=100)

    before = stream()
    first = _observe_rows(islice(before, 300), tmp_path, 1, alarms)  # type: ignore[call-overload]
    after = stream()
    after.load_state_dict(before.state_dict())  # type: ignore[attr-defined]
    second = _observe_rows(after, tmp_path, 2, alarms)
    accounts = read_accounts(tmp_path)
    assert [account.samples for account in accounts] == [300, len(second)]
    assert [account.repeats for account in accounts] == [0, len({*first} & {*second})]
    lost = 1000 - len({*first} | {*second})
    assert lost + accounts[1].repeats > 0, "the dataset resumed exactly: nothing to see any more"
    assert not alarms


def test_hugging_face_iterable_that_starts_in_the_order_of_its_files_raises_the_alarm(tmp_path: Path) -> None:
    """A small shuffle buffer over sources that lie one after the other: each start begins with one of them alone."""
    datasets = pytest.importorskip("datasets")
    stream, alarms = datasets.Dataset.from_dict(_rows(1000)).to_iterable_dataset().shuffle(seed=5, buffer_size=50), []
    assert len(_observe_rows(stream, tmp_path, 1, alarms)) == 1000 and not alarms
    _observe_rows(islice(stream, 200), tmp_path, 2, alarms)  # type: ignore[call-overload]
    assert {alarm.source for alarm in alarms} == {"text", "image"}
    image = next(alarm for alarm in alarms if alarm.source == "image")
    assert image.share == 0.0 and image.expected == 0.3
