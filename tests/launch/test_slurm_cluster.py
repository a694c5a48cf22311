"""A real SLURM in namespaces: a preemption, interruptions, an excluded node. All ten kinds: `python -m benchmarks.slurm`."""

import subprocess

import pytest

from benchmarks.slurm.__main__ import Job, make_checkpoints, play_all
from benchmarks.slurm.cluster import Cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True, scope="module")
def possible():
    """Asked when a test begins, not when it is collected: it makes a bridge."""
    if reason := why_not():
        pytest.skip(f"no SLURM cluster can be started here: {reason}")


@pytest.mark.sample
def test_a_preempted_job_of_two_nodes_goes_on_by_itself(tmp_path, monkeypatch):
    """Another partition takes both nodes: the save is whole, the job comes back and goes on from it."""
    monkeypatch.setenv("SAVE_SECONDS", "0.5")
    cluster = Cluster(tmp_path / "cluster", number=7, nodes=2, patience=300)
    try:
        cluster.up()
        row = Job("preempted", cluster, tmp_path / "run", make_checkpoints(tmp_path / "made", 600), 1, grace=30).play(1)
    finally:
        cluster.down()
    assert row["completed"], row["why"] or row
    assert (row["went_on"], row["cut_saves"], row["wrong_resumes"], row["causes"][:1]) == (1, 0, [], ["preempted"]), row


def test_a_save_a_supervisor_and_a_node_are_interrupted_and_the_run_goes_on(tmp_path):
    """From the last whole save each time, with the true cause."""
    rows = play_all(("usr1_in_a_save", "supervisor_killed", "node_death"), 1, tmp_path, nodes=2, first=6)
    for row in rows:
        assert (row["went_on"], row["cut_saves"], row["wrong_resumes"], row["false_causes"]) == (1, 0, [], []), row
        assert row["completed"], row


def test_an_excluded_node_is_left_at_the_next_requeue_and_comes_back_by_command(tmp_path):
    cluster = Cluster(tmp_path / "cluster", number=8, nodes=3, patience=300)
    try:
        cluster.up()
        job = Job("usr1", cluster, tmp_path / "run", make_checkpoints(tmp_path / "made"), 1, nodes=2)
        assert job.until(lambda: job.steps_since(0) > 3)
        used = fields(cluster, job)["NodeList"]
        assert "n[1-2]" in used
        bad = f"{cluster.name}n2"
        hardware(job, "--exclude", bad, "--reason", "Xid 64")
        cluster.ask("scancel", "--signal=USR1", job.id)
        assert job.until(lambda: fields(cluster, job).get("Restarts") == "1" and bad in fields(cluster, job)["ExcNodeList"])
        assert job.until(lambda: any(one["launch"] == 2 and one["event"] == "step" for one in job.truth()))
        assert "n[1,3]" in fields(cluster, job)["NodeList"]
        hardware(job, "--readmit", bad)
        cluster.ask("scancel", "--signal=USR1", job.id)
        assert job.until(lambda: any(one["launch"] == 3 and one["event"] == "step" for one in job.truth()))
        assert fields(cluster, job)["ExcNodeList"] == "(null)"
    finally:
        cluster.down()


def test_the_last_task_of_an_array_is_requeued_and_the_others_are_left_alone(tmp_path):
    """Its own number is that of the whole array: `scontrol requeue` with it took the healthy tasks back into the queue too."""
    cluster = Cluster(tmp_path / "cluster", number=8, nodes=2, patience=300)
    try:
        cluster.up()
        made = make_checkpoints(tmp_path / "made", 300)
        job = Job("usr1", cluster, tmp_path / "run", made, 1, nodes=1, tasks=3)

        def steps(task, launch):
            notes = job.truth(f"truth-{task}.jsonl")
            return [one["step"] for one in notes if one["event"] == "step" and one["launch"] == launch]

        assert job.until(lambda: all(len(steps(task, 1)) > 3 for task in range(3)))
        whole = cluster.ask("squeue", "-h", "-j", f"{job.id}_2", "-o", "%A").strip()
        assert whole == job.id  # the last one has the array's number
        cluster.ask("scancel", "--signal=USR1", f"{job.id}_2")
        assert job.until(lambda: len(steps(2, 2)) > 2)
        stopped = [one["step"] for one in job.truth("truth-2.jsonl") if one["event"] == "saved" and one["launch"] == 1][-1]
        assert steps(2, 2)[0] == stopped + 1
        (job.directory / "finish").touch()
        assert job.until(lambda: job.state() == "", 120), cluster.ask("squeue")
        assert not steps(0, 2) and not steps(1, 2)
        said = cluster.ask("scontrol", "show", "job", "--oneliner", job.id)
        assert said.count("JobState=COMPLETED") == 3, said
        assert all((job.directory / f"logs/demo-{task}/run.json").exists() for task in range(3))
    finally:
        cluster.down()


def fields(cluster, job):
    words = cluster.ask("scontrol", "show", "job", "--oneliner", job.id).split()
    return dict(word.partition("=")[::2] for word in words)


def hardware(job, *words):
    command = ["chronicle", "hardware", *words, "--run", "demo"]
    subprocess.run(command, cwd=job.directory, env=job.environ, check=True, capture_output=True)
