"""AutoencoderKLQwenImage21: pictures as Diffusers makes them, whole, in tiles, in bands of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21 as Reference

from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_qwenimage21 import (
    AutoencoderKLQwenImage21,
)
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise
from thread_ranks import run_threads
from vae_cases import noise, relative

CONFIG = {
    "base_dim": 8,
    "decoder_base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.0, 2.0, 3.0, 4.0],
    "scale_factor_spatial": 4,
}


def pair(**changes) -> tuple[AutoencoderKLQwenImage21, Reference]:
    own = AutoencoderKLQwenImage21(**CONFIG, **changes).eval().requires_grad_(False)
    fill_with_noise(own, 1)  # some pixels lie outside -1..1
    reference = Reference(**CONFIG, **changes).eval().requires_grad_(False)
    reference.load_state_dict(own.state_dict())
    return own, reference


@pytest.mark.parametrize("residual", [True, False])
def test_the_whole_is_diffusers(residual):
    found = ModelRegistry.resolve_model_cls("AutoencoderKLQwenImage21")[0]
    assert found is AutoencoderKLQwenImage21
    own, reference = pair(is_residual=residual)
    z, x = noise(1, 4, 1, 5, 3), noise(1, 4, 1, 20, 12)
    theirs = reference.decode(z).sample
    assert theirs.shape == (1, 4, 1, 20, 12)
    assert not residual or (theirs.abs() == 1).any(), "the cut to -1..1 is seen"
    assert torch.equal(own.decode(z).sample, theirs)
    moments = own.encode(x).latent_dist.parameters
    assert torch.equal(moments, reference.encode(x).latent_dist.parameters)
    opaque = x.clone()
    opaque[:, 3] = 1
    assert relative(own.encode(opaque).latent_dist.parameters, moments) > 0.01


def test_tiles_are_diffusers_tiles():
    own, reference = pair()
    own.enable_tiling(32, 32, None, 24, 24)
    reference.enable_tiling(32, 32, 24, 24)
    z, x = noise(1, 4, 1, 11, 9), noise(1, 4, 1, 44, 36)
    tiled = own.decode(z).sample
    assert relative(tiled, own._decode(z)) > 0.01
    assert torch.equal(tiled, reference.decode(z).sample)
    assert torch.equal(
        own.encode(x).latent_dist.parameters, reference.encode(x).latent_dist.parameters
    )


def test_ranks_are_one():
    """By bands of rows, and by tiles; the neighbours' rows matter."""
    own, _ = pair()
    z, x = noise(1, 4, 1, 7, 3), noise(1, 4, 1, 28, 12)
    own.enable_tiling(16, 16, None, 12, 12)
    tiled = own.decode(z).sample
    own.disable_tiling()

    def rank(group):
        vae = copy.deepcopy(own)
        vae.enable_spatial_shard(group)
        pieces = vae.spatial_shard_decode(z), vae.spatial_shard_encode(x)
        exchanged = group.traffic["exchange"]
        vae.enable_tiling(16, 16, None, 12, 12)
        return *pieces, exchanged, vae.parallel_tiled_decode(z, group)

    (decoded, moments, exchanged, tiles), _ = run_threads(2, rank)
    assert exchanged > 10
    assert relative(decoded, own.decode(z).sample) < 1e-5
    assert relative(moments, own.encode(x).latent_dist.parameters) < 1e-5
    assert torch.equal(tiles, tiled)
    halves = torch.cat([own.decode(part).sample for part in z.split((4, 3), dim=-2)], dim=-2)
    assert relative(halves, own.decode(z).sample) > 0.01, "without the neighbours' rows"
