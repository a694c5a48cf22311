"""The per-step log: what a trainer writes is what everybody reads, whatever happens to the file in between."""

import json
import math
import os
from pathlib import Path

import pytest

from chronicle.metrics.log import MetricsWriter, parse_line, read_metrics


def test_values_read_back_bit_for_bit(tmp_path: Path) -> None:
    """A float goes through its shortest repr, so the reader sees the very same number."""
    values = {"loss": 2.1000000000000001, "lr": 1e-300, "grad_norm": 0.1 + 0.2, "tokens": 2**60}
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(7, values, time=1700000000.125)
    (point,) = read_metrics(tmp_path / "m.jsonl")
    assert (point.row, point.step, point.time, point.values) == (0, 7, 1700000000.125, values)


def test_one_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers may append to one file: a line that needs two calls could be torn by the other."""
    calls: list[bytes] = []
    real = os.write
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        monkeypatch.setattr(os, "write", lambda fd, data: calls.append(data) or real(fd, data))
        writer.write(1, {"loss": 1.0, "lr": 2.0})
    assert len(calls) == 1 and calls[0].endswith(b"\n")


def test_non_finite_values_stay_legal_json(tmp_path: Path) -> None:
    """`jq` and every other strict parser must be able to read the line with the NaN, the one that matters."""
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "z": -math.inf})
    text = (tmp_path / "m.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (point,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(point.values["loss"])
    assert (point.values["grad_norm"], point.values["z"]) == (math.inf, -math.inf)


def test_none_is_not_recorded_and_not_nan(tmp_path: Path) -> None:
    """A missing value must not look like a divergence."""
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"loss": 1.0, "grad_norm": None})  # type: ignore[dict-item]
    (point,) = read_metrics(tmp_path / "m.jsonl")
    assert dict(point.values) == {"loss": 1.0}


def test_half_line_of_a_crash_costs_only_itself(tmp_path: Path) -> None:
    """A torn tail is closed with a newline by the next writer, never glued to the next point."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1,"t":1.0,"loss":1.5}\n{"step":2,"t":2.0,"lo')
    with MetricsWriter(path) as writer:
        writer.write(3, {"loss": 1.25})
    assert [(point.row, point.step) for point in read_metrics(path)] == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    "line",
    [b"", b"\xff\xfe\x00", b"null", b"[1,2]", b'{"loss":1}', b'{"step":true}', b'{"step":1.5}', b'{"step":"1"}', b"[" * 9999],
)
def test_garbage_is_no_point(line: bytes) -> None:
    """Garbage never stops the reader and never becomes a step."""
    assert parse_line(line) is None


def test_reserved_channel_names_are_refused(tmp_path: Path) -> None:
    """A channel named `step` would silently overwrite the step of its own line."""
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(ValueError, match="reserved"):
        writer.write(1, {"step": 2.0})
