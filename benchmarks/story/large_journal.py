"""`status` and `log` of a large run: journal of N entries, N × 1.25 metric lines of 8 channels; cold and warm index.

    python benchmarks/story/large_journal.py [ENTRIES]      default 1000000; needs about 0.6 GB of disk for a while
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chronicle.journal.entries import FIRST_PREV, Entry
from chronicle.journal.writer import new_id
from chronicle.paths import RunPaths

LAUNCHES = 20
MAIN = "from chronicle.cli.main import main; main()"
METRICS = '{"step":%d,"t":%d.5,"loss":1.234567,"lr":0.0001,"grad_norm":0.5,"a":1.5,"b":2.5,"c":3.5,"d":4.5,"e":5.5}\n'


def make_run(paths: RunPaths, entries: int) -> None:
    """Twenty launches, one writer each: one checkpoint in ten entries, one incident in a thousand, the rest hardware."""
    paths.journal_dir.mkdir(parents=True)
    each = entries // LAUNCHES
    for number in range(1, LAUNCHES + 1):
        first = (number - 1) * each
        writer, prev, lines = f"20260101T0000{number:02d}-host-{number}-aaaa", FIRST_PREV, []
        for index in range(each):
            fields = fields_of(number, index, first, each)
            identity = new_id(1_700_000_000_000 + first + index, index)
            entry = Entry(
                id=identity, ts="2026-01-01T00:00:00.000+00:00", run=paths.run, writer=writer, seq=index, prev=prev, **fields
            )
            line = entry.to_json().encode()
            prev = hashlib.sha256(line).hexdigest()
            lines.append(line)
        (paths.journal_dir / f"{writer}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        paths.launch_dir(number).mkdir(parents=True)
        count = entries * 5 // 4 // LAUNCHES
        with paths.metrics_path(number).open("w") as log:
            log.writelines(METRICS % (first + i * each // count + 1, 1_700_000_000 + i) for i in range(count))


def fields_of(number: int, index: int, first: int, each: int) -> dict[str, object]:
    """Kind and facts of one entry."""
    step = first + index
    if index == 0:
        return {"kind": "launch.start", "launch": number, "data": {"start_step": first, "argv": ["train"]}}
    if index == each - 1:
        return {"kind": "launch.end", "launch": number, "data": {"exit_code": 0, "last_step": first + each}}
    if index % 10 == 0:
        return {"kind": "checkpoint", "launch": number, "step": step, "data": {"path": f"checkpoints/opt_step-{step}"}}
    if index % 1000 == 1:
        data = {"kind": "instant-spike", "tier": "warn", "status": "recovered"}
        return {"kind": "incident", "launch": number, "step": step, "title": "spike", "data": data}
    title = f"Xid 63 on gpu {index % 8}, row remapper"
    return {"kind": "hardware", "launch": number, "step": step, "title": title, "data": {"gpu": index % 8}}


def measure(words: list[str], directory: str) -> str:
    """Wall time, CPU time and peak memory of one command."""
    begin = time.perf_counter()
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", MAIN, *words], cwd=directory, stdout=quiet, stderr=quiet)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    assert status == 0, words
    return f"{wall:6.2f} s wall  {usage.ru_utime + usage.ru_stime:6.2f} s CPU  {usage.ru_maxrss / 1024:5.0f} MB"


def main() -> None:
    """Print one line a command, cold and warm."""
    entries = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"XDG_CACHE_HOME": f"{directory}/cache", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        make_run(RunPaths(Path(directory) / "logs" / "big"), entries)
        for state in ("cold", "warm"):
            for words in (["status"], ["log"], ["log", "--graph"]):
                print(f"{state}  {' '.join(words):<12} {measure(words, directory)}", flush=True)


if __name__ == "__main__":
    main()
