"""What a scan says it has read: one series per tag, the total first, and never "0 events" of a log without a loss."""

import json
import random
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chronicle.cli.watch import LogWords, watch
from chronicle.errors import UsageProblem
from chronicle.metrics.readers import NothingToWatch, UnknownLog, read_log
from rollback.channels import LossKind
from rollback.detect import Detector
from tests.metrics.printed import read_lines

STEPS = range(10, 4010, 10)


def press_ctrl_c(_: float) -> None:
    raise KeyboardInterrupt


def losses(seed: int, *, spike: int | None = 3000) -> list[float]:
    dice = random.Random(seed)
    return [2.0 + 3.0 / (1 + step / 300) + dice.gauss(0.0, 0.02) + 2.0 * (step == spike) for step in STEPS]


def record(seed: int = 1) -> list[tuple[int, dict[str, float]]]:
    """A run that logs its loss every ten steps and the mean over its training set, another series, every 250."""
    rows: list[tuple[int, dict[str, float]]] = []
    for step, loss in zip(STEPS, losses(seed), strict=True):
        values = {"train/loss": 1.5 + 1.0 / step} if step % 250 == 0 else {}
        rows.append((step, {**values, "loss": loss, "train/learning_rate": 1e-3}))
    return rows


def write_forms(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> dict[str, Path]:
    """The same run as CSV, as JSONL with one record a series, in MLflow's two stores and as TensorBoard writes it."""
    names = ["train/loss", "loss", "train/learning_rate"]
    table, lines = folder / "run.csv", folder / "run.jsonl"
    table.write_text("step," + ",".join(names) + "\n" + "".join(
        f"{step}," + ",".join(str(values.get(name, "")) for name in names) + "\n" for step, values in rows))  # fmt: skip
    lines.write_text("".join(json.dumps({"_step": step, name: value}) + "\n" for step, v in rows for name, value in v.items()))
    store = folder / "mlflow.db"
    with sqlite3.connect(store) as database:
        columns = "key TEXT, value REAL, timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN"
        database.execute(f"CREATE TABLE metrics ({columns})")
        database.executemany("INSERT INTO metrics VALUES (?,?,?,'a',?,0)", [
            (name, value, 1000 * step, step) for step, values in rows for name, value in values.items()])  # fmt: skip
    database.close()
    run = folder / "mlruns" / "a"
    for name in names:
        file = run / "metrics" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{1000 * step} {values[name]!r} {step}\n" for step, values in rows if name in values))
    (run / "meta.yaml").write_text("run_id: a\n")
    forms = {"csv": table, "jsonl": lines, "mlflow": store, "mlflow files": run}
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return forms
    writer = SummaryWriter(str(folder / "tb"))
    for step, values in rows:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()
    return {**forms, "tensorboard": folder / "tb"}


def verdicts(path: Path) -> list[tuple[str, str, str, int | None, tuple[str, ...]]]:
    detector = Detector()
    for point in read_log(path):
        detector.feed(point.step, point.values, time=point.time)
    detector.finish()
    return [(e.kind.value, e.tier.value, e.status.value, e.onset_step, e.channels) for e in detector.events]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forms_of_one_run_give_the_same_verdicts(seed: int, tmp_path: Path) -> None:
    """`train/loss` was merged into `loss`: raw TensorBoard saw 43 of 74 spikes, the same runs as clean tables 59."""
    forms = {name: verdicts(path) for name, path in write_forms(tmp_path, record(seed)).items()}
    assert [(kind, step, channels) for kind, _, _, step, channels in forms["csv"]] == [("instant-spike", 3000, ("loss",))]
    assert all(found == forms["csv"] for found in forms.values()), forms


def test_two_columns_never_overwrite_each_other(tmp_path: Path) -> None:
    for name, path in write_forms(tmp_path, record()).items():
        points = [dict(point.values) for point in read_log(path)]
        both = [values for values in points if {"loss", "train/loss"} <= values.keys()]
        assert len(points) == len(STEPS) and len(both) == 16 and both[0]["train/loss"] == pytest.approx(1.504), name
    twice = tmp_path / "twice.csv"
    twice.write_text("step,loss,loss\n1,2.0,3.0\n2,2.5,3.5\n\n")
    assert [sorted(point.values.values()) for point in read_log(twice)] == [[2.0, 3.0], [2.5, 3.5]]


def test_a_scan_begins_with_what_was_read(tmp_path: Path) -> None:
    path = write_forms(tmp_path, record())["csv"]
    result = watch([str(path)], once=True)
    read = result.text.splitlines()[1]
    assert read == "  read: table, 400 points, steps 10–4000; loss ← loss, train/loss; lr ← train/learning_rate"
    assert isinstance(result.data, dict) and result.data["read"]["loss"] == ["loss", "train/loss"]
    assert "read: table, 400 points" in watch([str(path)], once=True).text




@pytest.mark.parametrize("fail", [False, True])
def test_a_log_without_a_loss_ends_with_2_and_the_way_out(fail: bool, tmp_path: Path) -> None:
    """It said "N points, 0 events" and ended with 0."""
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"step": step, "energy": 2.0}) + "\n" for step in STEPS))
    with pytest.raises(NothingToWatch, match=r"400 points.*energy") as problem:
        watch([str(path)], once=True, fail=fail)
    assert problem.value.exit_code == 2 and "--loss" in (problem.value.remedy or "")
    with pytest.raises(NothingToWatch):
        watch([str(path)], once=True)
    good = write_forms(tmp_path, record())["csv"]
    assert watch([str(path), str(good)], once=True, fail=fail).exit_code == 2


def test_a_person_names_loss_step_and_lr(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    records = ({"tick": step, "energy": x, "loss/of/no/use": 1.0} for step, x in zip(STEPS, losses(1), strict=True))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = watch([str(path)], once=True, words=LogWords(loss="energy", step="tick", ignore=["loss/*"]))
    assert isinstance(result.data, dict)
    assert [event["onset_step"] for event in result.data["events"]] == [3000] and result.data["read"]["loss"] == ["energy"]
    assert result.data["read"]["channels"]["loss/of/no/use"]["role"] == "ignored"
    assert result.data["events"][0]["excess"] > 1.0 and result.data["events"][0]["sigmas"] > 20


def test_the_kind_of_a_loss_decides_how_it_is_judged(tmp_path: Path) -> None:
    """A loss that climbs is a divergence; a reward or one side of a GAN that climbs is not."""
    path = tmp_path / "up.csv"
    dice = random.Random(2)
    rows = (f"{i},{1 + max(0, i - 300) / 40 + dice.gauss(0, 0.02)}\n" for i in range(800))
    path.write_text("step,loss\n" + "".join(rows))
    tiers: dict[Any, set[str]] = {}
    for kind in (None, LossKind.REWARD, LossKind.ADVERSARIAL):
        data = watch([str(path)], once=True, words=LogWords(kind=kind)).data
        assert isinstance(data, dict)
        tiers[kind] = {event["tier"] for event in data["events"]}
        assert bool(data["proposals"]) == (kind is None)
    assert "propose" in tiers[None]


def test_a_line_format_is_taught_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.log"
    path.write_text("".join(f"<<{step}>> L~{x:.4f} @ 0.001\n" for step, x in zip(STEPS, losses(5), strict=True)))
    (tmp_path / "chronicle.toml").write_text("[formats]\nmine = '<<(?P<step>\\d+)>> L~(?P<loss>\\S+) @ (?P<lr>\\S+)'\n")
    monkeypatch.chdir(tmp_path)
    for form in ("mine", r"<<(?P<step>\d+)>> L~(?P<loss>\S+)"):
        data = watch([str(path)], once=True, words=LogWords(form=form)).data
        assert isinstance(data, dict) and [event["onset_step"] for event in data["events"]] == [3000]
    with pytest.raises(UsageProblem, match="no step and value"):
        watch([str(path)], once=True, words=LogWords(form="loss (.*)"))
    with pytest.raises(UsageProblem, match="no regular expression"):
        watch([str(path)], once=True, words=LogWords(form="("))


FOREIGN = {  # file: (its text, what the message must name)
    "keys.jsonl": ('{"tick": 1, "energy": 2.5}\n' * 20, ["JSONL", "tick", "energy"]),
    "document.json": ('[\n{"tick": 1,\n "energy": 2.5}\n]\n', ["JSON", "tick", "energy"]),
    "cells.csv": ("tick,energy\n" + "1,2.5\n" * 20, ["tick", "energy"]),
    "header.csv": ("tick,energy\n", ["tick", "energy"]),
    "decimal.csv": ("Schritt;Verlust\n" + "1;2,5\n" * 20, ["Schritt", "Verlust"]),
    "spaces.txt": ("tick energy\n" + "1 2.5\n" * 20, ["tick", "energy"]),
    "pairs.log": ("tick=1 energy=2.5\n" * 20, ["tick", "energy"]),
    "words.log": ("Schritt 1: Verlust 2.5\n" * 20, ["Schritt", "Verlust"]),
    "validation.log": ("step 1 val_loss 2.5\n" * 20, ["step", "val_loss"]),
    "numbers.txt": ("1 2.5 0.001\n" * 20, ["first line", "1 2.5 0.001"]),
    "prose.txt": ("hello\n" * 20, ["first line", "hello"]),
    "text_numbers.jsonl": ('{"step": 1, "loss": "2.5 nats"}\n' * 20, ["JSONL"]),
    "bytes.bin": ("\0\1\2" * 200, ["no text"]),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_unreadable_log_ends_with_2_and_says_what_was_read(name: str, tmp_path: Path) -> None:
    """It ended with 1, `watch --once` with 0 and "no points yet", and most named no column."""
    text, named = FOREIGN[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageProblem) as problem:
        watch([str(path)], once=True)
    assert problem.value.exit_code == 2 and problem.value.remedy
    if name != "text_numbers.jsonl" or isinstance(problem.value, UnknownLog):
        assert all(word in problem.value.message for word in named), problem.value.message
    if "columns seen" in problem.value.message:
        assert "--loss" in problem.value.remedy and "--format" in problem.value.remedy
    good = write_forms(tmp_path, record())["csv"]
    assert watch([str(path), str(good)], once=True).exit_code == 2


@pytest.mark.parametrize("name", ["keys.jsonl", "document.json", "cells.csv", "decimal.csv", "pairs.log", "words.log"])
def test_the_way_out_of_an_unreadable_log_is_one(name: str, tmp_path: Path) -> None:
    """`--loss` and `--step` with the columns that the message named: afterwards, and while the log grows."""
    tick, energy = [word for word in FOREIGN[name][1] if word not in ("JSON", "JSONL")]
    rows = list(zip(STEPS, losses(1), strict=True))
    form = {
        "keys.jsonl": '{{"tick": {}, "energy": {:.4f}}}\n', "document.json": '{{"tick": {}, "energy": {:.4f}}},\n',
        "cells.csv": "{},{:.4f}\n", "decimal.csv": "{};{:.4f}\n", "pairs.log": "tick={} energy={:.4f}\n",
        "words.log": "Schritt {}: Verlust {:.4f}\n",
    }[name]  # fmt: skip
    text = "".join(form.format(*row) for row in rows)
    path = tmp_path / name
    head = FOREIGN[name][0].split("\n")[0] + "\n" if name.endswith(".csv") else ""
    path.write_text(f"[{text[:-2]}]" if name == "document.json" else head + text)
    data = watch([str(path)], once=True, words=LogWords(loss=energy, step=tick)).data
    assert isinstance(data, dict) and [event["onset_step"] for event in data["events"]] == [3000]
    watched = watch([str(path)], once=True, words=LogWords(loss=energy, step=tick))
    assert isinstance(watched.data, dict) and [event["onset_step"] for event in watched.data["events"]] == [3000]
    assert f"{energy} " in watched.text.splitlines()[0]


def test_records_without_a_step_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once they were refused, and followed all of them were at step 0."""
    monkeypatch.setattr("chronicle.cli.watch.time", SimpleNamespace(sleep=press_ctrl_c))  # no other module's sleep
    path = tmp_path / "bare.jsonl"
    path.write_text('{"config": 1}\n' + "".join(json.dumps({"loss": x, "accuracy": 0.5}) + "\n" for x in losses(1)))
    data, watched = watch([str(path)], once=True).data, watch([str(path)]).data
    assert isinstance(data, dict) and isinstance(watched, dict)
    assert data["read"]["last_step"] == watched["read"]["last_step"] == len(STEPS) - 1
    assert [e["onset_step"] for e in data["events"]] == [e["onset_step"] for e in watched["events"]] == [299]


def test_an_empty_log_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.cli.watch.time", SimpleNamespace(sleep=press_ctrl_c))  # no other module's sleep
    path = tmp_path / "train.log"
    path.write_text("")
    assert ": 0 points, 0 events, no points yet\n" in watch([str(path)]).text
    with pytest.raises(UnknownLog, match="empty"):
        watch([str(path)], once=True)


def test_a_line_about_another_epoch_begins_none() -> None:
    """`best epoch: 12` and a config behind it were a point of step 12 in front of the run."""
    head = "Resuming from epoch 12\nlr: 0.001\nloss: 0.5\nbest epoch: 12\nloss: 0.4\n"
    lines = [f"step {step} loss {2.0 - step / 1000:.3f}\n" for step in range(10, 110, 10)]
    points = list(read_lines([*head.splitlines(keepends=True), *lines]))
    assert [point.step for point in points] == list(range(10, 110, 10))


def test_the_epoch_of_a_line_places_the_steps_below_it_where_they_begin_again() -> None:
    batches = "".join(f"batch {at}/50 loss 1.5\n" for at in range(10, 60, 10))
    text = "".join(f"--- epoch {epoch} ---\n{batches}" for epoch in (1, 2, 3))
    assert [point.step for point in read_lines(text.splitlines(keepends=True))] == list(range(10, 160, 10))
    again = text + text  # another run, or a launch that begins anew
    assert [point.step for point in read_lines(again.splitlines(keepends=True))] == [*range(10, 160, 10)] * 2
