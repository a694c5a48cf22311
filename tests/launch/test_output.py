"""Logs and live view by themselves: rotation, holes, halves, split lines."""

import os
import re
import selectors
import signal
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronicle.journal import read_journal
from chronicle.launch.channels import SRUN_PREFIX, TEE_PREFIX, Channels, rank_prefix_of
from chronicle.launch.output import LineTail, LiveView, LogFile, split_lines
from chronicle.launch.record import broken_seals, find_rank_code, reported_failure, seal_file
from chronicle.paths import RunPaths


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_rotation_keeps_every_byte_and_a_tail_reads_every_line_once(tmp_path):
    """A reader that falls behind by several parts, and one that begins anew where it stood."""
    path = tmp_path / "rank-0.log"
    log = LogFile(path, clock=Clock(), complain=print, rotate_bytes=100)
    tail, found = LineTail(path), []
    for number in range(80):
        log.write(f"line {number}\n".encode())
        if number % 17 == 0:
            found += tail.read(most=40)
            tail = LineTail(path, part=tail.part, offset=tail.offset)
    log.close()
    while lines := tail.read(most=40):
        found += lines
    parts = sorted(tmp_path.glob("rank-0.????.log"))
    assert len(parts) > 3 and tail.part == len(parts)
    assert b"".join(part.read_bytes() for part in [*parts, path]) == b"".join(b"%s\n" % line for line in found)
    assert found == [f"line {number}".encode() for number in range(80)]


def test_a_tail_returns_whole_lines_and_begins_anew_in_a_file_that_was_cut(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntw")
    tail = LineTail(path)
    assert tail.read() == [b"one"] and tail.offset == 4
    path.write_bytes(b"one\ntwo\rthree")
    assert tail.read() == [b"two"] and tail.rest() == b"three" and tail.offset == 13
    path.write_bytes(b"new\n")
    assert tail.read() == [b"new"]


def test_halves_of_lines_of_two_pipes_are_not_mixed_in_the_log(tmp_path):
    """The live view has them at once; the log waits for the rest of a line, or a second."""
    with selectors.DefaultSelector() as selector:
        channels = Channels(tmp_path, selector, complain=print, on_rank=lambda rank, pid: None, log_name="a.log")
        pipes = [os.pipe() for _ in range(2)]
        reads = [channels._pipe_reader(read_end, LiveView(os.open(os.devnull, os.O_WRONLY))) for read_end, _ in pipes]
        for place, text in ((0, b"step 7: lo"), (1, b"warn"), (0, b"ss 3.0\nPassw"), (1, b"ing\n")):
            os.write(pipes[place][1], text)
            reads[place]()
        channels.write_halves()
        assert channels.log.tail == b"step 7: loss 3.0\nwarning\n"
        channels.write_halves()
        assert channels.log.tail.endswith(b"\nPassw")
        channels.close()


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


def test_a_log_without_ends_of_lines_is_read_in_pieces(tmp_path):
    """Carrying its beginning along from look to look cost minutes of CPU a megabyte."""
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (8 << 20))
    tail, pieces = LineTail(path), []
    while found := tail.read(1 << 16):
        pieces += found
    assert set(map(len, pieces)) == {1 << 16} and tail.offset == 8 << 20


def test_an_endless_line_is_cut_in_pieces_and_read_once():
    """Looking for its end from every position cost minutes of CPU a megabyte."""
    began, rest, pieces = time.process_time(), b"", []
    for _ in range(64):
        lines, rest = split_lines(rest, b"x" * 65536)
        pieces += lines
    assert sum(piece.count(b"x") for piece in pieces) + len(rest) == 64 * 65536
    assert len(rest) <= 65536
    assert time.process_time() - began < 5.0  # 0.01 s
