import pytest
import torch
import torch.nn.functional as F

from sglang.multimodal_gen.runtime.layers.modulation import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    in_full_company,
)
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import add_gated, norm_modulate


def test_norm_modulate_is_its_formula():
    x, shift, scale = torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    expected = F.layer_norm(x, (8,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(norm_modulate(x, shift, scale), expected)


def test_add_gated_is_its_formula():
    x, gate, update = torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(add_gated(x, gate, update), x + gate * update)


def test_zero_gives_shift_scale_gate_for_attention_then_for_feed_forward():
    layer, vector = AdaLayerNormZero(4, count=2), torch.randn(3, 4)
    attention, feed_forward = layer(vector)
    chunks = layer.linear(vector).chunk(6, dim=-1)
    for got, expected in zip((*attention, *feed_forward), chunks, strict=True):
        assert torch.equal(got[:, 0], expected)


def test_continuous_takes_scale_before_shift():
    layer, x, vector = AdaLayerNormContinuous(4, 4), torch.randn(1, 3, 4), torch.randn(1, 4)
    scale, shift = layer.linear(vector).chunk(2, dim=-1)
    torch.testing.assert_close(layer(x, vector), norm_modulate(x, shift[:, None], scale[:, None]))


def test_a_vector_and_rows_made_of_it_cannot_be_taken_for_each_other():
    with pytest.raises(ValueError, match="as wide as"):
        AdaLayerNormContinuous(4, conditioning_dim=8)
    with pytest.raises(ValueError, match="5 numbers: a vector has 4, rows have 8"):
        AdaLayerNormContinuous(4, 4).rows(torch.randn(1, 5))


def test_one_number_beside_several_images_is_all_images():
    times, guidance = torch.randn(3, 4), torch.randn(1)
    found = in_full_company(lambda t, g: t * g[:, None], times, guidance)
    assert torch.equal(found, times * guidance)
