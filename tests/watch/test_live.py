"""The live watch: what it sees reaches the journal, with a command that names a checkpoint that exists."""

import json
import random
from pathlib import Path

import pytest

from chronicle.cli.options import AtCheckpoints
from chronicle.cli.watch import watch as ask
from chronicle.journal import read_journal
from chronicle.watch import LiveWatch
from chronicle.watch.follow import Tail
from rollback.detect import Tier
from tests.watch.conftest import Stage


def watch(stage: Stage, launch: int = 1) -> LiveWatch:
    return LiveWatch(stage.paths, launch, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append)


def test_divergence_becomes_incident_proposal_and_one_line_to_type(stage: Stage) -> None:
    """The whole point: it diverges at 400, and the line names the newest checkpoint 100 steps before the onset."""
    with stage.start(1, 0) as log:
        live = watch(stage)
        tiers = []
        for first in range(1, 600, 20):
            stage.train(log, first, first + 19, diverges_at=400)
            tiers += [event.tier for event in live.poll()]
    entries = read_journal(stage.paths).entries
    (proposal,) = [entry for entry in entries if entry.kind == "proposal"]
    assert Tier.PROPOSE in tiers
    assert proposal.step in (250, 300)
    assert 340 <= proposal.data["onset_low_step"] <= proposal.data["onset_step"] <= 430
    (line,) = [line for line in stage.said if "type:" in line]
    assert f"chronicle rollback --to {proposal.step} " in line
    incidents = [entry for entry in entries if entry.kind == "incident"]
    assert incidents and all(entry.refs for entry in incidents[1:])


def test_damaged_checkpoint_is_not_proposed(stage: Stage) -> None:
    """The newest one before the onset has lost its optimizer: the next older verified one is named."""
    for step in (300, 350):
        (stage.checkpoints / f"opt_step-{step}" / "accelerator_state" / "optimizer.bin").write_bytes(b"PK\x03\x04torn")
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=450)
    live = watch(stage)
    live.finish()
    (proposal,) = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"]
    assert proposal.step == 250


def test_healthy_launch_writes_nothing(stage: Stage) -> None:
    with stage.start(1, 0) as log:
        stage.train(log, 1, 600)
    assert watch(stage).finish() == []
    assert [entry.kind for entry in read_journal(stage.paths).entries if entry.kind in ("incident", "proposal")] == []


def test_a_spike_of_any_tier_is_one_line(stage: Stage) -> None:
    """It stood in the journal, and whoever looked at the terminal did not hear of it."""
    with stage.start(1, 0) as log:
        live = watch(stage)
        for step in range(1, 401):
            log.write(step, {"loss": 2.0 + random.Random(step).gauss(0.0, 0.02) + 1.5 * (step == 300)})
            if step % 100 == 0:
                live.poll()
    live.finish()
    (line,) = stage.said
    assert line.startswith("chronicle: instant-spike on loss since step 300")


def test_relapse_after_a_rollback_goes_further_back_and_one_rung_up(stage: Stage) -> None:
    """exp1 then exp2: the same region again means an older checkpoint and the next knob."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 520, diverges_at=400)
    watch(stage).finish()
    (first,) = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"]
    stage.writer.append("launch.end", launch=1, data={"last_step": 520})
    stage.writer.append("rollback.receipt", step=first.step, data={})
    assert first.step is not None
    with stage.start(2, first.step) as log:
        stage.train(log, first.step + 1, 520, diverges_at=410)
    watch(stage, 2).finish()
    second = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"][-1]
    assert second.step is not None and second.step < first.step
    assert (first.data["action"], second.data["action"]) == ("skip-data", "lr-x0.75")
    assert "--lr-scale 0.75" in second.data["command"]


def test_new_launch_is_judged_by_the_steps_it_continues(stage: Stage) -> None:
    """Without the past, the first hundred points of every launch would be blind."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 400)
    stage.writer.append("launch.end", launch=1, data={"last_step": 400})
    with stage.start(2, 400) as log:
        stage.train(log, 401, 401)
        live = watch(stage, 2)
        live.poll()
    assert live.detector.row == 401


def test_watch_survives_what_it_reads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the detector is said once and costs the run nothing."""
    live = watch(stage)
    with stage.start(1, 0) as log:
        stage.train(log, 1, 3)
    monkeypatch.setattr(live.detector, "feed", lambda *a, **k: 1 / 0)
    assert live.poll() == [] and live.finish() == []
    assert len([line for line in stage.said if "the live detector failed" in line]) == 1


def test_tail_waits_for_the_other_half_of_a_line(tmp_path: Path) -> None:
    """A reader faster than a writer must not lose the line between two writes."""
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with open(path, "wb", buffering=0) as log:
        log.write(b'{"step":1,"loss":1.5}\n{"step":2,"lo')
        assert [point.step for point in tail.read()] == [1]
        log.write(b'ss":2.5}\n')
        assert [(point.row, point.values["loss"]) for point in tail.read()] == [(1, 2.5)]
    path.write_bytes(b'{"step":9,"loss":1.5}\n')
    assert [point.step for point in tail.read()] == [9]


def test_propose_command_agrees_with_the_live_watch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said live is what a person gets who asks later."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    watch(stage).finish()
    (entry,) = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"]
    at = AtCheckpoints(run="tiny", logs=stage.paths.run_dir.parent, checkpoints=stage.checkpoints)
    result = ask(once=True, at=at)
    assert isinstance(result.data, dict) and result.data["proposals"][0]["target_step"] == entry.step
    assert f"--to {entry.step} " in result.text and f"--checkpoints {stage.checkpoints}" in result.text


def test_hardware_event_before_the_onset_is_named_and_chosen(stage: Stage) -> None:
    """exp3: Xid 64 forty steps before; replay the same data elsewhere before touching the LR."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    stage.writer.append("hardware", step=380, title="Xid 64 on node-7: row remapping failure", data={"serious": True})
    watch(stage).finish()
    (entry,) = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"]
    assert entry.data["action"] == "replace-hardware"
    assert any("Xid 64 on node-7" in reason for reason in entry.data["reasons"])
    assert entry.data["command"] == f"chronicle rollback --to {entry.step} --run tiny"


def test_hooks_of_the_settings_are_called_by_the_live_watch(stage: Stage, tmp_path: Path) -> None:
    """The same hooks as `chronicle watch` has: once for each tier an event reaches."""
    out = tmp_path / "hook.jsonl"
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    live = LiveWatch(
        stage.paths, 1, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append,
        hooks={"on_propose": f"cat >> {out}"}, options=("--logs elsewhere",),
    )  # fmt: skip
    live.finish()
    live._hooks.finish()
    assert any(line.split(" (discards")[0].endswith("--run tiny --logs elsewhere") for line in stage.said)
    assert [json.loads(line)["tier"] for line in out.read_text().splitlines()] == ["propose"]


def test_file_that_took_the_place_of_another_is_read_from_its_start(tmp_path: Path) -> None:
    """Log rotation: a longer file under the same name is no continuation."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"loss":1.5}\n')
    tail = Tail(path)
    assert [point.step for point in tail.read()] == [1]
    (tmp_path / "next").write_bytes(b'{"step":5,"loss":1.5}\n{"step":6,"loss":1.5}\n')
    (tmp_path / "next").rename(path)
    assert [point.step for point in tail.read()] == [5, 6]
