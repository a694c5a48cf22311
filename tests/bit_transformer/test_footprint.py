"""What fits where: bytes a rank, against arithmetic written out and against what autograd really keeps."""

import dataclasses

import pytest
import torch

from bit_transformer.footprint import activation_bytes, footprint
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses

LARGE = ModelConfig(d_model=2048, num_heads=32, num_layers=24, d_ff=8192, max_bits=2304, norm="pre", checkpointing=True)
SMALL = ModelConfig(d_model=64, num_heads=4, num_layers=6, d_ff=256, max_bits=90, norm="pre")
COUNT = 1_208_606_722
PART = 151_075_841  # an eighth, rounded up


@pytest.mark.parametrize(("sharding", "ranks", "weights", "gradients", "optimizer"), [
    ("ddp", 1, COUNT, COUNT, 2 * COUNT), ("ddp", 8, COUNT, COUNT, 2 * COUNT), ("zero1", 8, COUNT, COUNT, 3 * PART),
    ("zero2", 8, COUNT, PART, 3 * PART), ("zero3", 8, PART, PART, 2 * PART), ("fsdp2", 8, PART, PART, 2 * PART)])
def test_parts_of_the_largest_model_are_exact(sharding: str, ranks: int, weights: int, gradients: int,
                                              optimizer: int) -> None:
    """Four bytes an element; a stage cuts what its number says, and DeepSpeed's stages 1 and 2 update a copy of their part."""
    found = footprint(LARGE, sharding=sharding, world_size=ranks, micro_batch=1, positions=2304, bf16=True)
    assert (found.weights, found.gradients, found.optimizer) == (4 * weights, 4 * gradients, 4 * optimizer)
    copies = {"ddp": 2 + 4 * (ranks > 1), "zero1": 2, "zero2": 2}  # bytes a parameter: autocast's weights, DDP's gradients
    assert found.buffers == (copies[sharding] * COUNT if sharding in copies else 2 * 4 * (COUNT // 24))
    assert found.total == sum(dataclasses.asdict(found).values())


def test_checkpointed_activations_of_the_largest_model_are_exact() -> None:
    """Twenty-four streams, one layer at work and both ends, in bytes: written out."""
    layer = 4 * (2 * 2048 + 4 + 32) + 2 * (6 * 2048 + 2 * 8192)
    ends = 4 * (2048 + 2) + 2 * 2048 + 4 * 4
    expected = 2304 * (24 * 4 * 2048 + layer + ends)
    assert activation_bytes(LARGE, micro_batch=1, positions=2304, bf16=True) == expected


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("num_layers", [2, 6])
def test_activations_are_what_autograd_keeps(num_layers: int, bf16: bool) -> None:
    """Every storage that an ordinary model saves for its backward pass, weights left out, within three percent."""
    config = dataclasses.replace(SMALL, num_layers=num_layers)
    torch.manual_seed(0)
    model, bits, saved = BitTransformer(config), torch.randint(0, 2, (8, 90)), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), \
            torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        next_symbol_losses(model(bits).logits_BTV, bits).mean()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    measured = sum(size for pointer, (size, _) in saved.items() if pointer not in own)
    copies = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1 and p is not model.embedding.weight) if bf16 else 0
    assert activation_bytes(config, micro_batch=8, positions=90, bf16=bf16) == pytest.approx(measured - copies, rel=0.03)


def test_reversible_activations_do_not_depend_on_depth() -> None:
    """One pair of streams whatever the depth; less than checkpointing from a few layers on."""
    shallow, deep = (dataclasses.replace(SMALL, reversible=True, num_layers=n) for n in (4, 400))
    found = [activation_bytes(one, micro_batch=8, positions=90, bf16=False) for one in (shallow, deep)]
    assert found[0] == found[1]
    checkpointed = dataclasses.replace(SMALL, checkpointing=True, num_layers=400)
    assert found[1] < activation_bytes(checkpointed, micro_batch=8, positions=90, bf16=False) / 5
