"""The 80B run lived again (seed chronicle, all of it): launches, rollbacks, LR factors, Xids, and the `.orig` accident.

Runs `examples/tr190/replay.py`: 45,000 real steps in 16 launches through the real commands. Minutes; `slow`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.story import Story, read_story

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate")
    directory = tmp_path_factory.mktemp("tr190") / "run"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CHRONICLE_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "tr190" / "replay.py"), str(directory)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return directory


@pytest.fixture
def story(replayed: Path) -> Story:
    return read_story(RunPaths(replayed / "logs" / "tr-190"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_ledger_is_1_075_0375_bug_0375_01875(story: Story) -> None:
    """The authors wrote "50 % from the baseline" for ×0.375 and "25 % from the original" for ×0.1875."""
    kept = {interval.launch for interval in story.lineage.kept}
    factors: list[float | None] = []
    for line in story.ledger.lines:
        if line.launch in kept and (not factors or factors[-1] != line.factor):
            factors.append(line.factor)
    assert factors == [1.0, 0.75, 0.375, None, 0.375, 0.1875]
    assert story.headline.step == 39036


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_rollback_went_where_theirs_went(story: Story) -> None:
    expected = [1496, 15611, 14500, 16250, 16250, 23250, 25000, 29000, 30250, 30500, 34000]
    assert [mark.to_step for mark in story.lineage.rollbacks] == expected


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_restart_was_verified_or_refused_as_it_should_have_been(story: Story) -> None:
    """exp8 and exp9 are refused before their first step; with the guard off the accident takes its course, unverified."""
    resumed = [launch for launch in story.launches if launch.resumed or launch.verdict == "refused"]
    refused = [launch for launch in resumed if launch.verdict == "refused"]
    assert len(refused) == 2 and all(not launch.span.has_steps for launch in refused)
    unguarded = [launch for launch in story.launches if launch.verdict == "off"]
    assert unguarded and all(launch.lr is not None and launch.lr.factor is None for launch in unguarded)
    kept = {interval.launch for interval in story.lineage.kept}
    trained = [launch for launch in resumed if launch.span.has_steps and launch.number in kept and launch not in unguarded]
    # the replay draws new batches at every start, so all but its data is compared
    left = [launch.verdict_entry.data.get("not_compared", ()) for launch in trained if launch.verdict_entry is not None]
    assert trained and all(launch.verdict in ("passed", "unverified") for launch in trained)
    assert {one["name"] for names in left for one in names} <= {"next batch"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_it_ends_with_a_chronicle_a_picture_and_a_sound_journal(replayed: Path) -> None:
    paths = RunPaths(replayed / "logs" / "tr-190")
    assert read_journal(paths).problems == ()
    page = paths.chronicle_md.read_text(encoding="utf-8")
    assert "×1 → ×0.75 → ×0.375" in page and "Xid 64 on ip-26-0-147-135" in page
    assert (paths.run_dir / "plots" / "lineage.png").read_bytes()[:4] == b"\x89PNG"
    listed = json.dumps([e.title for e in read_journal(paths).entries])
    assert "exp10: only now it was noticed" in listed
