"""Replay the 80B run of 2023 with `chronicle`: its launches, rollbacks, LR factors, Xids, and the `.orig` accident.

    python examples/tr190/replay.py [DIRECTORY]

Every event is a real command on real, tiny checkpoints. Steps, targets and factors are those that the authors of the run
published (huggingface/m4-logs, tr-190-80b/chronicles.md); the last step of each abandoned launch is read off their plots.
At exp8 and exp9 the guard refuses the resume before its first step, which the authors did not have. Then the guard is
switched off, and the accident happens as it did in 2023.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
REFUSED, DO_NOT_REQUEUE, CANNOT_START = 3, 78, 125


@dataclass(frozen=True)
class Given:
    """A launch that was abandoned at step `last`; its data are noise from step `poison` on."""

    last: int
    poison: int | None = None
    also_save: tuple[int, ...] = ()


class Replay:
    """The replay in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = keep | {"PATH": path, "OMP_NUM_THREADS": "1", "CHRONICLE_RUN": "tr-190"}
        self.here = 0

    def play(self) -> None:
        """Replay all nineteen entries in their order."""
        self.command("chronicle init --run tr-190 --logs logs --checkpoints checkpoints")
        self.note("Log lines arrive 10-20 min late", "chronicle run sets PYTHONUNBUFFERED", tag="infra")
        self.train(Given(last=2500, also_save=(1496,)))
        self.note("Small loss spike on every resume", suspect="data: image2text ratio low on resume")
        self.rollback(1496)
        self.train(Given(last=15900, poison=15650, also_save=(15611,)))
        hope = "if it was hardware, it will not return"
        self.note("exp1: series of spikes into divergence", suspect="hardware: Xid 64 on a node", expect=hope)
        self.rollback(15611)
        self.train(Given(last=15800, poison=15640))
        self.rollback(14500, "--lr-scale 0.75")
        self.train(Given(last=16500, poison=16420))
        self.note("Xid 64 on ip-26-0-147-135: the bad node was not removed from the pool", tag="hardware", step=16430)
        self.rollback(16250)
        self.train(Given(last=16700, poison=16400))
        self.rollback(16250, "--lr-scale 0.5")
        self.train(Given(last=20685, also_save=(20685,)))
        self.note("Xid 64 again: restarted 45 minutes later, no rollback", tag="hardware", step=20685)
        self.train(Given(last=23500, poison=23330))
        self.note("exp6: the restart reshuffles the data", "It improves after 8k flat steps. Same data again?")
        self.rollback(23250)
        self.train(Given(last=25600, poison=25260))
        self.note("exp7: 3 h of divergence", "A spike that comes at once recovers; one that creeps does not.")
        self.rollback(25000)
        self.train(Given(last=29700, poison=29450))
        self.exp8_and_exp9()
        self.exp10()
        self.train(Given(last=35500, poison=35250))
        self.rollback(34000, "--lr-scale 0.5")
        self.train(Given(last=39036, also_save=(39036,)))
        self.note("Training stopped: not much progress", step=39036)
        self.close_incidents()
        self.command("chronicle log --graph")
        self.command("chronicle status")
        self.command("chronicle report --markdown")
        if shutil.which("chronicle", path=self.environment["PATH"]):
            self.command("chronicle report", ok=(0, 1))

    def exp8_and_exp9(self) -> None:
        """The LR is doubled, a backup lies beside the state, and the LR restarts from zero unnoticed. This happened twice."""
        self.rollback(29000, "--lr-scale 2")
        stray = self.checkpoints / "opt_step-29000" / "accelerator_state" / "custom_checkpoint_0.pkl.orig"
        shutil.copy(stray.with_suffix(""), stray)
        self.command("chronicle rollback --to 29000 --yes", ok=(REFUSED,))
        self.train(Given(last=29100), forget=True, ok=(CANNOT_START, DO_NOT_REQUEUE), resume=29000)
        stray.unlink()
        self.train(Given(last=29100), forget=True, ok=(DO_NOT_REQUEUE,), resume=29000)
        self.note("exp8: the guard refused; the guard is switched off to see what would have happened", tag="replay")
        self.train(Given(last=30700, poison=30600), forget=True, guard="off", resume=29000)
        self.rollback(30250)
        self.train(Given(last=30900, poison=30700), forget=True, ok=(DO_NOT_REQUEUE,), resume=30250)
        self.train(Given(last=30900, poison=30700), forget=True, guard="off", resume=30250)
        self.note("exp10: only now it was noticed that both last restarts had the LR issue", tag="replay")

    def exp10(self) -> None:
        """The edit that the authors made by hand, as one command, on exp8's step 30500, which exp9's rollback had abandoned."""
        self.command("chronicle rollback --to 30500 --dry-run")  # a note names the abandoned one
        (aside,) = self.directory.glob("abandoned/*/opt_step-30500")
        fields = "--set base_lrs=1.875e-05 --set last_epoch=30500 --set _step_count=30501 --set _last_lr=1.7677e-05"
        fields += " --set lr=1.7677e-05 --set initial_lr=1.875e-05"
        self.command(f"chronicle rollback --to 30500@{aside.parent.name} {fields} --yes")
        for incident in self.status()["open_incidents"]:
            if "logged learning rate" in json.dumps(incident):  # until it is answered, no LR edit is taken as proved
                why = "both restarts had lost their scheduler; its fields are set by hand now"
                self.command(f"chronicle note --close {incident['id']} '{why}' --outcome worked")
        self.here = 30500

    def train(
        self,
        given: Given,
        *,
        forget: bool = False,
        guard: str = "on",
        ok: tuple[int, ...] = (0,),
        resume: int | None = None,
    ) -> None:
        """One launch through `chronicle run`; resumes where the last command left the run."""
        words = [str(BIN / "python"), str(HERE / "trainer.py"), "--to", str(given.last)]
        start = self.here if resume is None else resume
        if start:
            words += ["--resume", str(start)]
        if given.poison is not None:
            words += ["--poison", str(given.poison)]
        if given.also_save:
            words += ["--also-save", *map(str, given.also_save)]
        if forget:
            words.append("--forget")
        self.command(f"chronicle run -- {shlex.join(words)}", ok=ok, environment={"CHRONICLE_GUARD": guard})
        if 0 in ok:
            self.here = given.last

    def rollback(self, step: int, how: str = "") -> None:
        self.command(f"chronicle rollback --to {step} {how} --yes".replace("  ", " "))
        self.here = step

    def note(
        self, title: str, text: str = "", *, suspect: str = "", expect: str = "", tag: str = "", step: int | None = None
    ) -> None:
        words = ["chronicle", "note", f"{title}\n{text}".strip()]
        for name, value in (("--suspect", suspect), ("--expect", expect), ("--tag", tag), ("--step", step)):
            if value:
                words += [name, str(value)]
        self.command(shlex.join(words))

    def close_incidents(self) -> None:
        """Check that no incident is open: a rollback answered each of them."""
        status = self.status()
        for incident in status["open_incidents"]:
            self.command(f"chronicle note --close {incident['id']} 'rolled back' --outcome partly")
        for rollback in status["open_outcomes"]:
            self.command(f"chronicle note --close {rollback} 'the next one came' --outcome partly")

    def status(self) -> dict[str, Any]:
        """What `chronicle status --json` says now."""
        words = ["chronicle", "status", "--json"]
        done = subprocess.run(words, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def command(self, text: str, *, ok: tuple[int, ...] = (0,), environment: dict[str, str] | None = None) -> None:
        """Run and show one command line; end the replay when its exit code is not the expected one."""
        print(f"\n$ {text}", flush=True)
        environ = self.environment | (environment or {})
        done = subprocess.run(
            shlex.split(text), cwd=self.directory, env=environ, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode not in ok:
            raise SystemExit(f"`{text}` ended with code {done.returncode}, the story says {ok}")


def main() -> None:
    """Replay into a directory that does not exist yet."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "tr190-replay").resolve()
    if directory.exists():
        raise SystemExit(f"`{directory}` is there already: name another directory")
    (directory / "checkpoints").mkdir(parents=True)
    Replay(directory).play()


if __name__ == "__main__":
    main()
