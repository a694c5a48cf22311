"""1,000 incidents and a network that is down half of the time. `python -m benchmarks.alerts [--incidents N]`

    launch   `chronicle run` starts a trainer that raises an alert at every step, while a receiver on the loopback is up and
             down by turns. Printed: how often each incident arrived, and the trainer's own step time against the same
             launch without `[alerts]`.
    kills    the process that sends is killed whenever forty more messages have arrived, and the receiver now and then takes
             a message and loses the answer. Printed: incidents that never arrived, and messages that came twice. HTTP allows
             no better than "twice with the same key": the receiver that looks at the key has each once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chronicle.alerts.destinations import read_destinations
from chronicle.alerts.process import open_outboxes
from chronicle.journal import JournalWriter
from chronicle.journal.events import Close, Incident, LaunchStart
from chronicle.paths import RunPaths
from tests.alerts.receiver import Receiver

TURN_SECONDS = 2.0
PATIENCE_SECONDS = 400.0
TRAINER = """
import json, sys, time
import chronicle
took = []
for step in range(int(sys.argv[1])):
    begun = time.perf_counter()
    sum(n * n for n in range(200_000))
    chronicle.log(step, loss=2.0)
    took.append(time.perf_counter() - begun)
    chronicle.alert(f"incident {step}", step=step)
json.dump(took, open("took.json", "w"))
"""


class Weather(threading.Thread):
    """The network: each state in turn, for `seconds`, until `clear` is called."""

    def __init__(self, receiver: Receiver, states: Sequence[str], seconds: float = TURN_SECONDS) -> None:
        super().__init__(daemon=True)
        self.receiver, self.states, self.seconds = receiver, states, seconds
        self.over = threading.Event()
        self.down = self.all = 0.0

    def run(self) -> None:
        for state in itertools.cycle(self.states):
            self.receiver.mode = state
            begun = time.monotonic()
            stop = self.over.wait(self.seconds)
            self.all += time.monotonic() - begun
            self.down += (time.monotonic() - begun) * (state != "up")
            if stop:
                self.receiver.mode = "up"
                return

    def clear(self) -> None:
        self.over.set()
        self.join()


def here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def launch(count: int, url: str | None) -> tuple[float, tempfile.TemporaryDirectory[str]]:
    """One real launch; returns the median step of its trainer in seconds, and its directory."""
    directory = tempfile.TemporaryDirectory()
    place = Path(directory.name)
    (place / "train.py").write_text(TRAINER)
    table = "" if url is None else f'[alerts.d]\nkind = "json"\nurl = "{url}"\n'
    (place / "chronicle.toml").write_text(f'run = "tr"\n{table}')
    words = [sys.executable, "-m", "chronicle.cli.main", "run", "--", sys.executable, "train.py", str(count)]
    done = subprocess.run(words, cwd=place, env=here(), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return statistics.median(json.loads((place / "took.json").read_text())), directory


def arrived(receiver: Receiver, wanted: int) -> None:
    """Wait until so many different messages have arrived, or patience ends."""
    until = time.monotonic() + PATIENCE_SECONDS
    while len({key for key, _ in receiver.taken}) < wanted and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(3.0)  # what would come twice comes now


def tell(name: str, receiver: Receiver, wanted: int, more: str) -> bool:
    seen = Counter(key for key, _ in receiver.taken)
    once, twice = sum(n == 1 for n in seen.values()), sum(n > 1 for n in seen.values())
    print(f"{name}: {wanted} messages due, {once} arrived once, {twice} more than once, {wanted - len(seen)} never; {more}")
    return len(seen) == wanted


def play_launch(count: int) -> bool:
    plain = launch(count, None)[0]
    receiver = Receiver()
    weather = Weather(receiver, ("up", "gone"))
    weather.start()
    begun = time.monotonic()
    told, place = launch(count, receiver.url)
    ended = time.monotonic() - begun
    arrived(receiver, count)
    share = weather.down / weather.all
    weather.clear()
    plain = (plain + launch(count, None)[0]) / 2  # before and after: other work on this machine comes and goes
    load = os.getloadavg()[0]
    ratio = f"median step {told * 1e3:.2f} ms, {plain * 1e3:.2f} ms without alerts: {told / plain:.3f} (load {load:.1f})"
    whole = tell("launch", receiver, count, f"network down {share:.0%} of the time; launch of {ended:.0f} s; {ratio}")
    receiver.stop()
    place.cleanup()
    return whole and all(n == 1 for n in Counter(key for key, _ in receiver.taken).values())


def play_kills(count: int) -> bool:
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "chronicle.toml").write_text(f'run = "tr"\n[alerts.d]\nkind = "json"\nurl = "{receiver.url}"\n')
        paths = RunPaths(place / "logs" / "tr")
        with JournalWriter(paths) as writer:
            writer.write(LaunchStart(), launch=1)
            open_outboxes(paths, read_destinations({"d": {"kind": "json", "url": receiver.url}}, "here"))
            for number in range(count):
                event = Incident(kind="alert", tier="warn", status="open")
                first = writer.write(event, launch=1, step=number, title=f"incident {number}").id
                if number % 2:
                    writer.write(Close(outcome="worked"), refs=(first,))
        wanted = count + count // 2
        weather = Weather(receiver, ("up", "gone", "up", "lost"), 1.3)
        weather.start()
        words = [sys.executable, "-m", "chronicle.alerts.process", "--run", "tr", "--logs", str(place / "logs")]
        kills, until = 0, time.monotonic() + PATIENCE_SECONDS
        while len({key for key, _ in receiver.taken}) < wanted and time.monotonic() < until:
            process = subprocess.Popen(words, cwd=place, env=here(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            enough = len(receiver.taken) + 40
            while len(receiver.taken) < enough and time.monotonic() < until:
                if len({key for key, _ in receiver.taken}) == wanted:
                    break
                time.sleep(0.005)
            process.kill()
            kills += 1
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        weather.clear()
        process = subprocess.Popen(words, cwd=place, env=here(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        arrived(receiver, wanted)
        process.communicate()
        whole = tell("kills", receiver, wanted, f"the sender was killed {kills} times, answers were lost a quarter of the time")
        receiver.stop()
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description="alerts over a network that is down half of the time")
    parser.add_argument("--incidents", type=int, default=1000)
    count = parser.parse_args().incidents
    good = [play_launch(count), play_kills(count)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
