"""How each original of the list is found, made offline and resumed: the fewest edits, each of them written here.

`file` is looked for below the folder of clones (`<owner>+<repository>/…`) or in the installed package (`trl/…`). An edit
replaces the first match of a pattern; an edit that matches nothing is an error, because the original has changed.
"""

import importlib.util
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from benchmarks.strangers.offline import assets

__all__ = ["ATTACH", "GUARD", "ORIGINALS", "Original", "glue"]

OFFLINE = Path(__file__).parent / "offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """One original: what a launch is given, and what is edited in it."""

    file: str
    prepare: Callable[[Path], None] = lambda folder: None
    edits: Sequence[tuple[str, str]] = ()
    arguments: Sequence[str] = ()
    resume: Sequence[str] = ()  # `{newest}` is the newest path of `checkpoints`
    checkpoints: str = ""
    kills: tuple[int, int, int] = (8, 7, 9)
    environment: dict[str, str] = field(default_factory=dict)
    pictures: bool = False  # needs our torchvision

    def write(self, folder: Path, clones: Path | None) -> bool:
        """Copy the script and its neighbours to `folder`, edited; False where the original is not on this machine."""
        source = self._find(clones)
        if source is None:
            return False
        for neighbour in source.parent.glob("*.py"):
            if neighbour.name not in ("__init__.py", "setup.py"):
                shutil.copy(neighbour, folder)
        text = source.read_text(encoding="utf-8")
        for pattern, replacement in self.edits:
            text, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
            if not count:
                raise ValueError(f"`{source}` has changed: nothing matches {pattern!r}")
        (folder / "train.py").write_text(text, encoding="utf-8")
        self.prepare(folder)
        return True

    def _find(self, clones: Path | None) -> Path | None:
        package, _, rest = self.file.partition("/")
        if "+" not in package:
            spec = importlib.util.find_spec(package)
            return Path(str(spec.origin)).parent / rest if spec and spec.origin else None
        path = clones / self.file if clones else None
        return path if path and path.exists() else None

    def words(self, folder: Path) -> list[str]:
        """The arguments of the next launch."""
        found = sorted(folder.glob(self.checkpoints), key=lambda path: path.stat().st_mtime) if self.checkpoints else []
        more = [word.replace("{newest}", str(found[-1])) for word in self.resume] if found else []
        return [*self.arguments, *more]


def glue(folder: Path) -> None:
    assets.write_bert(folder)
    assets.write_glue(folder)


def diffusion(folder: Path) -> None:
    assets.write_pipeline(folder)
    assets.write_pictures(folder, captions=True)


def tokens(folder: Path) -> None:
    (folder / "data" / "random").mkdir(parents=True)
    for name in ("train", "val"):
        numpy.random.default_rng(0).integers(0, 64, 4000).astype("uint16").tofile(folder / f"data/random/{name}.bin")


def chats(folder: Path) -> None:
    assets.write_llama(folder)
    assets.write_chats(folder)


def preferences(folder: Path) -> None:
    assets.write_llama(folder)
    assets.write_chats(folder, preferences=True)


def old_annotation(folder: Path) -> None:
    """A name of Lightning that is only an annotation and is gone in 2.6."""
    path = folder / "trainer.py"
    path.write_text(path.read_text().replace("L.fabric.utilities.types.LRScheduler", "torch.optim.lr_scheduler.LRScheduler"))


GUARD = "import chronicle; chronicle.guard(accelerator, run_dir='strangers')"
ATTACH = "import chronicle; chronicle.attach('strangers', model, optimizer"
NO_VERSION = (r"^check_min_version\(.*\)$", "")
TRL = (
    *("--model_name_or_path", "tiny-llama", "--dataset_name", "chats", "--output_dir", "out", "--max_steps", "30"),
    *("--save_steps", "3", "--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu", "--bf16", "false"),
    *("--gradient_checkpointing", "false", "--disable_tqdm", "true"),
)
DIFFUSION = (
    *("--pretrained_model_name_or_path", "tiny-diffusion", "--train_data_dir", "pictures", "--resolution", "32"),
    *("--output_dir", "out", "--max_train_steps", "30", "--checkpointing_steps", "3", "--train_batch_size", "2"),
    *("--gradient_accumulation_steps", "2", "--use_ema", "--seed", "1", "--lr_scheduler", "cosine"),
)
PICTURES = (
    *("--train_data_dir", "pictures", "--resolution", "64", "--output_dir", "out", "--train_batch_size", "4"),
    *("--num_epochs", "8", "--checkpointing_steps", "3", "--use_ema", "--ddpm_num_steps", "10", "--lr_warmup_steps", "4"),
    *("--save_images_epochs", "100", "--save_model_epochs", "100", "--ddpm_num_inference_steps", "2"),
    *("--dataloader_num_workers", "0"),
)
NANOGPT = (
    *("--dataset=random", "--device=cpu", "--compile=False", "--dtype=float32", "--n_layer=2", "--n_head=2", "--n_embd=16"),
    *("--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2", "--eval_interval=4", "--eval_iters=2"),
    *("--max_iters=36", "--lr_decay_iters=36", "--warmup_iters=6", "--dropout=0.1"),
)
SMALL_UNET = (
    r"block_out_channels=\(128, 128, 256, 256, 512, 512\)",
    "block_out_channels=(4, 4, 4, 4, 4, 4), norm_num_groups=2, attention_head_dim=2",
)

ORIGINALS = {
    "accelerate-checkpointing": Original(
        file="huggingface+accelerate/examples/by_feature/checkpointing.py",
        prepare=glue,
        edits=((r"^( +)(accelerator = Accelerator\(cpu=.*\))$", rf"\1\2\n\1{GUARD}"),),
        arguments=("--cpu", "--checkpointing_steps", "3", "--output_dir", "ck"),
        resume=("--resume_from_checkpoint", "{newest}"),
        checkpoints="ck/step_*",
        kills=(8, 7, 6),
    ),
    "accelerate-complete-nlp": Original(
        file="huggingface+accelerate/examples/complete_nlp_example.py",
        prepare=glue,
        edits=((r"^( +)(if hasattr\(args.checkpointing_steps)", rf"\1{GUARD}\n\1\2"),),
        arguments=("--cpu", "--checkpointing_steps", "epoch", "--output_dir", "ck"),
        resume=("--resume_from_checkpoint", "{newest}"),
        checkpoints="ck/epoch_*",
        kills=(13, 12, 5),
    ),
    "diffusers-text-to-image": Original(
        file="huggingface+diffusers/examples/text_to_image/train_text_to_image.py",
        prepare=diffusion,
        edits=(NO_VERSION, (r"^( +)(accelerator = Accelerator\((?:.|\n)*?\n +\))$", rf"\1\2\n\1{GUARD}")),
        arguments=DIFFUSION,
        resume=("--resume_from_checkpoint", "latest"),
        checkpoints="out/checkpoint-*",
        pictures=True,
    ),
    "diffusers-unconditional": Original(
        file="huggingface+diffusers/examples/unconditional_image_generation/train_unconditional.py",
        prepare=lambda folder: assets.write_pictures(folder, captions=False),
        edits=(NO_VERSION, SMALL_UNET, (r"^( +)(accelerator = Accelerator\((?:.|\n)*?\n +\))$", rf"\1\2\n\1{GUARD}")),
        arguments=PICTURES,
        resume=("--resume_from_checkpoint", "latest"),
        checkpoints="out/checkpoint-*",
        pictures=True,
    ),
    "nanogpt": Original(
        file="karpathy+nanoGPT/train.py",
        prepare=tokens,
        edits=((r"^if init_from == 'resume':\n    optimizer", rf"{ATTACH})\nif init_from == 'resume':\n    optimizer"),),
        arguments=NANOGPT,
        resume=("--init_from=resume",),
        checkpoints="out/ckpt.pt",
        kills=(10, 7, 9),
    ),
    "imagenet": Original(
        file="pytorch+examples/imagenet/main.py",
        edits=((r"^( +)(scheduler = StepLR\(.*\))$", rf"\1\2\n\1{ATTACH}, scheduler)"),),
        arguments=("--dummy", "-b", "8", "-j", "0", "--epochs", "5", "--no-accel", "-p", "100"),
        resume=("--resume", "checkpoint.pth.tar"),
        checkpoints="checkpoint.pth.tar",
        kills=(11, 13, 10),
        pictures=True,
    ),
    "ignite-save-resume": Original(
        file="pytorch+ignite/examples/mnist/mnist_save_resume_engine.py",
        edits=(
            (r"^( +)(lr_scheduler = StepLR\(.*\))$", rf"\1\2\n\1{ATTACH}, lr_scheduler)"),
            (r"num_workers=4", "num_workers=0"),
            (r"num_workers=4", "num_workers=0"),
        ),
        arguments=("--epochs", "5", "--log_dir", "ck"),
        resume=("--resume_from", "{newest}"),
        checkpoints="ck/checkpoint_*.pt",
        kills=(13, 14, 12),
        pictures=True,
    ),
    "trl-sft": Original(
        file="trl/scripts/sft.py",
        prepare=chats,
        arguments=TRL,
        resume=("--resume_from_checkpoint", "{newest}"),
        checkpoints="out/checkpoint-*",
    ),
    "trl-dpo": Original(
        file="trl/scripts/dpo.py",
        prepare=preferences,
        arguments=TRL,
        resume=("--resume_from_checkpoint", "{newest}"),
        checkpoints="out/checkpoint-*",
    ),
    "lightning-gan": Original(
        file="Lightning-AI+pytorch-lightning/examples/pytorch/domain_templates/generative_adversarial_net.py",
        edits=(
            (
                r'Trainer\(accelerator="gpu", devices=1\)',
                "Trainer(accelerator='cpu', max_epochs=2, logger=False, callbacks=[SAVE])",
            ),
            (r"trainer.fit\(model, dm\)", "trainer.fit(model, dm, ckpt_path='last')"),
            (r"dm = MNISTDataModule\(\)", "dm = MNISTDataModule('.', val_split=128, num_workers=0, batch_size=32)"),
            (r"^if _TORCHVISION_AVAILABLE:", "if True:"),
            (
                r"^def main\(",
                "from lightning.pytorch.callbacks import ModelCheckpoint\n"
                "SAVE = ModelCheckpoint('ck', every_n_train_steps=3, save_last=True)\n\n\ndef main(",
            ),
        ),
        checkpoints="ck/last.ckpt",
        kills=(16, 14, 12),
        pictures=True,
    ),
    "fabric-own-trainer": Original(
        file="Lightning-AI+pytorch-lightning/examples/fabric/build_your_own_trainer/run.py",
        prepare=old_annotation,
        edits=(
            (r"trainer.fit\(model, train_loader, val_loader\)", "trainer.fit(model, train_loader, val_loader, 'checkpoints')"),
            (r', verbose=True\)', ")"),
            (r'return \{\n +"optimizer": optim,', "return optim, {"),  # its own parser knows no dictionary
            (r"num_workers=4", "num_workers=0"),
            (r"num_workers=4", "num_workers=0"),
            (r"max_epochs=3", "max_epochs=5"),
        ),
        checkpoints="checkpoints/*.ckpt",
        kills=(13, 12, 14),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # its checkpoint holds the scheduler itself
        pictures=True,
    ),
}
