"""Adapters of kernels, with stand-ins of the same signature: what reaches them, and returns."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.attention.backends import sdpa
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import ByLength
from sglang.multimodal_gen.runtime.layers.attention.backends.flex import FlexAttention
from sglang.multimodal_gen.runtime.layers.attention.backends.libraries import (
    flash_backend,
    flash_fp8_backend,
    sage_backend,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA, TorchSDPA
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse
from sglang.multimodal_gen.runtime.layers.attention.ring import Piece, ring_attention
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.sequence_shard import Run
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


class Calls(list):
    """What reached a stand-in."""

    def answer(self, q, k, v, scale, causal, **more):
        """Of [B, S, H, D], with the log-sum-exp [B, H, S] and some more, as kernels round it."""
        self.append({"shape": tuple(q.shape), "scale": scale, "causal": causal, **more})
        q = q * (scale * math.sqrt(q.shape[-1]))
        out, lse = attend_with_lse(q, k, v, mask=None, causal=causal)
        return out, torch.nn.functional.pad(lse.transpose(1, 2), (0, 3))


def flash2(calls):
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                        window_size=(-1, -1), return_attn_probs=False):  # fmt: skip
        assert dropout_p == 0.0
        found = calls.answer(q, k, v, softmax_scale, causal)
        return (*found, None) if return_attn_probs else found[0]

    return flash_backend("fa2", flash_attn_func)


def flash3(calls):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                        k_descale=None, v_descale=None, return_attn_probs=False):  # fmt: skip
        assert q_descale is None
        found = calls.answer(q, k, v, softmax_scale, causal)
        return found if return_attn_probs else found[0]

    return flash_backend("fa3", flash_attn_func, (torch.bfloat16,))


def flash4(calls):
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                        window_size=(None, None), return_lse=False):  # fmt: skip
        assert qv is None
        return calls.answer(q, k, v, softmax_scale, causal)

    return flash_backend("fa4", flash_attn_func)


def flash3_fp8(calls):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                        k_descale=None, v_descale=None, return_attn_probs=False):  # fmt: skip
        assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
        wide = [
            x.float() * scale[:, None, :, None]
            for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))
        ]
        found = calls.answer(*wide, softmax_scale, causal, scales=q_descale.shape)
        return found if return_attn_probs else found[0]

    return flash_fp8_backend("fa3_fp8", flash_attn_func)


def sage2(calls):
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False,
                 **kwargs):  # fmt: skip
        assert tensor_layout == "NHD"
        found = calls.answer(q, k, v, sm_scale, is_causal)
        return found if return_lse else found[0]

    return sage_backend("sage_attn", sageattn)


def sage1(calls):
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True,
                 **kwargs):  # fmt: skip
        assert tensor_layout == "NHD"
        k -= k.mean(1, keepdim=True)
        return calls.answer(q, k, v, sm_scale, is_causal)[0]

    return sage_backend("sage_attn", sageattn)


BACKENDS = (flash2, flash3, flash4, flash3_fp8, sage2, sage1)
LIMITS = {flash3_fp8: 6e-2}


def inputs(length=12, keys=12, width=64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, n, 3, width) for n in (length, keys, keys))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def off(measured, expected):
    return ((measured - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
def test_the_kernel_is_reached_and_agrees(make):
    calls, (q, k, v) = Calls(), inputs()
    backend, limit = make(calls), LIMITS.get(make, 1e-6)
    for causal in (False, True):
        layer = USPAttention(causal=causal)
        expected = layer(q, k, v)
        layer.backend = backend
        kept = k.clone()
        assert off(layer(q, k, v), expected) < limit
        assert torch.equal(k, kept)
        assert calls[-1]["shape"] == (2, 12, 3, 64)
        assert calls[-1]["scale"] == pytest.approx(1 / 8)
        assert calls[-1]["causal"] == causal
    assert off(sdpa.attend(q * 1.3, k, v, mask=None, causal=False), layer(q, k, v)) > 0.1
    assert len(calls) == 3
    assert backend.calls == {"kernel": 3}


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
def test_what_kernels_have_no_notion_of_is_torchs(make):
    calls, (q, k, v) = Calls(), inputs(keys=9)
    backend = make(calls)
    mask = torch.rand(2, 1, 1, 9) > 0.4
    assert torch.equal(
        backend.attend(q, k, v, mask=mask, causal=False),
        sdpa.attend(q, k, v, mask=mask, causal=False),
    )
    assert torch.equal(
        backend.attend(q, k, v, mask=None, causal=True),
        sdpa.attend(q, k, v, mask=None, causal=True),
    )
    assert backend.calls == {"torch": 2}
    with pytest.raises(InvalidArgument, match=f"{backend.name}.* wide, and this model's 320"):
        backend.attend(*inputs(width=320), mask=None, causal=False)
    assert not calls


@pytest.mark.parametrize("make", BACKENDS, ids=lambda make: make.__name__)
def test_parts_of_a_ring(make):
    calls, (q, k, v) = Calls(), inputs()
    backend = make(calls)
    if make is sage1:
        assert not backend.gives_lse
        return
    found = backend.attend_with_lse(q, k, v, mask=None, causal=False)
    expected = attend_with_lse(q, k, v, mask=None, causal=False)
    for got, right in zip(found, expected, strict=True):
        assert got.shape == right.shape
        assert off(got, right) < LIMITS.get(make, 1e-6)
    out = ring_attention(q, k, v, [Piece((Run(0, 12),), None)], Group("ring"), backend=backend)
    assert off(out, expected[0]) < LIMITS.get(make, 1e-6)
    assert len(calls) == 2


def test_one_kernel_of_torchs_alone():
    """The CPU has flash and the formula, and no cuDNN: naming that one is no wish for another."""
    q, k, v = inputs()
    expected = sdpa.attend(q, k, v, mask=None, causal=False)
    flash = TorchSDPA("torch_flash_sdpa", SDPBackend.FLASH_ATTENTION)
    assert torch.equal(flash.attend(q, k, v, mask=None, causal=False), expected)
    mask = torch.rand(2, 1, 1, 12) > 0.4
    masked = sdpa.attend(q, k, v, mask=mask, causal=False)
    assert off(flash.attend(q, k, v, mask=mask, causal=False), masked) < 1e-6
    lse = attend_with_lse(q, k, v, mask=None, causal=False)[1]
    assert torch.equal(flash.attend_with_lse(q, k, v, mask=None, causal=False)[1], lse)
    with pytest.raises(RuntimeError, match=r"No (available|viable)"):
        TorchSDPA("efficient", SDPBackend.EFFICIENT_ATTENTION).attend(
            q, k, v, mask=None, causal=False
        )


def test_short_and_long():
    calls = Calls()
    backend = ByLength("auto", SDPA, flash3(calls), 10, (64,))
    for length, width, dtype in ((9, 64, "bfloat16"), (12, 32, "bfloat16"), (12, 64, "float32")):
        q, k, v = (x.to(getattr(torch, dtype)) for x in inputs(length, width=width))
        backend.attend(q, k, v, mask=None, causal=False)
        backend.attend_with_lse(q, k, v, mask=None, causal=False)
    assert not calls
    q, k, v = (x.bfloat16() for x in inputs())
    backend.attend(q, k, v, mask=None, causal=False)
    backend.attend_with_lse(q, k, v, mask=None, causal=False)
    assert len(calls) == 2
    assert backend.gives_lse
    assert backend.graph_safe


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex():
    q, k, v = inputs(keys=9)
    backend = FlexAttention(compiled=False)
    mask = torch.rand(2, 1, 1, 9) > 0.4
    by_query = torch.rand(1, 3, 12, 9) > 0.4
    for seen, causal in ((mask, False), (by_query, False), (None, True), (None, False)):
        expected = sdpa.attend(q, k, v, mask=seen, causal=causal)
        assert off(backend.attend(q, k, v, mask=seen, causal=causal), expected) < 1e-6
        backend.attend(q, k, v, mask=seen, causal=causal)
    assert backend.masks_made == 3  # once for all layers
    both = mask & torch.ones(12, 9, dtype=torch.bool).tril()
    expected = sdpa.attend(q, k, v, mask=both, causal=False)
    seen = both.any(-1).squeeze(1)  # a query that sees nothing: nan in one, zero in the other
    found = backend.attend(q, k, v, mask=mask, causal=True)
    assert off(found[seen], expected[seen]) < 1e-6
