"""The cost of one `chronicle.log` line against a bare `os.write` of the same bytes: `python -m benchmarks.recording`."""

import os
import tempfile
import time
from pathlib import Path

from chronicle.recording import Recording

LINES, ROUNDS = 20_000, 7


def main() -> None:
    """Print microseconds a line, the least of several rounds, and the ratio."""
    with tempfile.TemporaryDirectory() as directory:
        environ = {"CHRONICLE_RUN": "r", "CHRONICLE_RUN_DIR": directory, "CHRONICLE_LAUNCH_DIR": directory}
        run = Recording(environ)
        line = b'{"step":1000,"t":1700000000.123456,"loss":2.345678901234,"lr":0.0003,"grad_norm":1.25}\n'
        fd = os.open(Path(directory) / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        logged, bare = [], []
        for _ in range(ROUNDS):
            began = time.process_time()
            for step in range(LINES):
                run.log(step, loss=2.345678901234, lr=0.0003, grad_norm=1.25)
            between = time.process_time()
            for _ in range(LINES):
                os.write(fd, line)
            logged.append(between - began)
            bare.append(time.process_time() - between)
        run.close()
        os.close(fd)
    ours, floor = min(logged) / LINES * 1e6, min(bare) / LINES * 1e6
    print(f"chronicle.log {ours:.2f} µs of CPU a line, bare os.write {floor:.2f} µs: x {ours / floor:.2f}")


if __name__ == "__main__":
    main()
