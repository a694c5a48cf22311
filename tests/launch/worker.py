"""A trainer as launchers see it: says who it is, has a worker process and a detached grandchild, then works for ever.

Run by the launchers under test. Arguments: a directory for `ready-<rank>.json`, and a mode: `plain` dies of signals,
`ignore` ignores them, `save` takes a second to "save" and then leaves `saved-<rank>`.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def load() -> None:
    """A DataLoader worker: does what its parent did about signals."""
    while True:
        time.sleep(60)


def main(directory: Path, mode: str) -> None:
    rank = os.environ.get("RANK", "0")
    stop = threading.Event()
    for number in SIGNALS:
        if mode == "ignore":
            signal.signal(number, signal.SIG_IGN)
        elif mode == "plain":
            signal.signal(number, signal.SIG_DFL)
    loader = multiprocessing.get_context("fork").Process(target=load)
    loader.start()
    detached = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if mode == "save":
        for number in SIGNALS:
            signal.signal(number, lambda *_: stop.set())
    print(f"rank {rank} works", flush=True)
    ready = directory / f"ready-{rank}.json"
    ready.with_suffix(".tmp").write_text(json.dumps([os.getpid(), loader.pid, detached.pid]))
    os.rename(ready.with_suffix(".tmp"), ready)
    while not stop.is_set():
        stop.wait(1.0)
    time.sleep(1.0)
    (directory / f"saved-{rank}").write_text("all of it")
    loader.terminate()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
