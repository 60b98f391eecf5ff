"""Group norm on bands of rows is that of the whole map."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.parallel_norm import group_norm_rows
from sglang.multimodal_gen.runtime.layers.row_shard import RowShards
from thread_ranks import run_threads

SHAPES = {"map": (7, 5), "frames": (2, 7, 5), "batch": (7, 5)}


def norm_of(affine=True):
    torch.manual_seed(3)
    norm = nn.GroupNorm(3, 12, eps=1e-6, affine=affine).requires_grad_(False)
    if affine:
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_(0, 0.3)
    return norm


def on_bands(norm, x, bands, dim=-2):
    def rank(group):
        shards = RowShards(group)
        with shards.holding(bands):
            out = group_norm_rows(norm, shards, shards.mine(x))
            assert out.shape == shards.mine(x).shape
            assert out.dtype == x.dtype
            return shards.everyones(out, dim), group.traffic

    return run_threads(len(bands), rank)[-1]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bands", [(4, 3), (3, 2, 2)])
@pytest.mark.parametrize("kind", SHAPES)
def test_it_equals_the_whole(kind, bands, affine):
    norm = norm_of(affine)
    x = torch.randn(2 if kind == "batch" else 1, 12, *SHAPES[kind]) * 3 + 5
    # Rows differ: a rank's own statistics would be far off.
    x += torch.linspace(-5, 5, 7)[:, None]
    whole = norm(x)
    found, traffic = on_bands(norm, x, bands)
    assert (found - whole).norm() / whole.norm() < 1e-6
    assert traffic["all_gather"] == 2, "one for the norm, one for this test"
    alone = norm(x[..., : bands[0], :])
    assert (alone - whole[..., : bands[0], :]).norm() / whole.norm() > 0.1


def test_half_precision_has_float32_statistics():
    norm = norm_of().bfloat16()
    x = (torch.randn(1, 12, 7, 200) + 10).bfloat16()
    exact = norm_of()(x.float())
    plain = (norm(x).float() - exact).norm() / exact.norm()
    found, _ = on_bands(norm, x, (4, 3))
    mine = (found.float() - exact).norm() / exact.norm()
    assert mine <= 1.2 * plain


def test_the_memory_layout_stays():
    norm = norm_of()
    x = torch.randn(1, 12, 8, 5).contiguous(memory_format=torch.channels_last)

    def rank(group):
        shards = RowShards(group)
        with shards.holding((4, 4)):
            band = shards.mine(x).contiguous(memory_format=torch.channels_last)
            out = group_norm_rows(norm, shards, band)
        return out.is_contiguous(memory_format=torch.channels_last)

    assert run_threads(2, rank) == [True, True]
