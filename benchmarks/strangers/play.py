"""Play one script: a fresh launch, then three times kill and resume, each in a process of its own.

What a cycle came to is read from the journal, never guessed from the output: the verdict of that launch, whether it was
verified, and the faults of the guard itself.
"""

import contextlib
import re
import shutil
import signal
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.strangers.offline.assets import write_bert, write_chats, write_llama
from benchmarks.strangers.originals import ORIGINALS, Original
from benchmarks.strangers.stage import launch
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths

__all__ = ["Cycle", "Outcome", "Script", "list_scripts", "play"]

HERE = Path(__file__).parent
RUN = "strangers"
SECONDS = 240
KILLED = (137, -signal.SIGKILL)
# optimizer steps of each launch before it is killed, where the default does not reach a save
KILLS = {
    "gan-alternating": (40, 37, 25),
    "vae-schedulefree": (10, 9, 12),
    "word-lm-anneal": (12, 11, 10),
    "timm-like": (9, 8, 13),
    "skorch": (11, 10, 9),
    "compile-accumulate": (8, 7, 9),
    "scaler-accumulate": (6, 7, 5),
    "lbfgs": (7, 5, 4),
    "muon-adamw": (16, 14, 18),  # two optimizers: two steps counted
    "stream-accelerate": (7, 6, 8),
}
# What `chronicle run` does for a script without a line: its start-up file, or the library's own entry point.
NO_LINE = {"trl-sft": "startup", "trl-dpo": "startup", "fabric-own-trainer": "fabric"}
HF = ("torch._dynamo", "transformers.trainer", "accelerate", "datasets", "chronicle.resume.transformers")
ACCELERATE = ("torch._dynamo", "accelerate", "datasets", "evaluate", "transformers", "chronicle.resume.adapters")
DIFFUSERS = (
    *ACCELERATE,
    *("transformers.image_utils", "diffusers.training_utils", "transformers.models.clip.modeling_clip", "tensorboard"),
)
LIGHTNING = ("torch._dynamo", "lightning.pytorch", "chronicle.resume.lightning")
IMPORTS = {
    "accelerate-checkpointing": (*ACCELERATE, "transformers.models.bert.modeling_bert"),
    "accelerate-complete-nlp": (*ACCELERATE, "transformers.models.bert.modeling_bert"),
    "diffusers-text-to-image": DIFFUSERS,
    "diffusers-unconditional": DIFFUSERS,
    "trl-sft": (*HF, "trl.trainer.sft_trainer"),
    "trl-dpo": (*HF, "trl.trainer.dpo_trainer"),
    "lightning-gan": LIGHTNING,
    "fabric-own-trainer": LIGHTNING,
    "fsdp2": ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    "deepspeed-zero2": ("torch._dynamo", "deepspeed", "chronicle.resume.adapters.deepspeed"),
    "hf-compute-loss": HF,
    "hf-adafactor": HF,
    "peft-lora": (*HF, "peft"),
    "stream-accelerate": ACCELERATE,
    "sentence-transformers": (*HF, "sentence_transformers"),
}
# by the word that a script of a lot imports: the part that takes long
LIBRARIES = {
    "transformers": "transformers.trainer",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "datasets": "datasets",
    "diffusers": "diffusers",
    "peft": "peft",
    "trl": "trl.trainer.sft_trainer",
    "lightning": "lightning.pytorch",
    "torch.distributed": "torch.distributed.checkpoint.state_dict",
    "torchdata": "torchdata.stateful_dataloader",
    "timm": "timm",
    "torchvision": "torchvision",
    "fastai": "fastai.vision.all",
    "sentence_transformers": "sentence_transformers",
    "monai": "monai.engines",
    "open_clip": "open_clip",
    "lightly": "lightly.models.modules",
    "segmentation_models_pytorch": "segmentation_models_pytorch",
    "torch_geometric": "torch_geometric.nn",
    "pytorch_forecasting": "pytorch_forecasting",
    "denoising_diffusion_pytorch": "denoising_diffusion_pytorch",
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
NEEDS_BERT = ("sentence-transformers", "cross-encoder", "hf-stream-mlm", "hf-thaw-callback")
USUAL_KILLS = (8, 7, 9)
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
    """One row of `list.toml`."""

    name: str
    kind: str
    source: str = ""
    guard: str = ""
    offline: str = ""
    version: str = ""
    pattern: str = ""
    lot: str = ""  # of which lot; empty: the frozen list
    kills: Sequence[int] = ()
    entry: str = ""


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
        original = _original(self.script)
        words = original.words(self.folder) if original else []
        modules = ("chronicle.resume", *_imports(self.script))
        entry = (self.script.entry or NO_LINE.get(self.script.name, "")) if self.guarded else ""
        code = launch(self.folder, kill_after, words, self._environment(), SECONDS, modules, entry)
        if code is None:
            return Cycle(outcome=Outcome.BROKEN, detail=f"no end within {SECONDS} s")
        return self._judge(code, kill_after, output.read_bytes()[before:].decode(errors="replace"))

    def _environment(self) -> dict[str, str]:
        original = _original(self.script)
        return {
            **OFFLINE,
            **(original.environment if original else {}),
            "HF_HOME": str(self.folder / "hub"),
            "CHRONICLE_RUN_DIR": str(self.folder / "logs" / RUN),
            # torchvision, after the libraries that would look for the real one
            **({"STRANGERS_PATH": str(HERE / "offline")} if original and original.pictures else {}),
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


def list_scripts(lot: str = "") -> tuple[Script, ...]:
    """The frozen list, or one of the lots that were frozen later, in its order."""
    path = HERE / "lots" / f"{lot}.toml" if lot else HERE / "list.toml"
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["script"]
    return tuple(Script(**row, lot=lot) for row in rows)


def play(script: Script, folder: Path, *, clones: Path | None, guarded: bool = True) -> Sequence[Cycle]:
    """The fresh launch and three resumes in `folder`; empty where the original is not on this machine.

    A fresh launch that goes wrong is returned alone: nothing was resumed then.
    """
    original = _original(script)
    with (folder / "prepare.txt").open("w") as file, contextlib.redirect_stderr(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if original is None:
            _copy_rebuilt(script, folder)
        elif not original.write(folder, clones):
            return ()
    kills = original.kills if original else script.kills or KILLS.get(script.name, USUAL_KILLS)
    launches = Launches(script=script, folder=folder, guarded=guarded)
    fresh = launches.run(kills[0])
    if fresh.outcome in (Outcome.BROKEN, Outcome.FALSE_REFUSAL):
        return (fresh,)
    return tuple(launches.run(kill) for kill in (kills[1], kills[2], 0))


def _original(script: Script) -> Original | None:
    return None if script.lot else ORIGINALS.get(script.name)


def _imports(script: Script) -> tuple[str, ...]:
    """What the parent imports: the libraries of the script, so that a launch does not wait for them."""
    if not script.lot:
        return IMPORTS.get(script.name, ("torch._dynamo",))
    text = (HERE / "lots" / script.lot / _file(script.name)).read_text(encoding="utf-8")
    used = (module for word, module in LIBRARIES.items() if re.search(rf"^(import|from) {word}\b", text, re.MULTILINE))
    return ("torch._dynamo", *used)


def _file(name: str) -> str:
    return f"{name.replace('-', '_')}.py"


def _copy_rebuilt(script: Script, folder: Path) -> None:
    shutil.copy((HERE / "lots" / script.lot if script.lot else HERE / "rebuilt") / _file(script.name), folder / "train.py")
    if script.lot and script.name.startswith("trl-"):
        write_llama(folder)
        write_chats(folder)
    if script.name in NEEDS_BERT:
        write_bert(folder)
