"""Each kernel against its plain twin in float64; on a CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sglang.multimodal_gen.runtime.layers.attention.split_sequence import empty_message, places
from sglang.multimodal_gen.runtime.layers.ops import norm_modulate as norm
from sglang.multimodal_gen.runtime.layers.ops import qk_norm_rotary as qk
from sglang.multimodal_gen.runtime.layers.ops.triton import (
    norm_modulate_kernel,
    qk_norm_rotary_kernel,
)
from sglang.multimodal_gen.runtime.layers.rotary_embedding import axial_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def relative_l2(measured, expected):
    return ((measured.double() - expected.double()).norm() / expected.double().norm()).item()


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def norm_inputs(batch, rows, dim, dtype):
    # Conditioning arrives as slices of one linear's output: strided over the batch.
    conditioning = random(batch, 1, 3 * dim, dtype=dtype, seed=1)
    shift, scale, gate = conditioning.chunk(3, dim=-1)
    x = random(batch, rows, dim, dtype=dtype, seed=2) + 1
    return x, gate, random(batch, rows, dim, dtype=dtype, seed=3), shift, scale


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(1, 5, 64), (2, 3, 48), (1, 2, 3072)])
def test_norm_modulate(shape, dtype):
    x, gate, update, shift, scale = norm_inputs(*shape, dtype)
    exact = norm.add_gated_norm_modulate_plain(
        *(t.double() for t in (x, gate, update, shift, scale))
    )
    total, normed = norm_modulate_kernel.launch(x, gate, update, shift, scale, norm.EPS)
    assert relative_l2(total, exact[0]) < LIMITS[dtype]
    assert relative_l2(normed, exact[1]) < LIMITS[dtype]
    plain = norm.norm_modulate_plain(x.double(), shift.double(), scale.double())
    _, alone = norm_modulate_kernel.launch(x, None, None, shift, scale, norm.EPS)
    assert relative_l2(alone, plain) < LIMITS[dtype]
    assert relative_l2(alone, exact[1]) > 0.1  # the update matters
    summed, _ = norm_modulate_kernel.launch(x, gate, update, None, None, norm.EPS)
    assert torch.equal(summed, total)


@pytest.mark.parametrize("each_row", [False, True])
def test_modulation_may_be_wider_than_the_rows_and_differ_between_them(each_row):
    """float32 beside bfloat16, as a table of scales makes it: [B, S, 6, D], or [B, 1, 6, D]."""
    x, update = (random(2, 5, 48, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    table = random(2, 5 if each_row else 1, 3, 48, dtype=torch.float32, seed=1)
    shift, scale, gate = table.unbind(-2)
    total, normed = norm_modulate_kernel.launch(x, gate, update, shift, scale, 1e-4)
    twin = norm.add_gated_norm_modulate_plain(x, gate, update, shift, scale, 1e-4)
    exact = norm.add_gated_norm_modulate_plain(
        *(t.double() for t in (x, gate, update, shift, scale)), 1e-4
    )
    for got, plain, right in zip((total, normed), twin, exact, strict=True):
        assert got.dtype == plain.dtype == torch.bfloat16
        assert max(relative_l2(got, right), relative_l2(plain, right)) < LIMITS[torch.bfloat16]
    first_row = (t[:, :1] for t in (gate, shift, scale))
    gate, shift, scale = first_row
    _, other = norm_modulate_kernel.launch(x, gate, update, shift, scale, 1e-4)
    assert torch.equal(other, normed) is not each_row


def test_an_affine_norm_after_a_sum_without_a_gate():
    x, _, update, _, _ = norm_inputs(2, 3, 48, torch.float32)
    weight, bias = random(48, dtype=torch.float32, seed=4), random(48, dtype=torch.float32, seed=5)
    found = norm_modulate_kernel.launch(x, None, update, bias, weight, 1e-3, True)
    summed = x.double() + update
    exact = torch.nn.functional.layer_norm(summed, (48,), weight.double(), bias.double(), 1e-3)
    twin = norm.add_gated_norm_modulate_plain(x, None, update, bias, weight, 1e-3, True)
    for total, normed in (found, twin):
        assert relative_l2(total, summed) < LIMITS[torch.float32]
        assert relative_l2(normed, exact) < LIMITS[torch.float32]
    assert relative_l2(norm_modulate_kernel.launch(x, None, update, bias, weight, 1e-6, True)[1],
                       exact) > LIMITS[torch.float32]  # fmt: skip


def test_norm_modulate_takes_a_slice_of_a_longer_sequence():
    x, _, _, shift, scale = norm_inputs(2, 7, 64, torch.float32)
    _, whole = norm_modulate_kernel.launch(x, None, None, shift, scale, norm.EPS)
    _, part = norm_modulate_kernel.launch(x[:, 3:], None, None, shift, scale, norm.EPS)
    assert torch.equal(part, whole[:, 3:])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim", "groups"), [(1, 5, 3, 16, 1), (2, 3, 24, 128, 4)]
)
def test_qk_norm_rotary(batch, length, heads, dim, groups, dtype):
    # q, k and v as one product makes them: heads of a longer row.
    rows = random(batch, length, 3 * heads * dim, dtype=dtype)
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in rows.chunk(3, dim=-1))
    q_weight, k_weight = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    ids = torch.stack((torch.arange(length), torch.arange(length) * 3), dim=1).float()
    rotary = axial_rotary(ids, (dim // 2, dim // 2), 10_000.0)
    cos, sin = rotary.cos.to(DEVICE), rotary.sin.to(DEVICE)
    # Packed as ranks exchange heads, with room for another stream before.
    message = empty_message(rows.new_empty(batch, 0, heads, dim), length + 2, 3, groups).zero_()
    outs = [place[:, 2:] for place in places(message)]
    qk_norm_rotary_kernel.launch(q, k, v, q_weight, k_weight, cos, sin, 1e-6, *outs)
    exact = [torch.empty(outs[0].shape, device=DEVICE) for _ in range(3)]
    floats = (x.float() for x in (q, k, v, q_weight, k_weight))
    qk.qk_norm_rotary_plain(*floats, cos, sin, 1e-6, *exact)
    for got, expected in zip(outs, exact, strict=True):
        assert relative_l2(got, expected) < LIMITS[dtype]
    assert torch.equal(outs[2].flatten(2, 3), v)
    assert not message[:, :2].any()  # the other stream's room is untouched
    unrotated = torch.nn.functional.rms_norm(q.float(), (dim,), q_weight.float(), 1e-6)
    assert relative_l2(outs[0].flatten(2, 3), unrotated) > 0.1
    # Channels that lie apart, and a table that is a part of a wider one.
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    wide = [torch.cat((x, x), dim=1)[:, : dim // 2] for x in (cos, sin)]
    expected = [out.clone() for out in outs]
    message.zero_()
    qk_norm_rotary_kernel.launch(*apart, q_weight, k_weight, *wide, 1e-6, *outs)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    # Without values: theirs stays as it was.
    message.zero_()
    qk_norm_rotary_kernel.launch(q, k, None, q_weight, k_weight, cos, sin, 1e-6, *outs[:2], None)
    assert relative_l2(outs[0], exact[0]) < LIMITS[dtype]
    assert not outs[2].any()


@pytest.mark.parametrize("dtype", LIMITS)
def test_queries_and_keys_are_normed_across_heads(dtype):
    batch, length, heads, dim = 2, 3, 3, 16  # a tile has four heads, one of which is none
    rows = random(batch, length, 3 * heads * dim, dtype=dtype)
    rows = rows * torch.arange(1, 1 + rows.shape[-1], device=DEVICE)  # heads differ in size
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in rows.to(dtype).chunk(3, dim=-1))
    q_weight, k_weight = (random(heads * dim, dtype=dtype, seed=seed) for seed in (1, 2))
    ids = torch.arange(length)[:, None].float()
    cos, sin = (x.to(DEVICE) for x in axial_rotary(ids, (dim,), 10_000.0))
    found, exact = (
        [torch.zeros(batch, length, heads, 1, dim, dtype=kind, device=DEVICE) for _ in "qkv"]
        for kind in (dtype, torch.float32)
    )
    qk_norm_rotary_kernel.launch(q, k, v, q_weight, k_weight, cos, sin, 1e-6, *found)
    floats = [x.float() for x in (q, k, v, q_weight, k_weight)]
    qk.qk_norm_rotary_plain(*floats, cos, sin, 1e-6, *exact)
    for got, expected in zip(found, exact, strict=True):
        assert relative_l2(got, expected) < LIMITS[dtype]
    normed = torch.nn.functional.rms_norm(floats[0].flatten(2), (heads * dim,), floats[3], 1e-6)
    assert relative_l2(exact[0][:, :1].flatten(2), normed[:, :1]) < 1e-6  # no turn at position 0
    qk.qk_norm_rotary_plain(*floats[:3], *(w[:dim] for w in floats[3:]), cos, sin, 1e-6, *exact)
    assert relative_l2(found[0], exact[0]) > 0.1  # over each head it is another


def test_operators_answer_by_device():
    """The dispatcher takes the twin on the CPU: same bits."""
    x, gate, update, shift, scale = (t.cpu() for t in norm_inputs(1, 4, 32, torch.float32))
    plain = norm.add_gated_norm_modulate_plain(x, gate, update, shift, scale)
    fused = norm.add_gated_norm_modulate(x, gate, update, shift, scale)
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


def test_operators_have_gradients():
    """Those of the plain twin: a kernel has none."""
    x, shift, scale = (torch.randn(2, s, 8, requires_grad=True) for s in (5, 1, 1))
    fused = norm.norm_modulate(x, shift, scale).square().sum()
    found = torch.autograd.grad(fused, (x, shift, scale))
    plain = norm.norm_modulate_plain(x, shift, scale).square().sum()
    expected = torch.autograd.grad(plain, (x, shift, scale))
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)
