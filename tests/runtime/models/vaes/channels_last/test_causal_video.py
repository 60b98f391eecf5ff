"""Causal video autoencoders on channels-last maps: what Diffusers makes, in fewer passes."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage as QwenReference
from diffusers import AutoencoderKLQwenImage21 as Qwen21Reference
from diffusers import AutoencoderKLWan as WanReference
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_qwenimage import (
    AutoencoderKLQwenImage,
)
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_qwenimage21 import (
    AutoencoderKLQwenImage21,
)
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl_wan import AutoencoderKLWan
from sglang.multimodal_gen.runtime.models.vaes.channels_last.causal_video import InFront
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
}
RESIDUAL = {
    "decoder_base_dim": 12,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 8,
}
CASES = {
    "wan 2.1": (AutoencoderKLWan, WanReference, TINY | {"scale_factor_spatial": 4}),
    "wan 2.2": (AutoencoderKLWan, WanReference, TINY | RESIDUAL),
    "qwen-image": (AutoencoderKLQwenImage, QwenReference, TINY),
}
LIMIT = 5e-6


def pair(name, on=True):
    cls, reference_cls, config = CASES[name]
    vae, reference = cls(**config), reference_cls(**config)
    fill_with_noise(reference, 1, {r"decoder\.conv_out": 0.3})
    vae.load_state_dict(reference.state_dict())
    vae.wants_channels_last = on
    return [model.eval().requires_grad_(False) for model in (vae, reference)]


class Counted(TorchDispatchMode):
    """How often each operator ran, inside."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frames", "batch"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", CASES)
def test_clips_and_pictures_are_diffusers(name, frames, batch):
    vae, reference = pair(name)
    z = noise(batch, 4, frames, 3, 5)
    unit = vae.spatial_compression_ratio
    x = noise(batch, 3, 4 * (frames - 1) + 1, 3 * unit, 5 * unit)
    with torch.inference_mode():
        decoded, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        calls = vae._channels_last.calls
        assert relative(decoded, reference.decode(z).sample) < LIMIT
        assert relative(moments, reference.encode(x).latent_dist.parameters) < LIMIT
        assert decoded.is_contiguous()
        assert calls > 40 * frames  # the layers' other forwards did it
        vae.wants_channels_last = None  # left to itself, a CPU keeps to the library's layers
        assert torch.equal(vae.decode(z).sample, reference.decode(z).sample)
        assert vae._channels_last.calls == calls


@pytest.mark.parametrize("residual", [True, False])
def test_pictures_of_an_autoencoder_without_frames_are_diffusers(residual):
    own, reference = (
        cls(**TINY, decoder_base_dim=4, is_residual=residual, scale_factor_spatial=4)
        .eval()
        .requires_grad_(False)
        for cls in (AutoencoderKLQwenImage21, Qwen21Reference)
    )
    fill_with_noise(reference, 1)
    own.load_state_dict(reference.state_dict())
    own.wants_channels_last = True
    z, x = noise(2, 4, 1, 5, 3), noise(2, 4, 1, 20, 12)
    assert relative(own.decode(z).sample, reference.decode(z).sample) < LIMIT
    moments = reference.encode(x).latent_dist.parameters
    assert relative(own.encode(x).latent_dist.parameters, moments) < LIMIT
    assert own._channels_last.calls > 40


def test_nothing_is_padded_or_joined_by_copying():
    vae, reference = pair("wan 2.1")
    z = noise(1, 4, 3, 3, 5)
    with torch.no_grad(), Counted() as own:
        vae.decode(z)
    with torch.no_grad(), Counted() as theirs:
        reference.decode(z)
    copying = ("constant_pad_nd", "cat", "stack", "silu", "div", "linalg_vector_norm")
    assert all(theirs.calls[name] > 2 for name in copying)
    assert not any(own.calls.get(name) for name in copying)
    assert own.calls["channel_rms_norm"] == theirs.calls["linalg_vector_norm"]
    assert own.calls["convolution"] == theirs.calls["convolution"]


def test_a_first_frame_is_convolved_with_the_last_tap_alone():
    vae, _ = pair("qwen-image")
    conv = vae.decoder.conv_in
    x = noise(1, 4, 1, 6, 5)
    expected = conv(x)
    with torch.inference_mode(), vae.arrangement(x).working():
        assert relative(conv(x), expected) < LIMIT
        behind = torch.cat((x, x, x), 2)
        assert conv(behind, InFront.ALREADY).shape == expected.shape
        assert relative(conv(behind, InFront.ALREADY), expected) > 0.1


def test_half_precision_is_as_near_to_the_truth_as_diffusers_is():
    vae, reference = pair("wan 2.1")
    z = noise(1, 4, 2, 3, 5)
    with torch.inference_mode():
        truth = reference.decode(z).sample
        vae, reference = (torch.nn.Module.to(m, torch.bfloat16) for m in (vae, reference))
        own = vae.decode(z.bfloat16()).sample.float()
        theirs = reference.decode(z.bfloat16()).sample.float()
    assert 1e-4 < relative(theirs, truth) < 0.05
    assert relative(own, truth) < 1.3 * relative(theirs, truth)


def test_gradients_go_through_the_librarys_layers():
    vae, reference = pair("wan 2.1")
    z = noise(1, 4, 2, 3, 5).requires_grad_()
    (theirs,) = torch.autograd.grad(reference.decode(z).sample.square().sum(), z)
    (own,) = torch.autograd.grad(vae.decode(z).sample.square().sum(), z)
    assert relative(own, theirs) < LIMIT


def test_tiles_are_the_same_tiles():
    vae, reference = pair("wan 2.1", on=False)
    z = noise(1, 4, 2, 8, 11)
    vae.enable_tiling(16, 16)
    with torch.inference_mode():
        tiled = vae.decode(z).sample
        vae.wants_channels_last = True
        assert relative(vae.decode(z).sample, tiled) < LIMIT
        assert relative(reference.decode(z).sample, tiled) > 0.01
        assert vae._channels_last.calls


@pytest.mark.parametrize("first", ["layout", "bands"])
def test_bands_of_rows_keep_to_the_librarys_layers(first):
    vae, _ = pair("wan 2.1")
    z = noise(1, 4, 2, 5, 3)
    with torch.inference_mode():
        whole = vae.decode(z).sample

    def rank(group):
        own = copy.deepcopy(vae)
        if first == "bands":
            own = pair("wan 2.1")[0]
        own.enable_spatial_shard(group)
        with torch.inference_mode():
            banded, again = own.spatial_shard_decode(z), own.decode(z).sample
        return banded, again, own._channels_last.calls

    (banded, again, calls), _ = run_threads(2, rank)
    assert relative(banded, whole) < 1e-5
    assert relative(again, whole) < LIMIT
    assert calls


def test_an_upsampling_whose_convolution_in_time_is_unusual_is_left_to_the_library():
    vae, reference = pair("wan 2.1")
    for model in (vae, reference):
        for module in model.decoder.modules():
            if getattr(module, "mode", None) == "upsample3d":
                module.time_conv.padding_mode = "reflect"  # by none on each side: no other result
                module.time_conv._reversed_padding_repeated_twice = [0] * 6
    latents = noise(1, 4, 2, 5, 4)
    with torch.no_grad():
        expected = reference.decode(latents, return_dict=False)[0]
        assert relative(vae.decode(latents, return_dict=False)[0], expected) < LIMIT
