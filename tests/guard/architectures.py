"""Real architectures, tiny, with one training loss each: what a record of a model must not be fooled by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "train"]

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY = 64
Loss = Callable[[Any, int], Any]


def _tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def _causal(model: Any, step: int) -> Any:
    """Longer sequences as it goes on: rotary caches grow."""
    tokens = _tokens(6 + 2 * step)
    return model(input_ids=tokens, labels=tokens).loss


def _classified(model: Any, step: int) -> Any:
    return model(input_ids=_tokens(), labels=torch.tensor([0, 1])).loss


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2)
    )


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=VOCABULARY, num_key_value_heads=2, **HEADS)
    )


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes, **HEADS))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(hidden_size=32, intermediate_size=64, vocab_size=VOCABULARY, **HEADS)
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0)
    )


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(hidden_size=32, intermediate_size=64, image_size=32, patch_size=8, **HEADS))


def _seen(model: Any, step: int) -> Any:
    return model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4))


def torch_transformer() -> Any:
    return nn.Transformer(32, 2, 1, 1, 64, batch_first=True)


class Recurrent(nn.Module):
    """An LSTM that counts its calls and keeps its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, 2, dropout=0.1), nn.Linear(16, 1)
        self.step, self.last_norm = 0, 0.0

    def forward(self, x: torch.Tensor) -> Any:
        out, _ = self.lstm(x)
        self.step, self.last_norm = self.step + 1, float(out.detach().norm())
        return self.head(out)


def convolutions() -> Any:
    weighted = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), weighted, nn.Flatten(), nn.LazyLinear(4))


class Rotary(nn.Module):
    """A module of a script's own: a cache of angles and a causal mask are filled by the forward pass."""

    def __init__(self, width: int = 16, theta: float = 1e4, dropout: float = 0.1) -> None:
        super().__init__()
        self.width, self.theta, self.max_cached, self.cache = width, theta, 0, None
        self.project, self.drop = nn.Linear(width, width), nn.Dropout(dropout)
        self.scale = width**-0.5

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[1]
        if length > self.max_cached:
            inverse = self.theta ** (-torch.arange(0, self.width, 2) / self.width)
            self.cache, self.max_cached = torch.outer(torch.arange(length), inverse), length
        angles = self.cache[:length].repeat_interleave(2, dim=1)  # type: ignore[index]
        return self.drop(self.project(x * angles.cos()) * self.scale)


def _squared(*shape: int) -> Loss:
    return lambda model, step: model(torch.randn(*shape)).square().mean()


ARCHITECTURES: dict[str, tuple[Callable[[], Any], Loss]] = {
    "gpt2": (gpt2, _causal),
    "llama": (llama, _causal),
    "mixtral": (mixtral, _causal),
    "bert": (bert, _classified),
    "t5": (t5, _causal),
    "vit": (vit, _seen),
    "mamba": (mamba, _causal),
    "torch.nn.Transformer": (
        torch_transformer,
        lambda model, step: model(torch.randn(2, 5, 32), torch.randn(2, 5, 32)).square().mean(),
    ),
    "lstm": (Recurrent, _squared(5, 2, 8)),
    "convolutions": (convolutions, _squared(2, 3, 12, 12)),
    "rotary": (Rotary, lambda model, step: model(torch.randn(2, 4 + step, 16)).square().mean()),
}


def train(model: Any, loss: Loss, num_steps: int, before_first_step: Callable[[], object] = lambda: None) -> None:
    """Train with AdamW; lazy modules get their parameters in the first forward pass."""
    model.train()
    optimizer = None
    for step in range(num_steps):
        loss(model, step).backward()
        if optimizer is None:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            before_first_step()
        optimizer.step()
        optimizer.zero_grad()
