"""References that the model is compared with: attention written out, and a count of parameters without memory."""

import torch
from torch import Tensor, nn

from bit_transformer.model.transformer import BitTransformer, ModelConfig


def attend_explicitly(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, allowed_TT: Tensor) -> Tensor:
    """Softmax attention with a boolean mask, written out."""
    scores = q_BHTE @ k_BHTE.transpose(-1, -2) / q_BHTE.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~allowed_TT, float("-inf")), dim=-1) @ v_BHTE


def band_mask(num_positions: int, chunk: int, overlap: int) -> Tensor:
    """What each position may see, as one dense (T, T) mask."""
    query, key = torch.arange(num_positions)[:, None], torch.arange(num_positions)[None, :]
    return (key <= query) & (key >= query // chunk * chunk - overlap)


def count_model_parameters(model: nn.Module) -> int:
    """The number of trainable elements."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_on_meta_device(config: ModelConfig) -> int:
    """Build the model without memory and count its parameters."""
    with torch.device("meta"):
        return count_model_parameters(BitTransformer(config))
