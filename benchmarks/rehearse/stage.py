"""What the scripts train on: a few kilobytes of made data, models of some thousand weights; nothing is downloaded."""

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

WORDS = (
    "the", "a", "one", "two", "model", "step", "loss", "data", "rate", "batch", "is", "was", "has", "less", "more", "than",
    "and", "of", "in", "on", "good", "bad", "early", "late", "small", "large",
)  # fmt: skip
NUM_TOKENS = 20_000


def make_stage(stage: Path, sources: Path) -> None:
    """Write all of it below `stage`, and beside the scripts that look there."""
    stage.mkdir(parents=True, exist_ok=True)
    _texts(stage)
    _metric(stage / "glue")
    _documents(stage / "nanochat", sources / "nanochat")
    _images(stage / "images")
    _models(stage)
    _tokens(sources)
    _mnist(sources / "ignite" / "MNIST" / "raw")
    _mnist(stage / "mnist" / "MNIST" / "raw")
    _molecules(stage / "molecules.xyz")
    (stage / "unet.json").write_text(json.dumps(UNET))


UNET = {
    "_class_name": "UNet2DModel", "sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1,
    "block_out_channels": [16, 16], "norm_num_groups": 8, "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}  # fmt: skip


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=12))


def _texts(stage: Path) -> None:
    """Sets of rows for TRL, and one that is called nyu-mll/glue: a name that `load_dataset` looks for here first."""
    draw = random.Random(1)
    forms = {
        "sft": lambda: {"text": _sentence(draw)},
        "dpo": lambda: {"prompt": _sentence(draw), "chosen": " " + _sentence(draw), "rejected": " " + _sentence(draw)},
        "kto": lambda: {"prompt": _sentence(draw), "completion": " " + _sentence(draw), "label": draw.random() < 0.5},
        "reward": lambda: {"chosen": _sentence(draw), "rejected": _sentence(draw)},
    }  # fmt: skip
    for name, form in forms.items():
        (stage / name).mkdir(exist_ok=True)
        rows = [json.dumps(form()) for _ in range(96)]
        (stage / name / "train.jsonl").write_text("\n".join(rows))
    (stage / "texts").mkdir(exist_ok=True)
    for number in range(3):  # LitGPT reads them; it writes its tokens beside them
        (stage / "texts" / f"{number}.txt").write_text("\n".join(_sentence(draw) for _ in range(800)))
    glue = stage / "nyu-mll" / "glue"
    glue.mkdir(parents=True, exist_ok=True)
    pairs = [
        {"sentence1": _sentence(draw), "sentence2": _sentence(draw), "label": number % 2, "idx": number} for number in range(96)
    ]
    for part in ("train", "validation"):
        (glue / f"{part}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (glue / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - {split: train, path: train.jsonl}\n"
        "  - {split: validation, path: validation.jsonl}\n---\n"
    )


def _molecules(path: Path) -> None:
    """24 molecules of water, moved a little, with energies and forces for MACE."""
    draw = random.Random(7)
    lines = []
    for _ in range(24):
        lines += ["3", f'Properties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy={draw.gauss(-14, 0.1):.5f} pbc="F F F"']
        for atom, *place in (("O", 0, 0, 0), ("H", 0.96, 0, 0), ("H", -0.24, 0.93, 0)):
            moved = [draw.gauss(at, 0.05) for at in place]
            forces = [draw.gauss(0, 0.5) for _ in place]
            lines.append(f"{atom} " + " ".join(f"{number:.5f}" for number in (*moved, *forces)))
    path.write_text("\n".join(lines) + "\n")


def _metric(folder: Path) -> None:
    """What `evaluate.load("glue", "mrpc")` finds here first: accuracy alone; the registry's own needs the network."""
    folder.mkdir(exist_ok=True)
    (folder / "glue.py").write_text(METRIC)


METRIC = '''import datasets
import evaluate

class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        same = sum(int(a == b) for a, b in zip(predictions, references)) / len(references)
        return {"accuracy": same, "f1": same}
'''


def _documents(base: Path, source: Path) -> None:
    """Two shards of texts and a tokenizer as nanochat's own script trains it."""
    import pyarrow
    import pyarrow.parquet

    if not source.exists():
        return
    (base / "base_data_climbmix").mkdir(parents=True, exist_ok=True)
    draw = random.Random(3)
    for number in range(2):
        rows = pyarrow.table({"text": [_sentence(draw) for _ in range(2000)]})
        pyarrow.parquet.write_table(rows, base / "base_data_climbmix" / f"shard_{number:05d}.parquet", row_group_size=500)
    command = [sys.executable, "-m", "scripts.tok_train", "--vocab-size", "512"]
    subprocess.run(command, cwd=source, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}, check=True)


def _images(folder: Path) -> None:
    """Two classes of 24 images, as train and val."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(1)
    for part in ("train", "val"):
        for name in ("n01", "n02"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(24):
                pixels = draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def _models(stage: Path) -> None:
    """A causal model and a classifier, each with a tokenizer; the second by the name that Accelerate's examples ask for."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    causal = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)
    causal.save_pretrained(stage / "causal")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    transformers.set_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(stage / "causal")
    config.num_labels = 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(stage / "reward-model")
    causal.save_pretrained(stage / "reward-model")
    bert = transformers.BertConfig(**sizes, max_position_embeddings=512, num_labels=2)
    transformers.BertForSequenceClassification(bert).save_pretrained(stage / "bert-base-cased")
    (stage / "bert-base-cased" / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(str(stage / "bert-base-cased" / "vocab.txt")).save_pretrained(stage / "bert-base-cased")


def _mnist(folder: Path) -> None:
    """Digits in MNIST's files, as Ignite's example looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for part, number in (("train", 2560), ("t10k", 64)):
        pixels = struct.pack(">IIII", 2051, number, 28, 28) + draw.randbytes(number * 784)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(pixels)
        labels = struct.pack(">II", 2049, number) + bytes(draw.randrange(10) for _ in range(number))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def _tokens(sources: Path) -> None:
    """nanoGPT and llama2.c read tokens of 16 bits beside their script."""
    draw = random.Random(2)
    tokens = struct.pack(f"<{NUM_TOKENS}H", *(draw.randrange(60) for _ in range(NUM_TOKENS)))
    for folder, names in (
        ("nanoGPT/data/tiny", ("train.bin", "val.bin")),
        ("llama2.c/data/tok64", ("data00.bin", "data01.bin")),
    ):
        (sources / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (sources / folder / name).write_bytes(tokens)
