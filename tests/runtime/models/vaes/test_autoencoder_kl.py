"""AutoencoderKL in tiles: as Diffusers does it, and where not, nearer to the whole picture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL as Reference

from examples.train_demo_model.layout import place
from examples.train_demo_model.render import render
from examples.train_demo_model.scenes import distinct_scenes
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL
from vae_cases import bundled_vae, noise, relative, tiny_config, tiny_vae


def pair():
    vae = tiny_vae()
    reference = Reference(**tiny_config()).eval().requires_grad_(False)
    reference.load_state_dict(vae.state_dict())
    return vae, reference


def picture():
    """One of the pictures that the bundled model was trained on, 128x128, in -1..1."""
    return render(place(distinct_scenes(5, 1), np.random.default_rng(0)))


def test_the_name_in_a_checkpoint_leads_here():
    assert ModelRegistry.resolve_model_cls("AutoencoderKL")[0] is AutoencoderKL
    assert issubclass(AutoencoderKL, Reference)


@pytest.mark.parametrize("quant", [True, False])
def test_the_whole_picture_is_diffusers(quant):
    config = tiny_config() | {"use_quant_conv": quant, "use_post_quant_conv": quant}
    vae = AutoencoderKL(**config).eval().requires_grad_(False)
    reference = Reference(**config).eval().requires_grad_(False)
    reference.load_state_dict(vae.state_dict())
    z, x = noise(1, 4, 9, 5), noise(1, 3, 72, 40)
    assert torch.equal(vae.decode(z, return_dict=False)[0], reference.decode(z).sample)
    assert torch.equal(
        vae.encode(x).latent_dist.parameters, reference.encode(x).latent_dist.parameters
    )


@pytest.mark.parametrize(("height", "width"), [(18, 17), (9, 21), (27, 5)])
def test_tiles_are_diffusers_tiles(height, width):
    vae, reference = pair()
    reference.enable_tiling()
    vae.enable_tiling()
    assert vae.tiling is not None
    assert (vae.tiling.height, vae.tiling.stride_width) == (64, 48)
    z, x = noise(1, 4, height, width), noise(1, 3, height * 8, width * 8)
    whole = vae._decode(z)
    tiled = vae.decode(z).sample
    assert relative(tiled, whole) > 0.01
    assert torch.equal(tiled, reference.decode(z).sample)
    assert torch.equal(
        vae.encode(x).latent_dist.parameters, reference.encode(x).latent_dist.parameters
    )


@pytest.mark.parametrize("rows", [13, 14])
def test_a_tile_within_the_one_before_is_left_out_and_that_is_nearer_to_the_whole(rows):
    """Diffusers decodes the last row or two of latents by themselves, and ends with that."""
    vae = bundled_vae()
    reference = Reference(**{k: v for k, v in vae.config.items() if not k.startswith("_")})
    reference.load_state_dict(vae.state_dict())
    reference.eval().requires_grad_(False).enable_tiling()
    reference.tile_sample_min_size, reference.tile_latent_min_size = 64, 8
    z = vae.encode(picture()).latent_dist.mode()[..., :rows, :5]
    whole = vae.decode(z).sample
    vae.enable_tiling(64, 64)
    ours, theirs = vae.decode(z).sample, reference.decode(z).sample
    above, edge = slice(0, 96), slice(96, None)
    assert torch.equal(ours[..., above, :], theirs[..., above, :])
    assert 2 * relative(ours[..., edge, :], whole[..., edge, :]) < relative(
        theirs[..., edge, :], whole[..., edge, :]
    )


def test_the_bundled_autoencoder_in_tiles_is_near_to_the_whole():
    """Norms and attention see one tile alone, so all pixels move, here by 5%.

    Latents move more (a third), but what is decoded from them is as near to the picture.
    """
    vae = bundled_vae()
    x = picture()
    z = vae.encode(x).latent_dist.mode()
    whole = vae.decode(z).sample
    assert relative(whole, x) < 0.05, "the picture must be of the kind that it was trained on"
    vae.enable_tiling(64, 64)
    tiled_latents = vae.encode(x).latent_dist.mode()
    assert 0.01 < relative(tiled_latents, z) < 0.5
    assert 0.005 < relative(vae.decode(z).sample, whole) < 0.1
    assert relative(vae.decode(tiled_latents).sample, x) < 0.1
