"""A causal language model from a config with Hugging Face's Trainer, in the shape of `run_clm`: it knows nothing of studies.

Options are those of TrainingArguments; data and tokenizer are made here (a text of eight letters, a letter a token).
"""

import random
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

BLOCK = 16


def blocks(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sentences in which a letter is mostly followed by the next one."""
    dice = random.Random(seed)
    rows = []
    for _ in range(number):
        letters = [dice.randrange(8)]
        while len(letters) < BLOCK:
            letters.append((letters[-1] + 1) % 8 if dice.random() < 0.8 else dice.randrange(8))
        rows.append({"input_ids": torch.tensor(letters), "labels": torch.tensor(letters)})
    return rows


def main() -> None:
    (arguments,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    config = GPT2Config(vocab_size=8, n_positions=BLOCK, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, arguments, train_dataset=blocks(512, 0), eval_dataset=blocks(64, 1))
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    sys.exit(main())
