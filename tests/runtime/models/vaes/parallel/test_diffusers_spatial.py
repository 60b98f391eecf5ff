"""Diffusers' image autoencoder on bands of rows: uneven heights, two to four ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers.row_shard import Edges, RowShards
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import RowsNotSeparable
from thread_ranks import run_threads
from vae_cases import bundled_vae, noise, relative, tiny_config, tiny_vae

DECODER = {"convolutions": 25, "norms": 22, "attentions": 1}
"""Of the tiny autoencoder, counted by hand: 3x3 convolutions, group norms, attention blocks."""


def _check(rank: int, ranks: int, heights: tuple[int, ...], bundled: bool) -> dict[str, float]:
    group = ParallelState.create(ParallelLayout(ulysses=ranks), "cpu").replica
    vae = bundled_vae() if bundled else tiny_vae()
    channels = vae.config.latent_channels
    found: dict[str, float] = {}
    for height in heights:
        z, x = noise(1, channels, height, 6), noise(1, 3, 8 * height, 48)
        whole, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        vae.enable_spatial_shard(group)
        assert vae.can_shard_rows(height)
        assert torch.equal(vae.decode(z).sample, whole), "alone it works as before"
        group.traffic.clear()
        sharded = vae.spatial_shard_decode(z)
        found |= group.traffic
        if rank == 0:
            assert sharded.shape == whole.shape
            found[f"decode {height}"] = relative(sharded, whole)
        else:
            assert tuple(sharded.shape[:2]) == (0, 3)
        found[f"encode {height}"] = relative(vae.spatial_shard_encode(x), moments)
    if not bundled:
        z, x = noise(1, channels, 13, 6), noise(1, 3, 104, 48)
        vae.enable_tiling()
        tiled = vae.decode(z).sample
        dealt = vae.parallel_tiled_decode(z, group)
        assert rank > 0 or torch.equal(dealt, tiled)
        assert torch.equal(vae.parallel_tiled_encode(x, group), vae.tiled_encode(x))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "heights"), [(2, (9, 13)), (3, (3, 13)), (4, (4, 9, 13))])
def test_bands_of_rows_equal_the_whole(ranks, heights):
    results = run_ranks(ranks, _check, ranks, heights, False)
    for found in results:
        errors = {name: value for name, value in found.items() if "code" in name}
        assert errors
        assert max(errors.values()) < 1e-5, errors
        # A halo for each convolution of 3x3, and the picture to the first rank; two numbers a
        # norm, keys and values once: each is one exchange, whatever the width.
        assert found["exchange"] == DECODER["convolutions"] + 1
        assert found["all_gather"] == DECODER["norms"] + DECODER["attentions"]
    assert set(results[0]) > set(results[1])


@pytest.mark.slow
def test_the_bundled_autoencoder_on_bands_equals_the_whole():
    (found, _) = run_ranks(2, _check, 2, (13,), True)
    assert found["decode 13"] < 1e-5
    assert found["encode 13"] < 1e-5


def shared(vae, z, ranks=2):
    """The picture that thread ranks make together."""

    def rank(group):
        own = copy.deepcopy(vae)
        own.enable_spatial_shard(group)
        return own.spatial_shard_decode(z)

    return run_threads(ranks, rank)[0]


def test_the_threads_of_these_tests_agree_too():
    vae, z = tiny_vae(), noise(1, 4, 9, 6)
    assert relative(shared(vae, z, 3), vae.decode(z).sample) < 1e-5


@pytest.mark.parametrize(
    ("name", "broken", "least"),
    [
        ("exchange_edges", lambda *_: Edges(None, None, (), ()), 0.05),
        ("whole_moments", lambda _, mean, variance: (mean, variance), 0.02),
    ],
)
def test_each_exchange_matters(name, broken, least, monkeypatch):
    vae, z = tiny_vae(), noise(1, 4, 9, 6)
    whole = vae.decode(z).sample
    monkeypatch.setattr(RowShards, name, broken)
    assert relative(shared(vae, z), whole) > least


def test_attention_across_bands_matters(monkeypatch):
    vae, z = tiny_vae(), noise(1, 4, 9, 6)
    whole = vae.decode(z).sample
    module = "sglang.multimodal_gen.runtime.models.vaes.parallel.diffusers_spatial"
    monkeypatch.setattr(
        f"{module}.attend_to_all_rows",
        lambda q, k, v, _: nn.functional.scaled_dot_product_attention(q, k, v),
    )
    assert relative(shared(vae, z), whole) > 0.01


def test_without_attention_in_the_middle():
    vae = AutoencoderKL(**tiny_config() | {"mid_block_add_attention": False}).eval()
    z = noise(1, 4, 7, 3)
    with torch.no_grad():
        whole = vae.requires_grad_(False).decode(z).sample
    assert relative(shared(vae, z), whole) < 1e-5


def test_half_precision_is_as_near_as_half_precision_is():
    vae, z = tiny_vae(), noise(1, 4, 9, 6)
    exact = vae.decode(z).sample
    vae = vae.bfloat16()
    plain = relative(vae.decode(z.bfloat16()).sample.float(), exact)
    assert relative(shared(vae, z.bfloat16()).float(), exact) < 1.2 * plain


class Blur(nn.Module):
    def forward(self, x):
        return x


def _filter(vae):
    vae.decoder.up_blocks[1].resnets[0].upsample = lambda x: x


def _foreign(vae):
    vae.decoder.up_blocks[2].upsamplers[0] = Blur()


def _transposed(vae):
    vae.decoder.up_blocks[0].upsamplers[0] = Upsample2D(16, use_conv_transpose=True)


def _subclass(vae):
    class Other(ResnetBlock2D):
        pass

    vae.decoder.mid_block.resnets[0].__class__ = Other


def _fused(vae):
    vae.decoder.mid_block.attentions[0].fuse_projections()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_filter, r"decoder\.up_blocks\.1\.resnets\.0 \(ResnetBlock2D\) resamples with a filter"),
        (_foreign, r"decoder\.up_blocks\.2\.upsamplers\.0 is a Blur"),
        (_transposed, r"decoder\.up_blocks\.0\.upsamplers\.0 \(Upsample2D\)"),
        (_subclass, r"decoder\.mid_block\.resnets\.0 is a Other"),
        (_fused, r"decoder\.mid_block\.attentions\.0 \(Attention\)"),
    ],
)
def test_what_may_mix_rows_is_refused_by_name(change, message):
    vae = tiny_vae()
    change(vae)
    group = run_threads(2, lambda group: group)[0]
    with pytest.raises(RowsNotSeparable, match=message):
        vae.enable_spatial_shard(group)
    assert not vae.can_shard_rows(100)


def test_names_and_weights_stay():
    vae = tiny_vae()
    before = {name: id(value) for name, value in vae.named_parameters()}
    classes = {name: type(module) for name, module in vae.named_modules()}
    vae.enable_spatial_shard(run_threads(2, lambda group: group)[0])
    assert {name: id(value) for name, value in vae.named_parameters()} == before
    assert {name: type(module) for name, module in vae.named_modules()} == classes
