"""AutoencoderKLWan: the library's, without state on the module; in tiles, and on bands of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan as Reference

from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_wan import AutoencoderKLWan
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise
from thread_ranks import run_threads
from vae_cases import noise, relative

TINY = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
    "scale_factor_spatial": 4,
}
RESIDUAL = TINY | {
    "decoder_base_dim": 12,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 8,
}
CASES = {"2.1": TINY, "2.2": RESIDUAL}


def pair(name):
    reference = Reference(**CASES[name])
    fill_with_noise(reference, 1, {r"decoder\.conv_out": 0.3})
    vae = AutoencoderKLWan(**CASES[name])
    vae.load_state_dict(reference.state_dict())
    return [model.eval().requires_grad_(False) for model in (vae, reference)]


def clip(vae, frames, rows, columns):
    unit = vae.spatial_compression_ratio
    return noise(1, 3, frames, rows * unit, columns * unit)


def test_the_name_in_a_checkpoint_leads_here():
    assert ModelRegistry.resolve_model_cls("AutoencoderKLWan")[0] is AutoencoderKLWan


@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_whole_clip_is_diffusers(name, frames):
    vae, reference = pair(name)
    assert (vae.temporal_compression_ratio, reference.config.scale_factor_temporal) == (4, 4)
    z = noise(1, 4, frames, 3, 5)
    decoded = vae.decode(z).sample
    assert decoded.shape[2] == 4 * (frames - 1) + 1
    assert torch.equal(decoded, reference.decode(z).sample)
    x = clip(vae, 4 * (frames - 1) + 1, 3, 5)
    moments = vae.encode(x).latent_dist.parameters
    assert moments.shape == (1, 8, frames, 3, 5)
    assert torch.equal(moments, reference.encode(x).latent_dist.parameters)


@pytest.mark.parametrize("name", CASES)
def test_a_call_leaves_nothing_on_the_module(name):
    vae, _ = pair(name)
    before = set(vars(vae))
    vae.decode(noise(1, 4, 2, 3, 5))
    vae.encode(clip(vae, 5, 3, 5))
    assert set(vars(vae)) == before
    assert not any(isinstance(value, torch.Tensor) for value in vars(vae).values())


def test_tiles_are_diffusers_tiles():
    vae, reference = pair("2.1")
    tile = dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 16)
    stride = dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), 12)
    z, x = noise(1, 4, 2, 8, 11), clip(vae, 5, 8, 11)  # no tile within the one before
    whole, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    vae.enable_tiling(**tile, **stride)
    reference.enable_tiling(**tile, **stride)
    tiled = vae.decode(z).sample
    assert relative(tiled, whole) > 0.01
    assert relative(tiled, reference.decode(z).sample) < 1e-6
    tiled = vae.encode(x).latent_dist.parameters
    assert relative(tiled, moments) > 0.01
    assert relative(tiled, reference.encode(x).latent_dist.parameters) < 1e-6


def test_tiles_of_the_residual_one_cover_the_clip():
    """In pixels as users say them; the library counts its tiles after folding 2x2 pixels."""
    vae, _ = pair("2.2")
    z = noise(1, 4, 2, 6, 7)
    whole = vae.decode(z).sample
    vae.enable_tiling(32, 32)
    tiled = vae.decode(z).sample
    assert tiled.shape == whole.shape
    assert 1e-3 < relative(tiled, whole) < 0.5
    assert vae.encode(clip(vae, 5, 6, 7)).latent_dist.parameters.shape == (1, 8, 2, 6, 7)


def test_default_tiles_are_the_references():
    vae, reference = pair("2.2")
    vae.enable_tiling()
    assert vae.tiling.height == reference.tile_sample_min_height
    assert vae.tiling.stride_width == reference.tile_sample_stride_width


@pytest.mark.parametrize("name", CASES)
def test_bands_of_rows_are_the_whole(name):
    vae, _ = pair(name)
    z, x = noise(1, 4, 3, 5, 3), clip(vae, 9, 5, 3)
    decoded, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters

    def rank(group):
        own = copy.deepcopy(vae)
        own.enable_spatial_shard(group)
        assert own.can_shard_rows(5)
        return own.spatial_shard_decode(z), own.spatial_shard_encode(x), group.traffic

    (first, encoded, traffic), (other, *_) = run_threads(2, rank)
    assert traffic["exchange"] > 50
    assert other.numel() == 0
    assert relative(first, decoded) < 1e-5
    assert relative(encoded, moments) < 1e-5
