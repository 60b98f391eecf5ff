"""Operations and memory are counted as a machine that has them would."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.planning.dry_run import BLOCK, DryRun

HALF = {"device": "meta", "dtype": torch.bfloat16}


def total(tally, kind):
    return sum(kernel.flops for kernel in tally.kernels if kernel.kind == kind)


@torch.inference_mode()
def test_a_linear_is_a_product_and_its_result_is_memory_until_it_dies():
    linear = nn.Linear(64, 256, device="meta", dtype=torch.bfloat16)
    x = torch.empty(2, 8, 64, **HALF)
    with DryRun() as run:
        tally = run.start()
        first = linear(x)
        assert total(tally, "product") == 2 * 16 * 64 * 256
        assert run.live == tally.peak_bytes == 16 * 256 * 2
        second = first + 1
        view = second.view(16, 256)
        assert run.live == 2 * 16 * 256 * 2, "a view is no memory"
        del first
        assert run.live == 16 * 256 * 2
        del second
        assert run.live == 16 * 256 * 2, "the view keeps it"
        del view
        assert run.live == 0
        again = run.start()
        small = x[0, 0] * 2
        assert again.peak_bytes == BLOCK, "the allocator hands out whole blocks"
        del small
    assert tally.peak_bytes == 2 * 16 * 256 * 2


@torch.inference_mode()
def test_attention_keeps_no_scores():
    q, k, v = (torch.empty(1, 4, length, 32, **HALF) for length in (100, 300, 300))
    with DryRun() as run:
        tally = run.start()
        out = F.scaled_dot_product_attention(q, k, v)
        assert out.shape == q.shape
        assert [kernel.kind for kernel in tally.kernels] == ["attention"]
        assert total(tally, "attention") == 4 * 4 * 100 * 300 * 32
        assert tally.peak_bytes == q.nbytes


@torch.inference_mode()
def test_values_that_are_asked_for_stand_in():
    x = torch.empty(3, device="meta")
    with DryRun():
        assert torch.isfinite(x).all()
        assert x.tolist() == [0, 0, 0]
        assert x.cpu().device.type == "cpu"
        assert x.to("cpu", torch.float64).sum() == 0
    with pytest.raises(Exception, match="meta"):
        x.tolist()


@torch.inference_mode()
def test_flux_has_the_operations_that_are_known_of_it():
    """59.5 TFLOP in products and 14.9 in attention at 1024x1024 and 512 tokens of text."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    with DryRun() as run:
        rotary = model.rotary_embedding(512, 64, 64)
        tally = run.start()
        model(
            torch.empty(1, 4096, 64, **HALF),
            torch.empty(1, 512, 4096, **HALF),
            torch.empty(1, 768, **HALF),
            torch.empty(1, device="meta"),
            torch.empty(1, device="meta"),
            rotary=rotary,
            modulation=torch.empty(1, sum(model.modulation_widths), **HALF),
        )
    assert total(tally, "product") == pytest.approx(59.5e12, rel=1e-3)
    assert total(tally, "attention") == pytest.approx(14.87e12, rel=1e-3)


@torch.inference_mode()
def test_a_convolution_in_sixteen_bits_needs_room_to_change_layout():
    def counted(x, dtype):
        conv = nn.Conv2d(8, 16, 3, padding=1, device="meta", dtype=dtype)
        with DryRun() as run:
            tally = run.start()
            conv(x)
        return tally

    shape, out = (1, 8, 64, 64), 16 * 64 * 64
    half = torch.empty(shape, **HALF)
    tally = counted(half, torch.bfloat16)
    assert tally.peak_bytes == 2 * out + (half.nbytes + 2 * out)
    assert [kernel.kind for kernel in tally.kernels] == ["product", "elementwise"]
    last = half.to(memory_format=torch.channels_last)
    assert counted(last, torch.bfloat16).peak_bytes == 2 * out, "it has its layout"
    whole = torch.empty(shape, device="meta")
    assert counted(whole, torch.float32).peak_bytes == 4 * out


@torch.inference_mode()
def test_upsampling_is_one_kernel_without_copies():
    x = torch.empty(1, 8, 32, 32, **HALF)
    for arguments in ({"scale_factor": 2.0}, {"size": (64, 64)}):
        with DryRun() as run:
            tally = run.start()
            assert F.interpolate(x, mode="nearest", **arguments).shape == (1, 8, 64, 64)
        assert len(tally.kernels) == 1
        assert tally.peak_bytes == 4 * x.nbytes
