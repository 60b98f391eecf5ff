"""Attention with its log-sum-exp, beside the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.multimodal_gen.runtime.layers.attention.backends import with_lse
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def formula(q, k, v, mask=None, causal=False):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    out = scores.softmax(-1).nan_to_num(nan=0.0) @ v
    return out.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def inputs(length=11, keys=7, heads=3, width=8, batch=2, **where):
    generator = torch.Generator().manual_seed(0)
    shapes = (length, keys, keys)
    return [torch.randn(batch, n, heads, width, generator=generator).to(**where) for n in shapes]


def relative(measured, expected):
    return ((measured.double() - expected).norm() / expected.norm()).item()


def key_mask(batch=2, keys=7, device="cpu"):
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
    mask[0, ..., keys // 2 :] = False
    return mask


@pytest.mark.parametrize("rows_at_a_time", [1, 4, 1000])
@pytest.mark.parametrize("masked", [False, True])
def test_the_formula_in_any_number_of_rows(monkeypatch, rows_at_a_time, masked):
    q, k, v = inputs()
    monkeypatch.setattr(with_lse, "MAX_SCORES", rows_at_a_time * 2 * 3 * 7)
    mask = key_mask() if masked else None
    out, lse = attend_with_lse(q, k, v, mask=mask, causal=False)
    expected = formula(q, k, v, mask)
    assert relative(out, expected[0]) < 1e-6
    assert relative(lse, expected[1]) < 1e-6


@pytest.mark.parametrize("rows_at_a_time", [2, 1000])
def test_causal_rows_know_where_they_stand(monkeypatch, rows_at_a_time):
    q, k, v = inputs(length=7)
    monkeypatch.setattr(with_lse, "MAX_SCORES", rows_at_a_time * 2 * 3 * 7)
    out, lse = attend_with_lse(q, k, v, mask=None, causal=True)
    expected = formula(q, k, v, causal=True)
    assert relative(out, expected[0]) < 1e-6
    assert relative(lse, expected[1]) < 1e-6


def test_a_query_that_sees_nothing_is_zero_and_has_no_weight():
    q, k, v = inputs()
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1] = False
    out, lse = attend_with_lse(q, k, v, mask=mask, causal=False)
    assert not out[1].any()
    assert torch.isneginf(lse[1]).all()
    assert torch.isfinite(lse[0]).all()


def test_half_precision_is_computed_in_single():
    q, k, v = inputs(dtype=torch.bfloat16)
    out, lse = attend_with_lse(q, k, v, mask=None, causal=False)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert relative(lse, formula(q, k, v)[1]) < 1e-6


@on_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("length", "keys"), [(300, 300), (257, 129)])
def test_kernels_on_a_gpu_tell_what_the_formula_says(length, keys, dtype, limit, masked):
    q, k, v = inputs(length, keys, 4, 128, device="cuda", dtype=dtype)
    mask = key_mask(keys=keys, device="cuda") if masked else None
    for k_, v_ in ((k, v), torch.stack((k, v), 2).unbind(2)):  # and as a packed message leaves them
        out, lse = attend_with_lse(q, k_, v_, mask=mask, causal=False)
        expected = formula(q, k, v, mask)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]
        assert relative(out, expected[0]) < limit
        assert relative(lse, expected[1]) < limit


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_piece_that_nobody_sees_has_no_weight(dtype):
    q, k, v = inputs(64, 64, 4, 128, device="cuda", dtype=dtype)
    mask = torch.zeros(2, 1, 1, 64, dtype=torch.bool, device="cuda")
    out, lse = attend_with_lse(q, k, v, mask=mask, causal=False)
    assert torch.isfinite(out).all()
    assert (lse < -1e4).all()
