"""AutoencoderKLQwenImage: pictures and clips as Diffusers makes them, whole and in tiles."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage as Reference

from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_qwenimage import (
    AutoencoderKLQwenImage,
)
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise
from thread_ranks import run_threads
from vae_cases import noise, relative

CONFIG = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.0, 2.0, 3.0, 4.0],
}


def pair() -> tuple[AutoencoderKLQwenImage, Reference]:
    own = AutoencoderKLQwenImage(**CONFIG).eval().requires_grad_(False)
    fill_with_noise(own, 1)  # some pixels lie outside -1..1
    reference = Reference(**CONFIG).eval().requires_grad_(False)
    reference.load_state_dict(own.state_dict())
    return own, reference


def test_the_name_in_a_checkpoint_leads_here():
    own, _ = pair()
    assert ModelRegistry.resolve_model_cls("AutoencoderKLQwenImage")[0] is AutoencoderKLQwenImage
    assert (own.spatial_compression_ratio, own.temporal_compression_ratio) == (4, 2)


@pytest.mark.parametrize("frames", [1, 3], ids=["picture", "clip"])
def test_the_whole_is_diffusers(frames):
    own, reference = pair()
    z = noise(1, 4, frames, 5, 3)
    theirs = reference.decode(z).sample
    assert (theirs.abs() == 1).any(), "the cut to -1..1 is seen"
    assert torch.equal(own.decode(z).sample, theirs)
    # Diffusers encodes four frames at a time, this one as many as make a latent frame.
    x = noise(1, 3, 1, 20, 12)
    assert torch.equal(
        own.encode(x).latent_dist.parameters, reference.encode(x).latent_dist.parameters
    )


def test_the_frames_of_a_clip_hear_those_before():
    own, _ = pair()
    z = noise(1, 4, 2, 5, 3)
    changed = z.clone()
    changed[:, :, 0] += 1
    last = own.decode(z).sample[:, :, -1]
    assert relative(own.decode(changed).sample[:, :, -1], last) > 0.01


def test_tiles_are_diffusers_tiles():
    own, reference = pair()
    own.enable_tiling(32, 32, None, 24, 24)
    reference.enable_tiling(32, 32, 24, 24)
    z = noise(1, 4, 1, 11, 9)
    tiled = own.decode(z).sample
    assert relative(tiled, own._decode(z)) > 0.01
    assert torch.equal(tiled, reference.decode(z).sample)
    x = noise(1, 3, 1, 44, 36)
    assert torch.equal(
        own.encode(x).latent_dist.parameters, reference.encode(x).latent_dist.parameters
    )


def test_bands_of_rows_are_the_whole():
    own, _ = pair()
    z, x = noise(1, 4, 1, 7, 3), noise(1, 3, 1, 28, 12)

    def rank(group):
        vae = copy.deepcopy(own)
        vae.enable_spatial_shard(group)
        return vae.spatial_shard_decode(z), vae.spatial_shard_encode(x), group.traffic

    (decoded, moments, traffic), _ = run_threads(2, rank)
    assert traffic["exchange"] > 10
    assert relative(decoded, own.decode(z).sample) < 1e-5
    assert relative(moments, own.encode(x).latent_dist.parameters) < 1e-5
