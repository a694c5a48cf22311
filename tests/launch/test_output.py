"""Logs and live view by themselves: rotation with seals, holes, latency, split lines."""

import os
import re
import signal
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronicle.journal import read_journal
from chronicle.launch.channels import SRUN_PREFIX, TEE_PREFIX, LatencyTest, rank_prefix_of
from chronicle.launch.output import LiveView, LogFile, split_lines
from chronicle.launch.record import broken_seals, find_rank_code, reported_failure, seal_file
from chronicle.paths import RunPaths


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_rotation_keeps_every_byte_in_order_and_hands_over_each_part(tmp_path):
    parts = []
    log = LogFile(tmp_path / "rank-0.log", clock=Clock(), complain=print, rotate_bytes=100, on_rotate=parts.append)
    for number in range(50):
        log.write(f"line {number}\n".encode())
    log.close()
    assert [part.name for part in parts] == [f"rank-0.{n:04d}.log" for n in range(1, len(parts) + 1)]
    assert len(parts) == 3
    whole = b"".join(path.read_bytes() for path in [*parts, tmp_path / "rank-0.log"])
    assert whole == b"".join(f"line {number}\n".encode() for number in range(50))


def test_log_marks_its_hole_once_there_is_room_again(tmp_path):
    clock, said = Clock(), []
    path = tmp_path / "a.log"
    os.symlink("/dev/full", path)
    log = LogFile(path, clock=clock, complain=said.append)
    log.write(b"lost\n")
    path.unlink()
    log.close()
    log.write(b"also lost: not tried again so soon\n")
    clock.now = 11.0
    log.write(b"kept\n")
    assert path.read_bytes() == b"\n[chronicle: 40 bytes of this log were lost here]\nkept\n"
    assert (log.lost_bytes, len(said)) == (40, 1)


def test_live_view_never_waits_for_a_reader_who_does_not_read():
    read_end, write_end = os.pipe()
    view = LiveView(write_end)
    for _ in range(400):
        view.show(b"x" * 10_000)
    assert view.pending
    seen = b""
    while view.pending:
        seen += os.read(read_end, 1 << 16)
        view.flush()
    seen += os.read(read_end, 1 << 16)
    view.show(b"after\n")
    os.close(write_end)
    while block := os.read(read_end, 1 << 16):
        seen += block
    assert re.search(rb"\[chronicle: \d+ bytes not shown; they are in supervisor.log\]\nafter\n$", seen)
    os.close(read_end)


@settings(deadline=None)  # a shared machine
@given(st.lists(st.binary(max_size=30), max_size=20))
def test_split_lines_loses_and_invents_nothing(blocks):
    rest, out = b"", []
    for block in blocks:
        lines, rest = split_lines(rest, block)
        out += lines
    assert b"".join(out) + rest == b"".join(blocks)


def test_a_marked_line_that_arrives_is_taken_out_and_nothing_is_said():
    clock, said = Clock(), []
    test = LatencyTest(clock=clock)
    test.expect(0, "ab" * 8)
    assert test.take(b"before\n\x1elatency " + b"ab" * 8 + b"\nafter\n", 3) == b"before\nafter\n"
    clock.now = 60.0
    test.check(said.append)
    assert said == [] and test.late == {}


@settings(deadline=None)  # a shared machine
@given(st.integers(min_value=0, max_value=40))
def test_a_mark_cut_in_two_is_still_one_mark(cut):
    test = LatencyTest(clock=Clock())
    data = b"before\n\x1elatency " + b"ab" * 8 + b"\nafter\n"
    test.expect(0, "ab" * 8)
    assert test.take(data[:cut], 3) + test.take(data[cut:], 3) == b"before\nafter\n"
    assert test._waiting == {}


def test_a_mark_that_does_not_come_is_called_buffered_once_and_its_delay_is_kept():
    clock, said = Clock(), []
    test = LatencyTest(clock=clock)
    test.expect(3, "cd" * 8)
    for clock.now in (1.0, 2.5, 9.0):
        test.check(said.append)
    assert len(said) == 1 and said[0].startswith("output of rank 3 is buffered: a line it printed")
    clock.now = 10.0
    test.take(b"\x1elatency " + b"cd" * 8 + b"\n", 3)
    assert test.late == {3: 10.0}


def test_rank_prefixes_are_read_only_where_the_launcher_writes_them():
    assert rank_prefix_of(["srun", "-n2", "python"]) is SRUN_PREFIX
    assert rank_prefix_of(["torchrun", "--tee", "3", "x.py"]) is TEE_PREFIX
    assert rank_prefix_of(["python", "x.py"]) is None
    assert TEE_PREFIX.match(b"[default1]:loss 2.0").group(1) == b"1"
    assert SRUN_PREFIX.match(b" 12: loss").group(1) == b"12"


def test_exit_code_of_a_rank_is_read_from_the_report_of_torchrun():
    lines = [
        "  rank      : 1 (local_rank: 1)", "  exitcode  : -9 (pid: 71)",
        "  rank      : 0 (local_rank: 0)", "  exitcode  : 1 (pid: 70)",
    ]  # fmt: skip
    assert (find_rank_code(lines, 1), find_rank_code(lines, 0), find_rank_code(lines, 2)) == (-9, 1, None)


@pytest.mark.parametrize(
    "frame, words, found",
    [
        ("accelerate/commands/launch.py", "died with <Signals.SIGKILL: 9>.", (0, -9)),
        ("accelerate/commands/launch.py", "returned non-zero exit status 3.", (0, 3)),
        ("home/me/train.py", "returned non-zero exit status 128.", (None, None)),  # the script's own `git describe`
    ],
)
def test_the_end_that_accelerate_reports_of_its_only_process_is_read(frame, words, found):
    """It gives that process no rank, so that nobody sees it end; the launcher itself ends with 1 for every signal."""
    lines = ["step: 5 | loss: 1.1917", "Traceback (most recent call last):", f'  File "/lib/{frame}", line 999, in launch',
             f"subprocess.CalledProcessError: Command '['python', 'acc.py']' {words}"]  # fmt: skip
    assert reported_failure(lines) == found


def test_seal_tells_a_changed_and_a_missing_log(driver):
    code = "for i in range(30): print('line', i)"
    driver.start([sys.executable, "-c", code])
    assert driver.wait() == 0
    journal = read_journal(driver.paths)
    assert broken_seals(driver.paths, journal.entries) == {}
    log = driver.paths.supervisor_log(1)
    log.write_bytes(log.read_bytes().replace(b"line 3\n", b"line 4\n"))
    assert "has changed" in next(iter(broken_seals(driver.paths, journal.entries).values()))
    log.unlink()
    assert "cannot be read" in next(iter(broken_seals(driver.paths, journal.entries).values()))


def test_buffered_output_is_said_while_it_is_buffered(driver):
    """A relay that holds lines back, as `--tee` does without an unbuffered launcher (formats §5)."""
    rank = "from chronicle.launch.ranks import open_rank_output; open_rank_output(redirect=False)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.run([sys.executable, '-c', {rank!r}], stdout=subprocess.PIPE)\n"
        "time.sleep(4); sys.stdout.buffer.write(child.stdout); print('end')"
    )
    driver.start([sys.executable, "-c", code])
    assert driver.wait() == 0
    assert "output of rank 0 is buffered: a line it printed" in driver.out.read_text()
    late = driver.entries("launch.end")[0].data["buffered_ranks"]["0"]
    assert late > 3
    assert "latency" not in driver.paths.supervisor_log(1).read_text().replace("chronicle:", "")


def test_seals_cover_rank_logs_and_evidence(tmp_path):
    paths = RunPaths(tmp_path / "demo")
    file = paths.rank_log(1, 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"abc")
    seal = seal_file(paths, file)
    assert (seal["path"], seal["bytes"]) == ("launches/0001/rank-0.log", 3)
    assert seal["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_signal_names_in_the_journal_are_the_full_ones(driver):
    driver.start([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
    assert driver.wait() == 128 + signal.SIGSEGV
    assert driver.entries("launch.end")[0].title == "launch 1 ended by SIGSEGV: crash"


def test_binary_rubbish_and_lines_without_end_cost_little_and_keep_every_byte():
    """A mark's first byte inside a megabyte without an end of line once cost minutes of CPU."""
    test = LatencyTest(clock=lambda: 0.0)
    rubbish = bytes(range(256)) * 40 + b"x" * (1 << 20)
    began = time.process_time()
    shown = b"".join(test.take(rubbish[at : at + 65536], 3) for at in range(0, len(rubbish), 65536))
    assert shown == rubbish
    assert time.process_time() - began < 5.0  # CPU of this process: 0.01 s; it was over a minute


def test_an_endless_line_is_cut_in_pieces_and_read_once():
    """Looking for its end from every position cost minutes of CPU a megabyte."""
    began, rest, pieces = time.process_time(), b"", []
    for _ in range(64):
        lines, rest = split_lines(rest, b"x" * 65536)
        pieces += lines
    assert sum(piece.count(b"x") for piece in pieces) + len(rest) == 64 * 65536
    assert len(rest) <= 65536
    assert time.process_time() - began < 5.0  # 0.01 s
