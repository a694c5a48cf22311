"""Tiny models, tokenizers and data sets, written to the working folder under the names the scripts ask for."""

import csv
import json
import random
from pathlib import Path

__all__ = ["write_bert", "write_chats", "write_glue", "write_llama", "write_pictures", "write_pipeline"]

WORDS = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "warm", "cold", "near", "far", "is", "not"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer(**options):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|user|>", "<|assistant|>", "<|end|>"]
    ids = {word: number for number, word in enumerate([*marks, *WORDS])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(marks)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", **options)


def write_bert(folder: Path, name: str = "bert-base-cased") -> None:
    """A BERT of two narrow layers with a tokenizer of whole words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    marks = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    _tokenizer(**marks, model_max_length=64).save_pretrained(folder / name)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, max_position_embeddings=64, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / name)


def write_llama(folder: Path) -> None:
    """A Llama of two narrow layers whose tokenizer has a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = _tokenizer(eos_token="<|end|>", model_max_length=64)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tiny-llama")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 7}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, num_key_value_heads=2, **sizes, **marks)
    LlamaForCausalLM(config).save_pretrained(folder / "tiny-llama")


def write_chats(folder: Path, *, preferences: bool = False) -> None:
    """Sixty-four questions with an answer, or with a better and a worse one."""
    chance = random.Random(0)
    (folder / "chats").mkdir()

    def say(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(chance.choices(WORDS, k=chance.randint(3, 8)))}]

    with (folder / "chats" / "train.jsonl").open("w") as file:
        for _ in range(64):
            prompt = say("user")
            pair = {"prompt": prompt, "chosen": say("assistant"), "rejected": say("assistant")}
            row = pair if preferences else {"messages": prompt + say("assistant")}
            file.write(json.dumps(row) + "\n")


def write_glue(folder: Path) -> None:
    """Pairs of sentences and a metric under the names that Accelerate's examples load."""
    chance = random.Random(0)
    for place in ("nyu-mll/glue", "glue"):
        (folder / place).mkdir(parents=True)
        (folder / place / "README.md").write_text(CARD, encoding="utf-8")
        for name, count in (("train", 160), ("validation", 32)):
            with (folder / place / f"{name}.csv").open("w") as file:
                rows = csv.writer(file)
                rows.writerow(["sentence1", "sentence2", "label", "idx"])
                for number in range(count):
                    texts = [" ".join(chance.choices(WORDS, k=6)) for _ in range(2)]
                    rows.writerow([*texts, number % 2, number])
    (folder / "glue" / "glue.py").write_text(METRIC, encoding="utf-8")


CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.csv
  - split: validation
    path: validation.csv
---
"""
METRIC = '''
import datasets
import evaluate

class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
'''


def write_pictures(folder: Path, *, captions: bool) -> None:
    """Sixteen coloured squares, with captions for a text model."""
    from PIL import Image

    chance = random.Random(0)
    (folder / "pictures").mkdir()
    with (folder / "pictures" / "metadata.jsonl").open("w") as file:
        for number in range(16):
            colour = tuple(chance.randrange(256) for _ in range(3))
            Image.new("RGB", (32, 32), colour).save(folder / "pictures" / f"{number:02}.png")
            file.write(json.dumps({"file_name": f"{number:02}.png", "text": chance.choice(WORDS)}) + "\n")
    if not captions:
        (folder / "pictures" / "metadata.jsonl").unlink()


def write_pipeline(folder: Path) -> None:
    """A diffusion pipeline with the smallest networks that fit together."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = AutoencoderKL(
        block_out_channels=(4, 8),
        norm_num_groups=2,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    letters = [chr(97 + n) for n in range(26)]
    ids = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for piece in [*letters, *(letter + "</w>" for letter in letters)]:
        ids[piece] = len(ids)
    (folder / "clip").mkdir()
    (folder / "clip" / "vocab.json").write_text(json.dumps(ids))
    (folder / "clip" / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "clip" / "vocab.json"), str(folder / "clip" / "merges.txt"), model_max_length=16)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDPMScheduler(num_train_timesteps=20),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder / "tiny-diffusion")
