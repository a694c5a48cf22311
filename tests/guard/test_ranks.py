"""Two to four real gloo ranks: every rank refuses when one is wrong, and a save never waits for the other."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.planted_bugs.__main__ import play_on_ranks
from benchmarks.planted_bugs.catalogue import causes, healthy_causes
from benchmarks.planted_bugs.play import Outcome
from chronicle.cli.main import run
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume import verdict
from chronicle.resume.memory import RankDigest
from chronicle.resume.verdict import MAX_REPORT_BYTES, shorten_report
from rollback.checkpoint.manifest import read_manifest

ROOT = Path(__file__).parents[2]
REFUSED = {"refused": 78}


def play(
    run_dir: Path, checkpoint: Path, *acts: str, num_ranks: int = 2, worker_name: str = "ranks_worker.py"
) -> tuple[dict[str, dict[int, Any]], str]:
    """One torchrun of a worker: what each rank told per act, and stderr."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    worker = [str(Path(__file__).with_name(worker_name)), str(run_dir), str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *worker, *acts], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, dict[int, Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            told.setdefault(record["act"], {})[record["rank"]] = record["told"]
    return told, done.stderr


def count_unverified(run_dir: Path) -> int:
    entries = read_journal(RunPaths(run_dir)).entries
    words = ("passed", "unverified")
    verdicts = [e.data for e in entries if e.kind == "guard.verdict" and e.data["verdict"] in words]
    return sum(1 for verdict in verdicts if verdict.get("verified") is False)


def test_two_ranks_resume_exactly_and_one_wrong_rank_stops_both(run_dir: Path, tmp_path: Path) -> None:
    """The fast sample: save, a healthy resume, then rank 1 alone holds other weights or rank 0's generators."""
    checkpoint = tmp_path / "checkpoints" / "opt_step-6"
    told, stderr = play(
        run_dir,
        checkpoint,
        "save",
        "resume",
        "resume_with_other_weights_on_the_last_rank",
        "resume_with_copied_generators",
    )
    manifest = read_manifest(checkpoint)
    assert manifest is not None and manifest.memory is not None
    memory: Any = manifest.memory
    assert [item["rank"] for item in memory["ranks"]] == [0, 1]
    assert memory["ranks"][0]["rng"]["torch"] != memory["ranks"][1]["rng"]["torch"]
    assert memory["schedulers"][0]["unit"] == 2
    assert told["resume"] == told["save"]
    assert told["resume_with_other_weights_on_the_last_rank"] == {0: REFUSED, 1: REFUSED}
    assert stderr.count("resume refused before the first step") == 2  # one table for each of the two wrong resumes
    assert "rank 1: sample of every tensor" in stderr
    assert "gradients-not-zeroed" not in stderr  # a shard gets its gradient from FSDP, without a beginning that a hook sees
    assert told["resume_with_copied_generators"] == {0: REFUSED, 1: REFUSED}
    assert "this rank holds the generators of rank 0" in stderr


@pytest.mark.slow
@pytest.mark.sample
def test_four_ranks_resume_exactly_and_the_last_one_alone_stops_all(run_dir: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "opt_step-6"
    acts = ("save", "resume", "resume_with_other_weights_on_the_last_rank")
    told, stderr = play(run_dir, checkpoint, *acts, num_ranks=4)
    assert set(told["save"]) == {0, 1, 2, 3} and told["resume"] == told["save"]
    assert told["resume_with_other_weights_on_the_last_rank"] == dict.fromkeys(range(4), REFUSED)
    assert stderr.count("resume refused before the first step") == 1 and "rank 3: sample of every tensor" in stderr
    # half of the ranks: the prepared scheduler would run at half the speed, and two files of generators fall away
    halved, stderr = play(run_dir, checkpoint, "resume", "resume_on_another_number_of_ranks")
    assert halved["resume"] == {0: REFUSED, 1: REFUSED} and "world size" in stderr
    assert all(isinstance(losses, list) for losses in halved["resume_on_another_number_of_ranks"].values())
    assert count_unverified(run_dir) == 1, "the resume on four ranks: its gradient has dropout of all of them"


@pytest.mark.slow
def test_refusal_of_one_of_four_ends_the_launch_with_78_and_leaves_nobody_behind(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people see it: under `chronicle run`, uncaught."""
    checkpoint = tmp_path / "checkpoints" / "opt_step-6"
    play(run_dir, checkpoint, "save", num_ranks=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    worker = [str(Path(__file__).with_name("ranks_worker.py")), str(run_dir), str(checkpoint), "uncaught"]
    words = ["run", "--run", run_dir.name, "--logs", str(run_dir.parent), "--", *launcher, *worker]
    assert run(words) == 78
    end = next(entry for entry in reversed(read_journal(RunPaths(run_dir)).entries) if entry.kind == "launch.end")
    assert end.data["exit_code"] == 78
    alive = [p for p in psutil.process_iter(["cmdline"]) if str(checkpoint) in " ".join(p.info["cmdline"] or ())]
    assert alive == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_zero_on_more_ranks(num_ranks: int) -> None:
    """ZeRO 1 and 2 resume; a shard of another step on the last rank stops all."""
    wanted = [
        (index, cause)
        for index, cause in enumerate((*causes(), *healthy_causes()))
        if cause.rig == "zero" and cause.name in ("ZeRO 1", "ZeRO 2", "shard of one rank is of another step")
    ]
    results = play_on_ranks("zero", wanted, True, num_ranks=num_ranks)
    assert [result.outcome for result in results] == [Outcome.BEFORE, Outcome.HEALTHY, Outcome.HEALTHY]


@pytest.mark.slow
@pytest.mark.sample
def test_fsdp_with_torchs_own_checkpoints_through_attach(run_dir: Path, tmp_path: Path) -> None:
    """fully_shard and distributed checkpoint, no framework: its empty step that makes room for a state is no first step."""
    checkpoint = tmp_path / "checkpoints" / "step-6"
    acts = ("save", "resume", "wrong_weights_on_rank_1", "moments_left_out", "nothing_loaded")
    told, stderr = play(run_dir, checkpoint, *acts, worker_name="fsdp_worker.py")
    assert told["resume"] == told["save"]
    for act in acts[2:]:
        assert told[act] == {0: REFUSED, 1: REFUSED}, act
    assert "rank 1: sample of every tensor" in stderr
    assert "gradients-not-zeroed" not in stderr  # a shard gets its gradient from FSDP, without a beginning that a hook sees
    verdicts = [entry.data for entry in read_journal(RunPaths(run_dir)).entries if entry.kind == "guard.verdict"]
    assert [(v["verdict"], v["basis"]) for v in verdicts][:2] == [("passed", "fresh"), ("passed", "manifest")]


@pytest.mark.slow
def test_what_every_rank_changes_after_a_save_is_known_to_every_rank(run_dir: Path, tmp_path: Path) -> None:
    """The second rank looked for what followed under an id of its own, found nothing, and refused for all."""
    acts = ("save_and_go_on_with_decay", "resume_with_decay", "resume_with_other_decay")
    told, _ = play(run_dir, tmp_path / "checkpoints" / "opt_step-6", *acts)
    assert told["resume_with_decay"] == told["save_and_go_on_with_decay"]
    assert told["resume_with_other_decay"] == {0: REFUSED, 1: REFUSED}


@pytest.mark.slow
def test_save_on_the_main_process_alone_waits_for_nobody(run_dir: Path, tmp_path: Path) -> None:
    """Such scripts are healthy without the guard: no collective may be added to their save."""
    told, _ = play(run_dir, tmp_path / "checkpoints" / "opt_step-6", "save_on_the_main_process")
    assert set(told["save_on_the_main_process"]) == {0, 1}


def test_a_report_between_ranks_stays_within_a_kilobyte() -> None:
    failed = [["name" * 10, "M1", "expected" * 7, "found" * 10, "where" * 8, "cause" * 18] for _ in range(30)]
    report = shorten_report({"rank": 3, "failed": failed})
    assert len(json.dumps(report, separators=(",", ":"))) <= MAX_REPORT_BYTES
    assert len(report["failed"]) + report["more"] == 30


def test_a_digest_of_a_rank_stays_within_a_kilobyte() -> None:
    rng = dict.fromkeys(("python", "numpy", "torch", "cuda:8"), "f" * 16)
    digest = RankDigest(rank=16383, rng=rng, weights="f" * 16, moments="f" * 16, data="f" * 16)
    assert len(json.dumps(digest.to_json(), separators=(",", ":"))) < 300


def test_a_report_is_gathered_only_when_gloo_holds_its_tensors_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread wants the GIL to let go; an interpreter that ends meanwhile aborts (-6) instead of exiting with 78."""
    held: list[Any] = []

    class Gloo:
        def get_backend_config(self) -> str:
            return "cpu:gloo,cuda:nccl"

        def get_world_size(self) -> int:
            return 2

        def all_gather(self, theirs: list[Any], mine: Any) -> None:
            for tensor in theirs:
                tensor.copy_(mine)
            held.extend([mine, *theirs])
            threading.Timer(0.2, held.clear).start()

    monkeypatch.setattr(verdict, "_group", Gloo)
    report = {"rank": 0, "failed": [["weights", "M1", "a", "b", "", ""]]}
    assert verdict.Ranks().gather(report) == [report, report]
    assert held == []


def test_a_rank_leaves_when_no_other_thread_of_it_runs() -> None:
    script = (
        "import threading, time, torch.distributed as dist\n"
        "from chronicle.launch.ranks import leave_group\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "end = time.monotonic() + 0.5\n"
        "def work():\n    while time.monotonic() < end: pass\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start()\n"
        "leave_group()\n"
        "print(thread.is_alive(), dist.is_initialized())\n"
        "leave_group()\n"
    )
    given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", script], check=False, **given)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
