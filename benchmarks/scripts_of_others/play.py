"""Play one script: a fresh launch, then three times kill and resume, each in a process of its own.

What a cycle came to is read from the journal, never guessed from the output: the verdict of that launch, whether it was
verified, and the faults of the guard itself.
"""

import re
import shutil
import signal
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.scripts_of_others.stage import launch
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths

__all__ = ["Cycle", "Outcome", "Script", "list_scripts", "play"]

HERE = Path(__file__).parent
RUN = "strangers"  # the name of the run in the scripts
SECONDS = 240
KILLED = (137, -signal.SIGKILL)
# by the word that a script imports: the part that takes long
LIBRARIES = {
    "transformers": "transformers.trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "lightning.pytorch",
    "torch.distributed": "torch.distributed.checkpoint.state_dict",
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "CHRONICLE_MLFLOW_URI": "off",
}
# A sentence for a person names no Python type and prints no object; one line of the guard is one thought.
UNREADABLE = re.compile(r"Traceback|unexpected|\b[A-Z]\w+(Error|Exception)\b|<[\w.]+ object at 0x|NoneType|dict_keys|JSON")


class Outcome(StrEnum):
    """What a resume came to. Only `FALSE_REFUSAL` is counted against the goal; the others are printed."""

    VERIFIED = "verified"
    UNVERIFIED = "not verified"
    WARNED = "warned"
    FALSE_REFUSAL = "FALSE REFUSAL"
    UNGUARDED = "no verdict"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One row of `scripts.toml`."""

    name: str
    shows: str
    kills: Sequence[int]
    entry: str = ""

    @property
    def path(self) -> Path:
        """The script itself."""
        return HERE / "scripts" / f"{self.name.replace('-', '_')}.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One launch that resumes after a kill."""

    outcome: Outcome
    said: tuple[str, ...] = ()  # lines of the guard on stderr
    faults: int = 0  # recorded errors of the guard itself
    detail: str = ""

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Lines that a person cannot act on."""
        return tuple(line for line in self.said if UNREADABLE.search(line) or len(line) > 400)


@dataclass(slots=True)
class Launches:
    """The launches of one script in its folder."""

    script: Script
    folder: Path
    guarded: bool = True
    seen: int = 0  # entries of the journal before the next launch
    resumes: bool = False  # whether there was a launch before, so that the next one has something to load

    def run(self, kill_after: int) -> Cycle:
        """One launch; the process must end by the kill, or well when it is let run."""
        output = self.folder / "output.txt"
        before = output.stat().st_size if output.exists() else 0
        entry = self.script.entry if self.guarded else ""
        modules = ("chronicle.resume", *_imports(self.script))
        code = launch(self.folder, kill_after, self._environment(), SECONDS, modules, entry)
        if code is None:
            return Cycle(outcome=Outcome.BROKEN, detail=f"no end within {SECONDS} s")
        return self._judge(code, kill_after, output.read_bytes()[before:].decode(errors="replace"))

    def _environment(self) -> dict[str, str]:
        return {
            **OFFLINE,
            "HF_HOME": str(self.folder / "hub"),
            "CHRONICLE_RUN_DIR": str(self.folder / "logs" / RUN),
            **({} if self.guarded else {"CHRONICLE_GUARD": "off"}),
        }

    def _judge(self, code: int, kill_after: int, text: str) -> Cycle:
        entries = read_journal(RunPaths(self.folder / "logs" / RUN)).entries
        new, self.seen = entries[self.seen :], len(entries)
        faults = sum(entry.kind == "guard.fault" for entry in new)
        said = tuple(line for line in text.splitlines() if line.startswith(("chronicle guard", "chronicle:")))
        verdicts = [entry.data for entry in new if entry.kind == "guard.verdict"]
        refused = [data for data in verdicts if data.get("verdict") == "refused"]
        if refused:
            checks = [check for check in refused[-1].get("checks", ()) if check.get("ok") is False or "ok" not in check]
            detail = "; ".join(f"{c.get('code')} {c.get('name')}: {c.get('expected')} / {c.get('found')}" for c in checks[:3])
            return Cycle(outcome=Outcome.FALSE_REFUSAL, said=said, faults=faults, detail=detail or text[-300:])
        if (code not in KILLED) if kill_after else code != 0:
            lines = [line for line in text.strip().splitlines() if line.strip()]
            detail = "finished before it was killed" if code == 0 else f"exit {code}: " + " | ".join(lines[-3:])
            return Cycle(outcome=Outcome.BROKEN, said=said, faults=faults, detail=detail)
        if not verdicts:
            return Cycle(outcome=Outcome.UNGUARDED, said=said, faults=faults)
        told = any(one.get("name") == "resume" for one in verdicts[-1].get("noted") or ())  # a further training began
        if self.resumes and verdicts[-1].get("basis") == "fresh" and not told:
            return Cycle(outcome=Outcome.BROKEN, said=said, faults=faults, detail="nothing was loaded: it did not resume")
        self.resumes = True
        outcome = Outcome.WARNED if verdicts[-1].get("verdict") == "warned" else Outcome.UNVERIFIED
        if verdicts[-1].get("verified") and outcome is Outcome.UNVERIFIED:
            outcome = Outcome.VERIFIED
        return Cycle(outcome=outcome, said=said, faults=faults, detail=str(verdicts[-1].get("basis", "")))


def list_scripts() -> tuple[Script, ...]:
    """All of them, in the order of the table."""
    rows = tomllib.loads((HERE / "scripts.toml").read_text(encoding="utf-8"))["script"]
    return tuple(Script(**row) for row in rows)


def play(script: Script, folder: Path, *, guarded: bool = True) -> Sequence[Cycle]:
    """The fresh launch and three resumes in `folder`.

    A fresh launch that goes wrong is returned alone: nothing was resumed then.
    """
    shutil.copy(script.path, folder / "train.py")
    launches = Launches(script=script, folder=folder, guarded=guarded)
    fresh = launches.run(script.kills[0])
    if fresh.outcome in (Outcome.BROKEN, Outcome.FALSE_REFUSAL):
        return (fresh,)
    return tuple(launches.run(kill) for kill in (script.kills[1], script.kills[2], 0))


def _imports(script: Script) -> tuple[str, ...]:
    """What the parent imports: the libraries of the script, so that a launch does not wait for them."""
    text = script.path.read_text(encoding="utf-8")
    used = (module for word, module in LIBRARIES.items() if re.search(rf"^(import|from) {word}\b", text, re.MULTILINE))
    return ("torch._dynamo", *used)
