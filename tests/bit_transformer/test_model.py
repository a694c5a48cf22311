"""The model: exact parameter counts, causality, the fused kernel equal to attention written out."""

import dataclasses

import pytest
import torch

from bit_transformer.errors import BadRecipe
from bit_transformer.model.transformer import (
    BitTransformer,
    ModelConfig,
    next_symbol_losses,
    sinusoids,
)
from tests.bit_transformer.references import attend_explicitly, count_on_meta_device

SMALL = ModelConfig(d_model=32, num_heads=4, num_layers=2, d_ff=64, max_bits=90)


@pytest.mark.parametrize(("d_model", "num_heads", "num_layers", "d_ff", "act", "count"), [
    (2048, 32, 24, 8192, False, 1_208_606_722),
    (1792, 28, 20, 7168, False, 771_176_450),
    (1536, 24, 24, 6144, False, 679_962_626),
    (512, 16, 8, 1024, True, 16_828_426),
    (128, 8, 4, 512, False, 793_602),
    (256, 8, 8, 1024, True, 6_321_162),
    (128, 8, 8, 512, False, 1_586_690),
    (256, 8, 16, 1024, True, 12_641_298),
])
def test_published_parameter_counts(d_model: int, num_heads: int, num_layers: int, d_ff: int, act: bool,
                                    count: int) -> None:
    """The closed formula and the model built on the meta device give the published number exactly."""
    config = ModelConfig(d_model=d_model, num_heads=num_heads, num_layers=num_layers, d_ff=d_ff, max_bits=2304, act=act)
    assert config.num_parameters == count
    assert count_on_meta_device(config) == count


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_no_logit_sees_the_future(norm: str) -> None:
    """Flipping bit t changes no logit before t, and changes the one at t."""
    torch.manual_seed(0)
    model = BitTransformer(dataclasses.replace(SMALL, norm=norm)).eval()
    bits = torch.randint(0, 2, (1, 90))
    for t in (1, 37, 89):
        flipped = bits.clone()
        flipped[0, t] ^= 1
        before, after = model(bits).logits_BTV, model(flipped).logits_BTV
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


def test_attention_equals_softmax_written_out() -> None:
    """The fused kernel and the explicit formula agree within 1e-5."""
    torch.manual_seed(0)
    attention = BitTransformer(SMALL).blocks[0].attention
    x = torch.randn(2, 45, 32)
    q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in attention.in_proj(x).chunk(3, dim=-1))
    y = attend_explicitly(q, k, v, torch.ones(45, 45).tril().bool())
    assert torch.allclose(attention(x), attention.out_proj(y.transpose(1, 2).flatten(2)), atol=1e-5)


def test_untrained_model_is_a_coin_flip() -> None:
    """At the start the loss is ln 2 per bit within 5 %: an initialisation that knows something wrong starts higher."""
    torch.manual_seed(0)
    bits = torch.randint(0, 2, (16, 90))
    loss = next_symbol_losses(BitTransformer(SMALL)(bits).logits_BTV, bits).mean().item()
    assert loss == pytest.approx(0.6931, rel=0.05)


def test_byte_phase_tells_the_nine_places_apart() -> None:
    """The last eight channels repeat every nine positions and differ within them; nothing is learned."""
    table = sinusoids(90, 32, byte_phase=True)
    phase = table[:, -8:]
    assert torch.allclose(phase[:81], phase[9:], atol=1e-6)
    assert min(float((phase[i] - phase[j]).norm()) for i in range(9) for j in range(i)) > 1
    assert sinusoids(90, 32, byte_phase=False).shape == table.shape == (90, 32)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"num_heads": 5}, "does not divide into 5 heads"), ({"max_bits": 100}, "max_bits 100 is not a multiple of 9"),
    ({"norm": "none"}, "norm is 'none', expected pre or post"), ({"d_model": 8}, "leaves no room")])
def test_impossible_shape_is_refused(change: dict[str, object], sentence: str) -> None:
    """One sentence before anything is built."""
    with pytest.raises(BadRecipe, match=sentence):
        dataclasses.replace(SMALL, **change)
