"""LitGPT's own pretraining loop as its wheel holds it (`litgpt.pretrain.setup`), on random tokens, resumed by `auto`; no line."""

import os
from pathlib import Path

import litgpt.pretrain
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # its loop keeps the loader itself in the file
torch.compile = lambda model, **_: model  # a compiler for two layers takes longer than the launch
litgpt.pretrain.save_hyperparameters = lambda *_: None  # it would parse the command line again


class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        ids = torch.randint(64, (160, self.length + 1), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(ids, batch_size=self.size, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randint(64, (8, self.length + 1), generator=torch.Generator().manual_seed(1)), batch_size=self.size)


small = {"block_size": 16, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "intermediate_size": 32}
litgpt.pretrain.setup(
    "tiny", model_config=Config(name="tiny", **small), out_dir=Path("out"), precision="32-true", resume="auto", data=Tokens(), devices=1,
    train=TrainArgs(
        save_interval=4, log_interval=4, global_batch_size=8, micro_batch_size=4, max_tokens=2 * 40 * 4 * 16, max_norm=1.0, min_lr=1e-4,
        lr_warmup_steps=5, max_seq_length=16,
    ),
    eval=EvalArgs(interval=10, max_iters=2, initial_validation=False, final_validation=False),
    optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
    logger_name="csv",
)
