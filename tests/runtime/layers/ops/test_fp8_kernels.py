"""The kernels that quantise, and the few-row product, against their plain twins.

On a CPU in Triton's interpreter, which rounds to e4m3 otherwise than torch: there what is about to
be rounded is compared, as float32.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sglang.multimodal_gen.runtime.layers.ops import fp8_rows, quantize_heads
from sglang.multimodal_gen.runtime.layers.ops import norm_modulate as norm
from sglang.multimodal_gen.runtime.layers.ops.triton import (
    few_rows_kernel,
    norm_modulate_kernel,
    quantize_heads_kernel,
    quantize_rows_kernel,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def relative_l2(measured, expected):
    return ((measured.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("gelu", [False, True])
def test_rows_are_scaled_to_the_largest_value(gelu):
    x = random(2, 5, 96, dtype=torch.bfloat16)[..., :80]  # rows with a gap between them
    values, scale = quantize_rows_kernel.launch(None, x, gelu, torch.float32)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh") if gelu else x.double()
    exact = exact.reshape(10, 80)
    assert values.shape == (10, 80)
    assert scale.shape == (10, 1)
    assert relative_l2(values.double() * scale.double(), exact) < 1e-6
    torch.testing.assert_close(values.abs().amax(-1), torch.full((10,), 448.0, device=DEVICE))
    plain, plain_scale = fp8_rows.quantize_rows_plain(x, gelu)
    torch.testing.assert_close(scale, plain_scale, rtol=1e-5, atol=0)
    assert relative_l2(plain.double() * plain_scale, exact) < 0.03
    assert relative_l2(plain.double(), exact) > 0.5  # the scale matters


def test_two_inputs_share_a_rows_scale():
    left, right = random(1, 6, 32), 3 * random(1, 6, 80, seed=1)
    values, scale = quantize_rows_kernel.launch(left, right, True, torch.float32)
    gelu = torch.nn.functional.gelu(right.double(), approximate="tanh")
    exact = torch.cat((left.double(), gelu), -1)[0]
    assert relative_l2(values.double() * scale, exact) < 1e-6
    plain, plain_scale = fp8_rows.join_rows_plain(left, right, True)
    torch.testing.assert_close(scale, plain_scale, rtol=1e-5, atol=0)
    assert relative_l2(plain.double() * plain_scale, exact) < 0.03


def test_rows_of_zeros_and_of_what_is_no_number():
    x = torch.zeros(3, 48, device=DEVICE)
    x[1, 5], x[2, 7] = float("nan"), 1e-20
    values, scale = quantize_rows_kernel.launch(None, x, False, torch.float32)
    assert not values[0].any()
    assert torch.isfinite(scale[0]).all()
    assert values[1].isnan().any()
    plain, _ = fp8_rows.quantize_rows_plain(x, False)
    assert plain[1].float().isnan().any()
    assert not plain[0].float().any()


@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_hands_on_quantised_rows(gated):
    x, update = random(2, 3, 80, seed=2) + 1, random(2, 3, 80, seed=3)
    shift, scale, gate = random(2, 1, 240, seed=1).chunk(3, dim=-1)
    gates = (gate, update) if gated else (None, None)
    total, normed, values, row_scale = norm_modulate_kernel.launch_rows(
        x, *gates, shift, scale, norm.EPS, values_dtype=torch.float32
    )
    alone = norm_modulate_kernel.launch(x, *gates, shift, scale, norm.EPS)
    assert torch.equal(total, alone[0])
    assert torch.equal(normed, alone[1])
    assert relative_l2(values.double() * row_scale, normed.flatten(0, 1)) < 1e-6
    twin = (
        norm.add_gated_norm_modulate_rows_plain(x, gate, update, shift, scale)[1:]
        if gated
        else norm.norm_modulate_rows_plain(x, shift, scale)
    )
    torch.testing.assert_close(row_scale, twin[2], rtol=1e-5, atol=0)
    torch.testing.assert_close(normed, twin[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter knows
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows(bias, dtype):
    x = random(3, 320, dtype=dtype)
    weight = random(40, 320, seed=1).to(fp8_rows.E4M3).float()
    scale = random(40, seed=2).abs() + 0.1
    added = random(40, seed=3) if bias else None
    found = few_rows_kernel.launch(x, weight, scale, added)
    exact = x.double() @ weight.double().t() * scale + (0 if added is None else added)
    assert relative_l2(found, exact) < (1e-6 if dtype == torch.float32 else 6e-4)
    alone = few_rows_kernel.launch(x[1:2], weight, scale, added)
    assert torch.equal(alone, found[1:2])
    assert relative_l2(fp8_rows.fp8_few_rows_plain(x, weight, scale, added), exact) < 6e-3
    one = few_rows_kernel.launch(x, weight, scale[:1], added)
    assert relative_l2(one, exact) > 0.05


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_torchs_product_reads_scales_as_the_twin_does(by_row, bias):
    """Into a part of a longer buffer, as streams lie end to end."""
    x, weight = random(40, 64), random(48, 64, seed=1)
    added = random(48, seed=2) if bias else None
    rows, row_scale = fp8_rows.quantize_rows_plain(x, False)
    scale = fp8_rows.scale_of(weight.abs().amax(-1))
    if not by_row:
        row_scale, scale = row_scale.amax().reshape(1, 1), scale.amax().reshape(1)
        rows = fp8_rows.to_e4m3(x, row_scale)
    values = fp8_rows.to_e4m3(weight, scale[:, None])
    joint = torch.zeros(50, 48, dtype=torch.bfloat16, device=DEVICE)
    fp8_rows._product_launch(rows, row_scale, values, scale, added, joint[10:])
    plain = torch.empty(40, 48, device=DEVICE)
    fp8_rows.fp8_product_plain(rows, row_scale, values, scale, added, plain)
    assert relative_l2(joint[10:], plain) < 4e-3
    assert not joint[:10].any()
    wide = torch.empty(40, 48, device=DEVICE)
    fp8_rows._product_launch(rows, row_scale, values, scale, added, wide)  # through bfloat16
    assert torch.equal(wide, joint[10:].float())


def test_heads_are_scaled_to_the_largest_value():
    x = random(2, 70, 3, 4, 40, dtype=torch.bfloat16)[:, :, 1]  # a third of a packed product
    x[1, :, 2] = 0
    values, scale = quantize_heads_kernel.launch(x, quantize_heads.SMALLEST, torch.float32)
    plain, plain_scale = quantize_heads.quantize_heads_plain(x.float())
    assert values.shape == x.shape
    assert scale.shape == (2, 4)
    torch.testing.assert_close(scale, plain_scale, rtol=1e-6, atol=0)
    restored = values.double() * scale[:, None, :, None]
    assert relative_l2(restored, x.double()) < 1e-6
    assert relative_l2(plain.double() * plain_scale[:, None, :, None], x.double()) < 0.04
    assert (values[1, :, 2] == 0).all()
    assert (values.abs().amax((1, 3))[0] - 448).abs().max() < 1e-3
    x[0, 3, 1, 5] = torch.nan
    values, _ = quantize_heads_kernel.launch(x, quantize_heads.SMALLEST, torch.float32)
    assert values[0, :, 1].isnan().any()  # told, as the twin does
