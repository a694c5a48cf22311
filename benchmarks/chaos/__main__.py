"""Forty planted faults of twelve kinds in one two-rank training, with nobody at the keyboard.

    python -m benchmarks.chaos [--faults 40] [--seed 1] [--out chaos.json] [--no-bare] [--only KIND]

The same training runs three times: undisturbed; with the faults under `chronicle run --restarts`; with the same faults under
`torchrun --max-restarts`. Where a run ends although it is not finished,
a person would have to come: the benchmark does what the printed sentence says, and counts it. A bare run that stands still for
a minute is ended, and that is counted as well.

ETTR is the share of the time that was not lost to faults: from each fault to the first step beyond the furthest one before it.
Of these seconds the steps that are done again belong to the distance of the saves: faults at random every three saves throw
away half of one such distance, so that no restart, were it instant, has an ETTR above 3 / 3.5 = .857. The rest is fixed: until
the end is recorded (detection, teardown of ranks and launcher), chronicle's own (decision, verification, pause, checks) and the
start of the trainer. The last line is computed from these measured means, for saves as far apart as those of real runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos.faults import BALLAST, KINDS, Fault, draw
from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind, Restarted, events_of
from chronicle.launch.processes import list_processes, read_environment
from chronicle.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
TINY = (
    "model.d_model=32", "num_layers=1", "d_ff=32", "window_bytes=8", "batch_size=8", "warmup_steps=20", "raise_step=none",
    "raise_factor=1.0", "eval_windows=8", "eval_every=100000", "log_every=20", "summary=false",
    "data.num_workers=1",
)  # fmt: skip
SAVE_EVERY = 20
STILL_SECONDS = {"chronicle": 240.0, "bare": 60.0}  # without a step, until a person would look
DISK_SECONDS = 12.0
MARK = "CHAOS"  # in the environment of every process of a campaign, with its directory
# faults after which a person has to look, and what the sentence must say
RIGHT_STOPS = {"poisoned": "is poisoned", "lr_wiped": "refused"}


class Step(NamedTuple):
    """A step that was done, as rank 0 noted it."""

    time: float
    start: str
    step: int
    loss: str
    rate: str
    digest: str


class Campaign:
    """One training to its last step, however often it has to be started."""

    def __init__(
        self, directory: Path, faults: Sequence[Fault], steps: int, *, bare: bool = False, pace: float = 0.0
    ) -> None:
        self.directory, self.faults, self.steps, self.bare = directory, faults, steps, bare
        self.starts: list[dict[str, Any]] = []
        (directory / "disk").mkdir(parents=True)
        self.small_disk = _mount_small_disk(directory / "disk") if faults else False
        (directory / "disk" / "checkpoints").mkdir()
        (directory / "faults.json").write_text(json.dumps(faults))
        own = {key: value for key, value in os.environ.items() if not key.startswith(("CHRONICLE_", "PYTHONDONTWRITE"))}
        self.environ = own | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            MARK: str(directory),
            "CHAOS_STEP_SECONDS": f"{pace}",
        }

    def play(self) -> dict[str, Any]:
        """Start it until it has finished; what happened."""
        began = time.time()
        while not self._finished():
            if len(self.starts) > 2 * len(self.faults):
                break
            self._start()
        return {"seconds": time.time() - began, "starts": self.starts, "finished": self._finished()}

    def close(self) -> None:
        """Leave nothing."""
        self._end_all()
        if self.small_disk:
            subprocess.run(["umount", "--lazy", str(self.directory / "disk")], check=False)

    def log(self) -> list[Step]:
        """The steps that were done, in their order."""
        path = self.directory / "steps.log"
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines)
        return [Step(float(one[0]), one[1], int(one[2]), *one[3:]) for one in words if len(one) == 6]

    def struck(self) -> dict[int, float]:
        """When each fault struck first."""
        found: dict[int, float] = {}
        for path in self.directory.glob("struck-*"):
            number, when = int(path.name.split("-")[1]), float(path.read_text() or 0)
            found[number] = min(found.get(number, when), when)
        return found

    def _finished(self) -> bool:
        return any(one.step == self.steps for one in self.log())

    def _command(self) -> list[str]:
        settings = [f"--set={one}" for one in (*TINY, f"total_steps={self.steps}", f"decay_steps={self.steps - 20}",
                                               f"checkpoint_every={SAVE_EVERY}")]  # fmt: skip
        trainer = [str(WORKER), "--recipe", "demo", "--checkpoints", "disk/checkpoints", *settings]
        torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", "--standalone"]
        if self.bare:
            return [*torchrun, "--max-restarts", "100", "--monitor-interval", "1", *trainer]
        return [sys.executable, "-m", "chronicle_ml", "run", "--run", "chaos", "--restarts", "200", "--restart-pause", "1",
                "--on-stall", "stop", "--grace", "5", "--checkpoints", "disk/checkpoints", "--",
                *torchrun, *trainer]  # fmt: skip

    def _start(self) -> None:
        number, before = len(self.starts), len(self.log())
        out = self.directory / f"out-{number}.txt"
        with open(out, "wb") as sink:
            process = subprocess.Popen(
                self._command(), cwd=self.directory, env=self.environ | {"CHAOS_START": str(number)}, stdin=subprocess.DEVNULL,
                stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip
        end = self._watch(process)
        last = max(self.struck().items(), key=lambda one: one[1], default=(None, 0.0))[0]
        progressed = len(self.log()) > before
        row = {"code": process.poll(), "end": end, "fault": last, "said": _last_words(out), "progressed": progressed}
        self.starts.append(row)
        self._end_all()
        if not self._finished():
            row["person"] = self._do_as_told(row)

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for its end; "stands" where no step comes for too long."""
        longest, steps, since = STILL_SECONDS["bare" if self.bare else "chronicle"], -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            self._free_the_disk()
            if (count := len(self.log())) != steps:
                steps, since = count, time.monotonic()
            if time.monotonic() - since > longest:
                self._end_all()
                process.wait()
                return "stands"
        while not self.bare and process.returncode == -signal.SIGKILL and self._alive():
            time.sleep(0.5)  # something goes on without the process that was started
            if len(self.log()) == steps and time.monotonic() - since > longest:
                break
        return "ended"

    def _free_the_disk(self) -> None:
        """Somebody frees the disk after a while."""
        ballast = self.directory / "disk" / BALLAST
        try:
            if time.time() - ballast.stat().st_mtime > DISK_SECONDS:
                ballast.unlink()
        except FileNotFoundError:
            pass

    def _alive(self) -> list[Any]:
        mine = str(self.directory)
        return [one for one in list_processes() if one.alive and one.pid != os.getpid()
                and (read_environment(one.pid) or {}).get(MARK) == mine]  # fmt: skip

    def _end_all(self) -> None:
        """End what is left of this campaign, by the mark in its environment."""
        deadline = time.monotonic() + 20
        while (alive := self._alive()) and time.monotonic() < deadline:
            for one in alive:
                try:
                    os.kill(one.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.1)

    def _do_as_told(self, row: dict[str, Any]) -> str:
        """What a person does after a stop: as the sentence says, else only the start."""
        ballast = self.directory / "disk" / BALLAST
        while ballast.exists():
            time.sleep(0.5)
            self._free_the_disk()
        if self.bare:
            return self._help_bare(row)
        if "poisoned" in row["said"]:
            return self._roll_back()
        return "started again"

    def _roll_back(self) -> str:
        found = self._chronicle("latest", "--verified", "--json")
        whole = [int(path.name.rsplit("-", 1)[1]) for path in (self.directory / "disk/checkpoints").glob("opt_step-*")]
        for step in sorted(whole, reverse=True)[1:]:
            words = ["rollback", "--to", str(step), "--yes"]
            done = self._chronicle(*words)
            if done.returncode == 0:
                return f"chronicle {' '.join(words)}"
        return f"rollback failed: {found.stdout[-200:]} {done.stderr[-400:]}"

    def _chronicle(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chronicle_ml", *words, "--run", "chaos", "--checkpoints", "disk/checkpoints"]
        environ = {key: value for key, value in self.environ.items() if key != MARK}
        return subprocess.run(command, cwd=self.directory, env=environ, capture_output=True, text=True, check=False)

    def _help_bare(self, row: dict[str, Any]) -> str:
        """A start that did no step cannot load the newest checkpoint: a person removes it."""
        newest = sorted(
            (self.directory / "disk/checkpoints").glob("opt_step-*"), key=lambda path: int(path.name.split("-")[1])
        )
        if row["progressed"] or not newest:
            return "started again"
        shutil.rmtree(newest[-1])
        return f"removed {newest[-1].name}"


def _last_words(path: Path) -> str:
    lines = [
        line
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith(("chronicle:", "error", "hint", "stop"))
    ]
    return " | ".join(lines[-4:])[-900:]


def _mount_small_disk(directory: Path) -> bool:
    """A file system of its own for the checkpoints, so that it can be full; False where that is not allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "chaos", str(directory)], capture_output=True, check=False
    )
    return done.returncode == 0


def can_mount() -> bool:
    """Whether a disk can be made full here."""
    with tempfile.TemporaryDirectory() as name:
        if not _mount_small_disk(Path(name)):
            return False
        subprocess.run(["umount", name], check=False)
        return True


# --- what came of it


def judge(campaign: Campaign, played: dict[str, Any], reference: Sequence[Step]) -> dict[str, Any]:
    """Counts and one row for each fault."""
    log, struck, starts = campaign.log(), campaign.struck(), played["starts"]
    stops = {row["fault"]: row for row in starts if "person" in row}
    rows, launches = [], [] if campaign.bare else launches_of(campaign.directory)
    for fault in campaign.faults:
        when = struck.get(fault.number)
        stop = stops.get(fault.number)
        rows.append({**fault._asdict(), "struck": when, "outcome": _outcome(campaign, fault, when, stop), **_lost(log, when),
                     "phases": None if fault.kind == "slow_rank" else _phases(launches, log, when),
                     "said": "" if stop is None else stop["said"],
                     "person": "" if stop is None else stop["person"]})  # fmt: skip
    final = {one.step: one for one in log}  # the last time that a step was done counts
    truth = {one.step: one for one in reference}
    wrong = [step for step, one in final.items() if step in truth and _content(one) != _content(truth[step])]
    lost = sum(row["seconds"] for row in rows)
    return {
        "faults": len(rows), "outcomes": Counter(row["outcome"] for row in rows), "rows": rows, "seconds": played["seconds"],
        "finished": played["finished"], "starts_by_a_person": sum("person" in row for row in starts),
        "steps": campaign.steps, "steps_done": len(log), "steps_lost": len(log) - len(final),
        "steps_that_differ": len(wrong), "first_that_differs": min(wrong, default=None),
        "missing": len(set(truth) - set(final)),
        "digests_differ": sum(truth[step].digest != final[step].digest for step in truth if step in final),
        "final_loss": _number(final.get(campaign.steps)), "final_loss_undisturbed": _number(truth.get(campaign.steps)),
        "ettr": round(1 - lost / played["seconds"], 3), "seconds_lost": lost,
        "ceiling": round(len(final) / max(1, len(log)), 3),
    }  # fmt: skip


def _content(one: Step) -> tuple[str, str, str]:
    return one.loss, one.rate, one.digest


def _number(one: Step | None) -> float | None:
    return None if one is None else float.fromhex(one.loss)


def _outcome(campaign: Campaign, fault: Fault, when: float | None, stop: dict[str, Any] | None) -> str:
    if when is None:
        return "did not strike"
    if stop is None:
        return "survived"
    said = RIGHT_STOPS.get(fault.kind)
    if not campaign.bare and stop["end"] == "ended" and said is not None and said in stop["said"]:
        return "stopped rightly"
    return "stood still" if stop["end"] == "stands" else "ended"


def _lost(log: Sequence[Step], when: float | None) -> dict[str, Any]:
    """Seconds from the fault to the first step beyond the furthest one before it, and the steps that were done again."""
    if when is None:
        return {"seconds": 0.0, "again": 0}
    furthest = max((one.step for one in log if one.time <= when + 0.5), default=0)
    later = [one for one in log if one.time > when + 0.5]
    beyond = next((place for place, one in enumerate(later) if one.step > furthest), None)
    if beyond is None:
        return {"seconds": 0.0, "again": 0}
    usual = (log[-1].time - log[-2].time) if len(log) > 1 else 0.0
    return {"seconds": round(max(0.0, later[beyond].time - when - usual), 1), "again": beyond}


PHASES = ("until the end", "chronicle", "start", "again")


def _phases(launches: Sequence[tuple[str, float, float]], log: Sequence[Step], when: float | None) -> list[float] | None:
    """Seconds from the fault to the recorded end, to the next launch, to its first step, to the furthest step before.

    None where the fault ended no launch, or more than one until a step was done.
    """
    place = next((at for at, (_, _, end) in enumerate(launches) if when is not None and end >= when), None)
    if when is None or place is None or place + 1 == len(launches) or launches[place][1] > when:
        return None
    end, (name, begin, _) = launches[place][2], launches[place + 1]
    mine = [one for one in log if one.start == name]
    furthest = max((one.step for one in log if one.time <= when + 0.5), default=0)
    beyond = next((one.time for one in mine if one.step > furthest), None)
    return None if beyond is None else [end - when, begin - end, mine[0].time - begin, beyond - mine[0].time]


def at_interval(rows: Sequence[dict[str, Any]], save_seconds: float, saves: float = 3.0) -> tuple[float, float]:
    """ETTR with a fault every so many saves, which are so far apart, and the highest possible. Computed from measured means."""
    known = [row for row in rows if row["struck"] is not None and (row["phases"] or row["kind"] == "slow_rank")]
    fixed = sum(sum(row["phases"][:3]) for row in known if row["phases"]) / len(known)
    again = sum(row["again"] for row in known) / len(known) / SAVE_EVERY  # of the distance between two saves
    work = saves * save_seconds
    return work / (work + again * save_seconds + fixed), saves / (saves + again)


def show_phases(rows: Sequence[dict[str, Any]]) -> None:
    """Where the seconds of a fault go, by kind, and what they come to where saves are farther apart."""
    rows = [row for row in rows if row["struck"] is not None]
    print(f"{'seconds':<16}{'faults':>7}" + "".join(f"{name:>15}" for name in PHASES))
    for kind in (*KINDS, "all"):
        mine = [row["phases"] for row in rows if row["phases"] and kind in (row["kind"], "all")]
        if mine:
            means = [sum(one[place] for one in mine) / len(mine) for place in range(len(PHASES))]
            print(f"{kind:<16}{len(mine):>7}" + "".join(f"{mean:>15.1f}" for mean in means))
    if any(row["phases"] for row in rows):
        apart = (("1 min", 60), ("10 min", 600), ("30 min", 1800))
        computed = ((words, at_interval(rows, seconds)) for words, seconds in apart)
        print("computed, a fault every 3 saves: " + "; ".join(f"a save every {words}: ETTR {ettr:.3f} (restarts that cost "
              f"nothing: {ceiling:.3f})" for words, (ettr, ceiling) in computed))  # fmt: skip


def show(name: str, found: dict[str, Any]) -> None:
    """One table."""
    print(
        f"\n{name}: {found['faults']} faults; "
        + ", ".join(f"{count} {what}" for what, count in found["outcomes"].items())
    )
    print(
        f"{'kind':<16}{'faults':>7}{'survived':>10}{'stopped rightly':>17}{'ended':>7}{'stood':>7}"
        f"{'again/fault':>13}{'s/fault':>9}"
    )
    for kind in KINDS:
        rows = [row for row in found["rows"] if row["kind"] == kind and row["struck"]]
        if not rows:
            continue
        counts = Counter(row["outcome"] for row in rows)
        print(f"{kind:<16}{len(rows):>7}{counts['survived']:>10}{counts['stopped rightly']:>17}{counts['ended']:>7}"
              f"{counts['stood still']:>7}{sum(row['again'] for row in rows) / len(rows):>13.1f}"
              f"{sum(row['seconds'] for row in rows) / len(rows):>9.1f}")  # fmt: skip
    print(f"steps {found['steps']}, done again {found['steps_lost']}; "
          f"differ from the undisturbed run {found['steps_that_differ']} "
          f"(samples {found['digests_differ']}), missing {found['missing']}; final loss {found['final_loss']} "
          f"(undisturbed {found['final_loss_undisturbed']})")  # fmt: skip
    print(f"{found['seconds']:.0f} s, lost to faults {found['seconds_lost']:.0f} s, ETTR {found['ettr']:.3f} (were only "
          f"steps lost: {found['ceiling']:.3f}); started by a person {found['starts_by_a_person']} times")  # fmt: skip
    if found["starts_by_a_person"]:
        for row in found["rows"]:
            if row["person"]:
                print(
                    f"  fault {row['number']} {row['kind']} at {row['step']}: {row['outcome']}; "
                    f"{row['person']}; said: {row['said'][-300:]}"
                )


def restarts_of(directory: Path) -> list[dict[str, Any]]:
    """What chronicle decided after each launch."""
    entries = read_journal(RunPaths(directory / "logs" / "chaos")).entries
    return [{"launch": entry.launch, "cause": event.cause, "decision": event.decision, "reason": event.reason}
            for entry, event in events_of(entries, Restarted)]  # fmt: skip


def launches_of(directory: Path) -> list[tuple[str, float, float]]:
    """Number, begin and end of each launch, by the journal."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for entry in read_journal(RunPaths(directory / "logs" / "chaos")).entries:
        for kind, times in ((EntryKind.LAUNCH_START, begins), (EntryKind.LAUNCH_END, ends)):
            if entry.kind == kind and entry.launch is not None:
                times[entry.launch] = datetime.fromisoformat(entry.ts).timestamp()
    return [(str(number), begins[number], ends[number]) for number in sorted(begins) if number in ends]


def causes_of(directory: Path) -> list[str]:
    """Causes of all ends, in the order of the journal."""
    entries = read_journal(RunPaths(directory / "logs" / "chaos")).entries
    return [
        f"{entry.data.get('cause')}: {entry.data.get('because')}"
        for entry in entries
        if entry.kind == EntryKind.LAUNCH_END
    ]


def main() -> int:
    """Play what is asked for, print the tables, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gap", type=int, nargs=2, default=(40, 80), help="steps between faults, from and to")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each disturbed step sleeps")
    parser.add_argument("--only", action="append", default=[], choices=KINDS)
    parser.add_argument("--out", type=Path, default=Path("chaos.json"))
    parser.add_argument("--no-bare", action="store_true", help="without the comparison")
    parser.add_argument("--keep", type=Path, help="directory that keeps all files")
    arguments = parser.parse_args()
    kinds = tuple(arguments.only) or KINDS
    if "disk_full" in kinds and not can_mount():
        print("no disk can be made full here (mounting a tmpfs is not allowed): that kind is left out")
        kinds = tuple(kind for kind in kinds if kind != "disk_full")
    faults = draw(arguments.faults, arguments.seed, SAVE_EVERY, tuple(arguments.gap), kinds)
    steps = faults[-1].step + 2 * SAVE_EVERY + (150 if faults[-1].kind == "slow_rank" else 0)
    result: dict[str, Any] = {"seed": arguments.seed, "steps": steps, "save_every": SAVE_EVERY, "kinds": kinds}
    where = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        reference = play_and_judge(Campaign(where / "undisturbed", (), steps), "undisturbed", (), result)
        ways = [("chronicle", False)] + ([] if arguments.no_bare else [("bare", True)])
        for name, bare in ways:
            play_and_judge(Campaign(where / name, faults, steps, bare=bare, pace=arguments.pace), name, reference, result)
            arguments.out.write_text(json.dumps(result, indent=1))
    finally:
        if arguments.keep is None:
            shutil.rmtree(where, ignore_errors=True)
    return 0


def play_and_judge(campaign: Campaign, name: str, reference: Sequence[Step], result: dict[str, Any]) -> Sequence[Step]:
    """Play a campaign to its end, show what came of it beside `reference`, and leave nothing; the steps that were done."""
    try:
        played = campaign.play()
        log = campaign.log()
        found = judge(campaign, played, reference or log)
        if not campaign.bare:
            found |= {"restarts": restarts_of(campaign.directory), "causes": causes_of(campaign.directory)}
        result[name] = found
        if campaign.faults:
            show(name, found)
            show_phases(found["rows"])
        else:
            print(f"undisturbed: {campaign.steps} steps in {played['seconds']:.0f} s")
        return log
    finally:
        campaign.close()


if __name__ == "__main__":
    sys.exit(main())
