"""Norms over channels of channels-last maps against their twins in float64; see test_kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sglang.multimodal_gen.runtime.layers.ops import channel_norm, group_norm
from sglang.multimodal_gen.runtime.layers.ops.triton import channel_norm_kernel, group_norm_kernel
from vae_cases import noise, relative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def clip(batch, channels, frames, dtype):
    """A map far from zero, of few pixels more than a program's, its channels side by side."""
    x = 3 * noise(batch, channels, frames, 9, 13).to(DEVICE, dtype) + 5
    return x.contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("silu", [True, False])
def test_the_rms_norm_of_channels_goes_behind_what_is_there(dtype, silu):
    x = clip(2, 96, 2, dtype)
    gamma = (noise(96, seed=3) + 1).to(DEVICE, dtype)
    room = torch.full((2, 96, 5, 9, 13), 7.0, dtype=dtype, device=DEVICE)
    room = room.contiguous(memory_format=torch.channels_last_3d)
    place = room[:, :, 2:4]
    assert channel_norm_kernel.takes(x, place)
    assert not channel_norm_kernel.takes(x.contiguous(), place)
    channel_norm_kernel.launch(x, gamma, place, 96**0.5, channel_norm.EPS, silu)
    exact = torch.empty_like(x, dtype=torch.float64)
    channel_norm.channel_rms_norm_plain(x.double(), gamma.double(), exact, 96**0.5, silu)
    assert relative(place.double(), exact) < LIMITS[dtype]
    assert (room[:, :, :2] == 7).all()
    assert (room[:, :, 4:] == 7).all()


def test_pixels_of_zeros_stay_zeros():
    x = torch.zeros(1, 16, 1, 2, 2, device=DEVICE).contiguous(memory_format=torch.channels_last_3d)
    out = torch.ones_like(x)
    channel_norm_kernel.launch(x, torch.ones(16, device=DEVICE), out, 4.0, channel_norm.EPS, True)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("channels", [32, 48])
def test_the_group_norm_of_many_spans(monkeypatch, channels, dtype):
    monkeypatch.setattr(group_norm_kernel, "MOST_SPANS", 3)
    monkeypatch.setattr(group_norm_kernel, "ELEMENTS", 1024)
    x = clip(2, channels, 3, dtype).flatten(2, 3)  # 351 pixels: 11 or 22 tiles, in three spans
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = ((noise(channels, seed=s) + 1).to(DEVICE, dtype) for s in (3, 4))
    assert group_norm_kernel.takes(x)
    assert not group_norm_kernel.takes(x.contiguous())
    for silu in (True, False):
        out = group_norm_kernel.launch(x, weight, bias, 8, 1e-6, silu)
        exact = group_norm.group_norm_silu_plain(
            x.double(), weight.double(), bias.double(), 8, 1e-6, silu
        )
        assert out.stride() == x.stride()
        assert relative(out.double(), exact) < LIMITS[dtype]


def test_a_group_far_from_zero_keeps_its_deviation():
    """A sum of squares in float32 would be all that is left of 4000 +- 1."""
    x = (noise(1, 32, 40, 40) + 4000).to(DEVICE).contiguous(memory_format=torch.channels_last)
    ones, zeros = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    out = group_norm_kernel.launch(x, ones, zeros, 4, 1e-6, False)
    exact = torch.nn.functional.group_norm(x.double(), 4, eps=1e-6)
    assert relative(out.double(), exact) < 1e-3
