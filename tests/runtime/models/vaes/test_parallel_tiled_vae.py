"""The base of VAEs, with toys whose results are known: tiles, frames, ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import (
    TORCH_PLANNERS,
    RowsNotSeparable,
)
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import ParallelTiledVAE, Tiling
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from thread_ranks import run_threads

RATIO = 2


class Convolutions(ParallelTiledVAE):
    """Convolutions alone: away from a tile's edges its pixels are those of the whole picture."""

    row_planners = TORCH_PLANNERS
    spatial_compression_ratio = RATIO

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, 12, 3, padding=1)
        )
        self.encoder = nn.Sequential(nn.Conv2d(12, 8, 3, padding=1))
        self.requires_grad_(False)

    def default_tiling(self):
        return Tiling(16, 16, 8, 8)

    def _decode(self, z):
        return nn.functional.pixel_shuffle(self.decoder(z), RATIO)

    def _encode(self, x):
        return self.encoder(nn.functional.pixel_unshuffle(x, RATIO))


class Clip(ParallelTiledVAE):
    """A causal clip VAE that keeps no memory: each latent but the first is three frames."""

    spatial_compression_ratio = 1
    temporal_compression_ratio = 3

    def default_tiling(self):
        return Tiling(4, 4, 3, 3, 6, 3)

    def _decode(self, z):
        return torch.cat((z[:, :, :1], z[:, :, 1:].repeat_interleave(3, 2)), 2)

    def _encode(self, x):
        moments = torch.cat((x[:, :, :1], x[:, :, 1:].unflatten(2, (-1, 3)).mean(3)), 2)
        return torch.cat((moments, moments), 1)


made = Convolutions()
"""Copied by ranks: threads share torch's random state, so none makes its own."""


def latents(height=21, width=13):
    return torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(1))


def test_tiles_equal_the_whole_but_where_they_overlap():
    vae, z = Convolutions(), latents(40, 10)
    whole = vae.decode(z).sample
    vae.enable_tiling(32, 32, None, 24, 24)
    tiled = vae.decode(z).sample
    assert tiled.shape == whole.shape
    differs = (tiled - whole).abs().amax((0, 1, 3)) > 1e-6
    overlaps = {row for seam in (24, 48) for row in range(seam, seam + 8)}
    assert differs.any(), "a seam must show, or nothing is tiled"
    assert set(differs.nonzero().flatten().tolist()) <= overlaps


def test_larger_overlaps_are_nearer_to_the_whole():
    vae, z = Convolutions(), latents(40, 40)
    whole = vae.decode(z).sample
    errors = []
    for stride in (16, 12, 8):
        vae.enable_tiling(16, 16, None, stride, stride)
        errors.append((vae.decode(z).sample - whole).norm().item())
    assert errors[0] > errors[1]
    vae.disable_tiling()
    assert torch.equal(vae.decode(z).sample, whole)


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_tiles_of_several_ranks_are_the_same_bits(ranks):
    z = latents()
    pixels = torch.randn(1, 3, 42, 26, generator=torch.Generator().manual_seed(2))
    alone = Convolutions()
    alone.enable_tiling()
    picture = alone.decode(z).sample
    moments = alone.tiled_encode(pixels)

    def rank(group):
        vae = copy.deepcopy(made)
        vae.enable_tiling()
        calls = []
        vae.decoder.register_forward_hook(lambda *_: calls.append(1))
        found = vae.parallel_tiled_decode(z, group)
        if group.is_first:
            assert torch.equal(found, picture)
        else:
            assert tuple(found.shape) == (0, *picture.shape[1:])
        assert torch.equal(vae.parallel_tiled_encode(pixels, group), moments)
        return len(calls), group.traffic["exchange"]

    results = run_threads(ranks, rank)
    tiles = 5 * 3
    assert sum(calls for calls, _ in results) == tiles
    assert max(calls for calls, _ in results) == -(-tiles // ranks)
    assert all(sent == 2 for _, sent in results)


def test_more_ranks_than_tiles():
    z = latents(5, 5)
    alone = Convolutions()
    alone.enable_tiling()

    def rank(group):
        vae = copy.deepcopy(made)
        vae.enable_tiling()
        picture = vae.parallel_tiled_decode(z, group)
        return picture, vae.parallel_tiled_encode(alone.decode(z).sample, group)

    results = run_threads(3, rank)
    assert torch.equal(results[0][0], alone.decode(z).sample)
    moments = alone.tiled_encode(alone.decode(z).sample)
    assert all(torch.equal(found, moments) for _, found in results)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_clip_in_pieces_of_time(ranks):
    z = torch.randn(1, 2, 8, 7, 5, generator=torch.Generator().manual_seed(1))
    whole = Clip().decode(z).sample
    moments = Clip().encode(whole).latent_dist.parameters

    def rank(group):
        vae = Clip()
        vae.enable_tiling()
        plan, _ = vae._tile_plans(z, encoding=False)
        assert plan.frames is not None
        assert len(plan) == len(plan.frames.starts) * len(plan.grid) > len(plan.grid)
        decoded = vae.parallel_tiled_decode(z, group)
        if group.is_first:
            assert torch.allclose(decoded, whole, atol=1e-6)
            assert torch.allclose(vae.decode(z).sample, whole, atol=1e-6)
        encoded = vae.parallel_tiled_encode(whole, group)
        assert torch.allclose(encoded, moments, atol=1e-6)

    run_threads(ranks, rank)


def test_a_batch_in_slices():
    vae = Convolutions()
    z = torch.cat((latents(), latents().flip(-1)))
    calls = []
    vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    whole = vae.decode(z).sample
    vae.use_slicing = True
    assert torch.allclose(vae.decode(z).sample, whole, atol=1e-6)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("tile", "stride", "message"),
    [
        (15, None, "tile_height=15: must be a multiple of 2"),
        (0, None, "tile_height=0"),
        (16, 3, "tile_stride_height=3: must be a multiple of 2"),
        (16, 18, "tile_stride_height=18: must be at most the tile's 16"),
        (-16, None, "tile_height=-16"),
    ],
)
def test_tiles_that_leave_pixels_out_are_refused(tile, stride, message):
    vae = Convolutions()
    with pytest.raises(InvalidArgument, match=message):
        vae.enable_tiling(tile, tile, None, stride, stride)
    assert vae.tiling is None


def test_the_stride_of_a_given_tile_is_three_quarters():
    vae = Convolutions()
    vae.enable_tiling(40, 24)
    assert vae.tiling == Tiling(40, 24, 30, 18)
    vae.enable_tiling(tile_sample_stride_width=4)
    assert vae.tiling == Tiling(16, 16, 8, 4)


def test_bands_of_rows_and_who_gets_what():
    z = latents(7, 5)
    alone = Convolutions()
    picture = alone.decode(z).sample
    moments = alone.encode(picture).latent_dist.parameters

    def rank(group):
        vae = copy.deepcopy(made)
        assert not vae.can_shard_rows(7)
        vae.enable_spatial_shard(group)
        vae.enable_spatial_shard(group)  # two stages share a VAE
        assert vae.can_shard_rows(3)
        assert not vae.can_shard_rows(2), "fewer rows than ranks"
        assert torch.equal(vae.decode(z).sample, picture), "alone it works as before"
        found = vae.spatial_shard_decode(z)
        if group.is_first:
            assert torch.allclose(found, picture, atol=1e-6)
        else:
            assert len(found) == 0
        encoded = vae.spatial_shard_encode(picture)
        assert torch.allclose(encoded, moments, atol=1e-6)
        assert group.traffic["exchange"] == 2 + 1 + 1, "two convolutions, the picture; one"
        return vae

    vaes = run_threads(3, rank)
    other = run_threads(2, lambda group: group)[0]
    with pytest.raises(ValueError, match="another group"):
        vaes[0].enable_spatial_shard(other)


def test_a_layer_that_nobody_knows_is_refused_by_name_and_nothing_changes():
    group = run_threads(2, lambda group: group)[0]
    vae = Convolutions()
    vae.decoder.append(nn.InstanceNorm2d(12))
    with pytest.raises(RowsNotSeparable, match=r"decoder\.3 is a InstanceNorm2d"):
        vae.enable_spatial_shard(group)
    assert not vae.can_shard_rows(100)
    assert all("forward" not in vars(module) for module in vae.modules())


def test_padding_that_is_no_zeros_is_refused_by_name():
    group = run_threads(2, lambda group: group)[0]
    vae = Convolutions()
    vae.decoder.append(nn.Conv2d(12, 12, 3, padding=1, padding_mode="circular"))
    with pytest.raises(RowsNotSeparable, match=r"decoder\.3 \(Conv2d\) pads with 'circular'"):
        vae.enable_spatial_shard(group)
