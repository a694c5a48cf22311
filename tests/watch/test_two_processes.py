"""Two halves in two processes say to the last byte what one detector says."""

import json
from pathlib import Path

import pytest

from chronicle.metrics.log import MetricsWriter
from chronicle.metrics.readers import UnknownLog, read_log
from chronicle.watch import two_processes
from chronicle.watch.two_processes import DecisiveDetector, EvidenceDetector
from rollback.detect import Detector
from tests.detect.test_engine import MIXED


def test_halves_folded_apart_equal_the_whole() -> None:
    """The findings cross a process border as JSON values: nothing else may be shared."""
    whole, evidence, decisive = Detector(), EvidenceDetector(), DecisiveDetector()
    for step, values, launch in MIXED:
        whole.feed(step, values, launch=launch)
        evidence.feed(step, values, launch=launch)
    whole.finish()
    evidence.finish()
    found = evidence.take()
    assert {channel for _, channel, _ in found} == {"grad_norm"}
    decisive.expect(json.loads(json.dumps(found)))
    for step, values, launch in MIXED:
        decisive.feed(step, values, launch=launch)
    decisive.finish()
    assert [e.to_json() for e in decisive.events] == [e.to_json() for e in whole.events]
    assert any("grad_norm" in event.channels for event in whole.events)


def test_file_scanned_by_two_real_processes_equals_one(tmp_path: Path) -> None:
    path, whole, seen = tmp_path / "m.jsonl", Detector(), []
    with MetricsWriter(path) as writer:
        for step, values, _ in MIXED:
            writer.write(step, {name: value for name, value in values.items() if value is not None}, time=1.0)
    for point in read_log(path):
        whole.feed(point.step, point.values, launch=point.launch)
    whole.finish()
    detector = two_processes.fold_in_two(path, lambda point: seen.append(point.row), batch_points=400)
    assert [e.to_json() for e in detector.events] == [e.to_json() for e in whole.events]
    assert seen == list(range(len(MIXED)))


def test_unreadable_log_is_the_same_error_from_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("nothing here\n")
    with pytest.raises(UnknownLog):
        two_processes.fold_in_two(path, lambda point: None)
