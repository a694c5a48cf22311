"""`chronicle spikes --json` on tables of every dress: the promised fields, their types, and rows counted from 0."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.watch import watch
from chronicle.metrics.readers import UnknownLog, read_log
from rollback.detect import Kind, Status, Tier

LOSSES = [2.0 + 3.0 / (1 + row / 30) + random.Random(row).gauss(0.0, 0.02) + 1.5 * (row == 300) for row in range(600)]
INTEGERS = ("onset_row", "onset_low_row", "alarm_row", "peak_row", "recovered_row", "onset_step", "onset_low_step",
            "alarm_step", "peak_step", "recovered_step", "cluster")  # fmt: skip
NEVER_NULL = ("alarm_row", "alarm_step", "cluster")
LABEL_KINDS = {"instant-spike", "gradual-divergence", "level-shift", "resume-bump", "resume-drop", "restart-rewind", "nan",
               "reinit", "lr-bug", "interleaved-writers", "level-drop"}  # fmt: skip


def table(form: str, head: str = "step,loss\n") -> str:
    return head + "".join(form.format(i=i, x=x) for i, x in enumerate(LOSSES))


DRESSES: dict[str, str | bytes] = {
    "plain": table("{i},{x:.4f}\n"),
    "more columns": table("{i},{x:.4f},abc,1,\n", "step,loss,foo,bar baz,lr\n"),
    "byte order mark": "\ufeff" + table("{i},{x:.4f}\n"),
    "carriage returns": table("{i},{x:.4f}\r\n", "step,loss\r\n"),
    "only carriage returns": table("{i},{x:.4f}\r", "step,loss\r"),
    "quoted": table('"{i}","{x:.4f}"\n', '"step","loss"\n'),
    "tabs": table("{i}\t{x:.4f}\n", "step\tloss\n"),
    "semicolons": table("{i};{x:.4f}\n", "step;loss\n"),
    "decimal commas": table("{i};{x:.4f}\n", "step;loss\n").replace(".", ","),
    "thousands": "step,loss\n" + "".join(f'"{1000 * i:,}",{x:.4f}\n' for i, x in enumerate(LOSSES)),
    "spaces": table("{i}, {x:.4f}, 1e-3\n", "step, loss, lr\n"),
    "capitals": table("{i},{x:.4f},1e-3,1\n", "Step,LOSS,Learning Rate,Grad_Norm\n"),
    "other names": table("{i},{x:.4f}\n", "Iteration,train/loss\n"),
    "comments": "# run 7\n# more, text\n\n" + table("{i},{x:.4f}\n").replace("\n50,", "\n# note\n50,"),
    "blank lines": "\n\n" + table("{i},{x:.4f}\n\n"),
    "same step twice": "step,loss\n" + "".join(f"{i // 2},{x:.4f}\n" for i, x in enumerate(LOSSES)),
    "fractions of steps": "step,loss\n" + "".join(f"{0.24 * i:.2f},{x:.4f}\n" for i, x in enumerate(LOSSES)),
    "huge steps": "step,loss\n" + "".join(f"{10**30 + i},{x:.4f}\n" for i, x in enumerate(LOSSES)),
    "rows without a step": table("{i},{x:.4f}\n").replace("\n100,", "\nx,").replace("\n101,", "\n,").replace("\n7,", "\nnan,"),
    "short rows": table("{i},{x:.4f}\n", "step,loss,lr,grad_norm\n"),
    "no step": table("{x:.4f},1\n", "loss,lr\n"),
    "only a loss": table("{x:.4f}\n", "loss\n"),
    "half a last line": table("{i},{x:.4f}\n") + '600,"2.',
    "zero bytes": table("{i},{x:.4f}\n").replace("\n50,", "\n\0\x0050,"),
    "UTF-16": table("{i},{x:.4f}\n").encode("utf-16"),
    "gzip": gzip.compress(table("{i},{x:.4f}\n").encode()),
    "torn gzip": gzip.compress(table("{i},{x:.4f}\n").encode(), 0)[:-200],
    "recorded every third step": "step,loss\n" + "".join(
        f"{3 * i + k},{'nan' if k else f'{x:.4f}'}\n" for i, x in enumerate(LOSSES) for k in range(3)
    ),
    "not recorded at first": "step,loss\n" + "".join(f"{i},{'nan' if i < 30 else x}\n" for i, x in enumerate(LOSSES)),
    "newest first": "step,loss\n" + "".join(f"{600 - i},{x:.4f}\n" for i, x in enumerate(LOSSES)),
}  # fmt: skip


def scan(path: Path) -> dict[str, Any]:
    data = watch([str(path)], once=True).data
    assert isinstance(data, dict)
    check(data)
    return data


def check(data: dict[str, Any]) -> None:
    """The schema, field by field; the text is strict JSON (no NaN, no Infinity)."""
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert isinstance(data["file"], str) and type(data["rows"]) is int
    kinds = LABEL_KINDS | {"data-order", "mix-shift", "lr-mismatch", "too-good", "plateau", "weights-not-finite",
             "replicas-differ", "stands-still", "loss-missing", "steps-skipped"}
    assert {kind.value for kind in Kind} == kinds
    assert [tier.value for tier in Tier] == ["notice", "warn", "propose"]
    assert {status.value for status in Status} == {"open", "recovered", "partial", "diverging"}
    for event in data["events"]:
        assert event["kind"] in kinds and Tier(event["tier"]) and Status(event["status"])
        assert all(type(event[name]) is int or (event[name] is None and name not in NEVER_NULL) for name in INTEGERS)
        assert all(0 <= event[name] < data["rows"] for name in INTEGERS if name.endswith("_row") and event[name] is not None)
        assert all(isinstance(name, str) for name in event["channels"])
        assert event["onset_low_row"] <= event["onset_row"] <= event["alarm_row"]
    for proposal in data["proposals"]:
        assert type(proposal["onset_step"]) is int and proposal["before_step"] < proposal["onset_step"]


@pytest.mark.parametrize("dress", DRESSES)
def test_the_spike_is_found_in_every_dress(dress: str, tmp_path: Path) -> None:
    path, text = tmp_path / "x.csv", DRESSES[dress]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = [event for event in scan(path)["events"] if event["kind"] == "instant-spike" and event["excess"] > 1.0]
    assert [(event["onset_row"], event["alarm_row"]) for event in found] == [(900, 900) if "third" in dress else (300, 300)]


def test_values_that_are_no_numbers_are_events_and_stay_out_of_the_json(tmp_path: Path) -> None:
    """nan, inf and 1e400 are what a trainer printed; None, NA and an empty cell were not recorded."""
    odd = {400: "nan", 410: "inf", 420: "1e400", 430: "-inf", 440: "None", 450: "NA", 460: ""}
    path = tmp_path / "x.csv"
    path.write_text("step,loss\n" + "".join(f"{i},{odd.get(i, f'{x:.4f}')}\n" for i, x in enumerate(LOSSES)))
    rows = [event["onset_row"] for event in scan(path)["events"] if event["kind"] == "nan"]
    assert rows == [400, 410, 420, 430]


def test_nan_for_good_is_seen_behind_nan_that_meant_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    cells = ["nan" if i % 5 or i > 500 else f"{x:.4f}" for i, x in enumerate(LOSSES)]
    path.write_text("step,loss\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)))
    (event,) = [event for event in scan(path)["events"] if event["kind"] == "nan"]
    assert event["tier"] == "propose" and 500 < event["onset_row"] < 530


@pytest.mark.parametrize(("text", "rows"), [("step,loss\n", 0), ("step,loss\n5,2.5\n", 1), ("step,loss,lr\n1,,\n", 1)])
def test_tables_of_no_row_and_of_one_are_read(text: str, rows: int, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    found = scan(tmp_path / "x.csv")
    assert found.pop("read")["form"] == "table"
    assert found == {"file": str(tmp_path / "x.csv"), "rows": rows, "events": [], "proposals": []}


def test_one_unreadable_log_among_others_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("nothing here")
    (tmp_path / "b.csv").write_text(table("{i},{x:.4f}\n"))
    result = watch([str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], once=True)
    assert isinstance(result.data, list) and result.exit_code == 2
    assert [bool(scan["events"]) for scan in result.data] == [False, True]
    assert "no step with a loss" in result.data[0]["problem"] and result.data[0]["rows"] == 0
    with pytest.raises(UnknownLog):
        watch([str(tmp_path / "a.csv")], once=True)


def test_row_of_a_point_is_its_row_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,loss\n1,2\nx,2\n\n3,2\n")
    assert [(point.row, point.step) for point in read_log(tmp_path / "x.csv")] == [(0, 1), (2, 3)]
