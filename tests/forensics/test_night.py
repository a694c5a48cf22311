"""The night of seed 001 from its own lines: what the log says, what it forbids, and what stays unknown.

Two post-mortems were written about it and both were wrong; the draft must repeat neither mistake.
"""

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from chronicle.audit.postmortem import find_contradictions, infer_launches, list_unknowns, write_draft
from chronicle.audit.traces import LineKind, observe_line, parse_time, scan_directory
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths

# quoted in FORENSIC_REVISION.md
LOG = """\
2025-08-24 07:14:00,709 [INFO] Target: 1,208,606,722 parameters
2025-08-24 07:14:00,710 [INFO] Hardware: 4x NVIDIA L4 GPUs
2025-08-24 07:14:00,710 [INFO] Configuration: {'d_model': 2048, 'nhead': 32, 'num_layers': 24, 'dim_feedforward': 8192}
2025-08-24 07:15:48,804 [INFO] Target: 679,962,626 parameters
2025-08-24 07:15:48,804 [INFO] Hardware: 4x NVIDIA L4 GPUs
2025-08-24 07:15:57,037 [INFO] ✅ Model created with 169,990,657 parameters (0.17B)
2025-08-24 07:15:57,042 [INFO] 🎯 Starting training loop...
2025-08-24 07:16:02,502 [WARNING] Too many dataloader workers: 4 (max is dataset.num_shards=2). Stopping 2 dataloader workers.
"""
PROCESSES = """\
13803 Sun Aug 24 07:14:02 /home/user/miniconda/bin/python -c from multiprocessing.spawn import spawn_main
13935 Sun Aug 24 07:14:03 /home/user/miniconda/bin/python -c from multiprocessing.spawn import spawn_main
20966 Sun Aug 24 07:15:50 /home/user/miniconda/bin/python -c from multiprocessing.spawn import spawn_main
"""


@pytest.fixture
def night(tmp_path):
    """The directory as it lay there in the morning."""
    (tmp_path / "massive_scale_training.log").write_text(LOG)
    (tmp_path / "ps.txt").write_text(PROCESSES)
    (tmp_path / "true_1b_training.py").write_text("model = FSDP(model)\n")
    (tmp_path / "working_1b_demo.py").write_text("model = nn.DataParallel(model, device_ids=[0])\n")
    for name, clock in (("true_1b_training.py", "07:37:00"), ("working_1b_demo.py", "07:43:00")):
        moment = datetime.fromisoformat(f"2025-08-24 {clock}").timestamp()
        os.utime(tmp_path / name, (moment, moment))
    return tmp_path


def read(directory):
    scan = scan_directory(directory)
    launches = infer_launches(scan.observations)
    return scan, launches, find_contradictions(launches, scan.observations, scan.scripts)


def test_two_launches_are_inferred_with_how_far_each_provably_came(night):
    _, launches, _ = read(night)
    assert [(one.number, f"{one.started:%H:%M:%S}", one.reached) for one in launches] == [
        (1, "07:14:00", "only planned, according to its lines"),
        (2, "07:15:48", "entered the training loop"),
    ]


def test_contradictions_of_the_night_are_named(night):
    """The scale-down to 170M never happened: 169,990,657 is a quarter of 679,962,626, rounded up."""
    texts = [one.text for one in read(night)[2]]
    expected = [
        "launch 1: 1,208,606,722 parameters were a target; no line says this model was created",
        "launch 2: 169,990,657 is 679,962,626 divided by 4 and rounded up: the count of one of 4 ranks after sharding, "
        "not a smaller model",
        "between launch 1 and 2 the target went 1,208,606,722 → 679,962,626; no line says why",
        "launch 2: 4 loader workers for 2 data shards; on 4 ranks that is 16 readers",
        "launch 2 begins in the same log, but no line says that launch 1 ended: a silent restart",
        "2 listed processes are older than the last launch (the oldest of 07:14:02, the launch of 07:15:48): "
        "left by an earlier launch",
        "logs name 4 devices; `working_1b_demo.py:1` uses one: `model = nn.DataParallel(model, device_ids=[0])`",
    ]
    assert texts == expected


def test_what_is_not_written_stays_unknown(night):
    """Seed 000 concluded "never ran" from a missing results file; seed 001 "95 % complete" from target lines."""
    unknown = list_unknowns(read(night)[1])
    assert "launch 2: whether a single step was taken (no line with step and loss)" in unknown
    assert "whether anything was saved: no line reports a save" in unknown


def test_draft_keeps_observed_inferred_and_unknown_apart(night):
    scan, launches, contradictions = read(night)
    draft = write_draft(scan, launches, contradictions, list_unknowns(launches))
    observed, inferred = draft.index("## Observed"), draft.index("## Inferred")
    unknown = draft.index("## Unknown")
    assert observed < inferred < unknown
    assert "07:15:57" in draft[observed:inferred] and "divided by 4" not in draft[observed:inferred]
    assert "divided by 4" in draft[inferred:unknown]
    assert draft.index("07:37:00") < draft.index("07:43:00")


def test_command_prints_the_draft_and_writes_it(night, capsys):
    out = night / "draft.out.md"
    assert chronicle(["forensics", str(night), "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["contradictions"]) == 7
    assert out.read_text().startswith("# Post-mortem draft")
    assert chronicle(["forensics", str(night / "nowhere")]) == 2


def test_a_step_that_falls_back_is_another_launch():
    lines = [f"step {step} loss {2.0}" for step in (10, 20, 30, 11, 12)]
    found = [observe_line(line, "a.log", number) for number, line in enumerate(lines, 1)]
    launches = infer_launches([one for one in found if one])
    assert [len(one.observations) for one in launches] == [3, 2]


def test_binary_rubbish_and_empty_directories_do_no_harm(tmp_path):
    (tmp_path / "x.log").write_bytes(os.urandom(20000))
    os.symlink("/", tmp_path / "root.log")
    scan, launches, contradictions = read(tmp_path)
    assert [file.path for file in scan.files] == ["x.log"]
    assert "# Post-mortem draft" in write_draft(scan, launches, contradictions, list_unknowns(launches))


@pytest.mark.parametrize(
    "text, kind, numbers",
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", LineKind.MEMORY, {}),
        ("Traceback (most recent call last):", LineKind.ERROR, {}),
        ("iteration 120/5000 | loss: 2.31", LineKind.STEP, {"step": 120.0, "loss": 2.31}),
        ("Number of trainable parameters: 771,176,450", LineKind.CREATED, {"params": 771176450.0}),
    ],
)
def test_line_is_read_as(text, kind, numbers):
    found = observe_line(text, "a.log", 1)
    assert (found.kind, found.numbers) == (kind, numbers)


@pytest.mark.timeout(60)
def test_one_endless_line_does_not_hold_the_reader_up():
    """A log with a progress bar or a dumped tensor: patterns with two gaps would need hours for it."""
    for text in ("total " * 30_000, "step " * 30_000, "model " + "x" * 200_000, "1 " * 100_000):
        assert observe_line(text + "loss", "a.log", 1) is None


def test_times_without_a_year_only_order():
    assert parse_time("May 29 01:37:38 host kernel:") == datetime(1900, 5, 29, 1, 37, 38)
    assert parse_time("nothing here") is None


def read_mess(directory):
    scan = scan_directory(directory)
    launches = infer_launches(scan.observations)
    found = find_contradictions(launches, scan.observations, scan.scripts)
    return write_draft(scan, launches, found, list_unknowns(launches))


def test_hundreds_of_listed_processes_are_a_few_lines_of_the_draft(tmp_path):
    listed = "Sun Aug 24 07:14:02 /usr/bin/python -c from multiprocessing.spawn import spawn_main"
    lines = [f"{13803 + number} {listed}" for number in range(400)]
    (tmp_path / "ps.txt").write_text("\n".join(lines) + "\n")
    draft = read_mess(tmp_path)
    assert draft.count("spawn_main") == 4
    assert "(396 like these between)" in draft


def test_lines_without_a_time_and_channels_that_measure_nothing_are_in_the_draft(tmp_path):
    """Seed 000: K=0.000, C=0.000, S=0.000 beside a loss that moved."""
    rows = [f"step {step} loss {loss} K=0.000 C=0.000 lr=0.1" for step, loss in ((1, 11.84), (2, 18.65), (3, 5.35))]
    (tmp_path / "demo.log").write_text("Model has 771,176,450 parameters\n" + "\n".join(rows) + "\n")
    (tmp_path / "demo.py").write_text("m = DataParallel(m, device_ids=[0])\n")
    draft = read_mess(tmp_path)
    assert "Model has 771,176,450 parameters · `demo.log:1`" in draft
    assert "K=0.000, C=0.000 in all 3 step lines: logged but not measured" in draft
    assert "Devices and loaders in scripts" in draft


def test_training_of_others_on_this_machine_is_not_in_the_draft(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = [subprocess.Popen(command, cwd=place, env={"RANK": "0"}) for place in (inside, outside)]
    try:
        found = {one.pid for one in scan_directory(inside).processes}
        assert started[0].pid in found and started[1].pid not in found
    finally:
        for process in started:
            process.kill()
            process.wait()


# --- What people wrote, logs of ranks, runs with a journal

POST_MORTEM = """\
# What happened

- Major Success: Achieved 1.21B parameter model creation (1,208,606,722 parameters exact)
- We saw the model with 1,208,606,722 parameters start training on 4x NVIDIA L4 GPUs.
- Training finished with a CUDA out of memory error after step 300, loss 2.5.

The log of the night says:

2025-08-24 07:15:57,037 [INFO] Model created with 169,990,657 parameters
"""


@pytest.mark.parametrize("name", ["POSTMORTEM.md", "notes.txt", "night.log"])
def test_what_a_person_wrote_is_no_event_but_a_quoted_line_is(tmp_path, name):
    (tmp_path / name).write_text(POST_MORTEM)
    scan, launches, _ = read(tmp_path)
    assert [one.kind for one in scan.observations].count(LineKind.WRITTEN) == 3
    assert [(one.number_of(LineKind.CREATED, "params"), one.ending) for one in launches] == [(169_990_657, None)]
    draft = write_draft(scan, launches, (), ())
    assert "### Written by people (no events)" in draft and "launch 2" not in draft


CUT = " 22%|##  | 11/50 [1:55:26<6:49:05, 629.37s/it]slurmstepd: error: *** {} ON n7 CANCELLED AT 2022-04-14T16:20:46{} ***\n"
STALLED = """\
[rank1]:[E1218 20:27:21.4 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7b99 in libc10.so)
"""


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (CUT.format("JOB 42221", " DUE TO TIME LIMIT"), [LineKind.ENDED]),
        (CUT.format("STEP 40341.0", ""), [LineKind.ENDED]),
        (STALLED, [LineKind.ERROR]),  # the frame is a place, and no error of its own
    ],
)
def test_the_word_of_a_scheduler_and_of_a_watchdog_ends_a_launch(tmp_path, text, kinds):
    """Seen in logs of strangers: nothing was read of the first two, and of the third only the frame."""
    (tmp_path / "slurm-42221.out").write_text(text)
    scan, launches, _ = read(tmp_path)
    assert [one.kind for one in scan.observations] == kinds
    assert [(one.ending is not None, one.reached) for one in launches] == [(True, "how far it came is not known")]


def rank_log(rank, clock, *, steps=(10, 20), crash=False):
    lines = [f"2026-03-01 {clock}:0{rank} [INFO] Model created with 124,439,808 parameters"]
    lines += [f"2026-03-01 {clock}:30 step {step} loss {3.0 - step / 100}" for step in steps]
    lines += [f"2026-03-01 {clock}:50 RuntimeError: NCCL timeout on rank {rank}"] if crash else []
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "pattern",
    ["rank-{}.log", "train_rank{}.out", "logs/worker_{}.log", "none_x/attempt_0/{}/stdout.log", "job-77-node{}.out"],
)
def test_the_logs_of_the_ranks_of_one_launch_are_one_launch(tmp_path, pattern):
    for rank in range(4):
        path = tmp_path / pattern.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        again = rank_log(rank, "09:00", steps=(20, 30))
        path.write_text(rank_log(rank, "08:00", crash=rank == 2) + again)
    _, launches, _ = read(tmp_path)
    assert [(f"{one.started:%H:%M}", len(one.others), one.reached) for one in launches] == [
        ("08:00", 3, "stepped"), ("09:00", 3, "stepped")
    ]
    assert launches[0].ending is not None and "rank 2" in launches[0].ending.text
    assert [one.numbers["step"] for one in launches[0].observations if one.kind is LineKind.STEP] == [10, 20]


def test_logs_of_several_launches_are_not_taken_for_ranks(tmp_path):
    """Numbers that are no ranks, and ranks that began hours apart."""
    (tmp_path / "train-1.log").write_text(rank_log(0, "08:00"))
    (tmp_path / "train-2.log").write_text(rank_log(0, "08:01"))
    (tmp_path / "rank-0.log").write_text(rank_log(0, "10:00"))
    (tmp_path / "rank-1.log").write_text(rank_log(1, "13:00"))
    assert [(one.source, one.others) for one in read(tmp_path)[1]] == [
        ("train-1.log", ()), ("train-2.log", ()), ("rank-0.log", ()), ("rank-1.log", ())
    ]


def test_a_run_with_a_journal_is_told_from_its_journal(tmp_path, capsys):
    paths = RunPaths(tmp_path / "logs" / "demo")
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h"})
        writer.append("launch.end", launch=1, data={"exit_code": 1, "cause": "crash"})
    paths.rank_log(1, 0).parent.mkdir(parents=True, exist_ok=True)
    paths.rank_log(1, 0).write_text(rank_log(0, "08:00"))
    (tmp_path / "old.log").write_text(rank_log(0, "07:00"))
    assert chronicle(["forensics", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recorded"] == [str(paths.run_dir)]
    assert [one["source"] for one in told["launches"]] == ["old.log"]
    assert chronicle(["forensics", str(tmp_path)]) == 0
    draft = capsys.readouterr().out
    assert draft.index("## Recorded by chronicle") < draft.index("## Observed")
    assert "launch 1: from " in draft and "; ended with code 1: crash" in draft
