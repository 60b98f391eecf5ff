"""Attention kernels of other libraries, called by what their public functions are named.

Facts of the calls: FlashAttention 2 (``flash_attn``), 3 (``fa3_fwd_interface``, or
``flash_attn_interface`` built from source) and 4 (``flash_attn.cute``) take [B, S, H, D] and give
the log-sum-exp as [B, H, S]; SageAttention (1 and 2) takes that layout as ``NHD``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.attention.backends.backend import KernelBackend
from sglang.multimodal_gen.runtime.layers.ops.quantize_heads import quantize_heads

HALF = (torch.bfloat16, torch.float16)
FLASH_WIDTH = 256
SAGE_WIDTHS = (64, 96, 128)
_LSE_ARGUMENTS = ("return_attn_probs", "return_lse")


def flash_backend(
    name: str, function: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = HALF
) -> KernelBackend:
    """FlashAttention of any version by its ``flash_attn_func``."""
    lse = _lse_argument(function)

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(function(q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=causal))

    def with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scale, wish = q.shape[-1] ** -0.5, {lse: True}
        return _with_lse(q, function(q, k, v, softmax_scale=scale, causal=causal, **wish))

    return KernelBackend(name, kernel, with_lse if lse else None, dtypes, (FLASH_WIDTH,))


def flash_fp8_backend(name: str, function: Callable[..., Any]) -> KernelBackend:
    """FlashAttention 3 on 8-bit q, k and v, each head of each image with a scale of its own."""
    lse = _lse_argument(function)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, **wish: bool) -> Any:
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize_heads(x) for x in (q, k, v))
        return function(
            q8, k8, v8, softmax_scale=q.shape[-1] ** -0.5, causal=causal,
            q_descale=q_scale, k_descale=k_scale, v_descale=v_scale, **wish,
        )  # fmt: skip

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _first(call(q, k, v, causal)).to(q.dtype)

    def with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, sums = _with_lse(q, call(q, k, v, causal, **{lse: True}))
        return out.to(q.dtype), sums

    return KernelBackend(name, kernel, with_lse if lse else None, HALF, (FLASH_WIDTH,))


def sage_backend(name: str, function: Callable[..., Any]) -> KernelBackend:
    """SageAttention by its ``sageattn``; the first version tells no log-sum-exp."""
    tells = "return_lse" in inspect.signature(function).parameters

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        # The first version takes the mean off the keys it is given, in place.
        own_k = k if tells else k.clone()
        scale = q.shape[-1] ** -0.5
        return function(q, own_k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale)

    def with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found = function(
            q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=q.shape[-1] ** -0.5,
            return_lse=True,
        )  # fmt: skip
        return _with_lse(q, found)

    return KernelBackend(name, kernel, with_lse if tells else None, HALF, SAGE_WIDTHS)


def _lse_argument(function: Callable[..., Any]) -> str:
    """The argument that asks for the log-sum-exp; empty where there is none."""
    known = inspect.signature(function).parameters
    return next((name for name in _LSE_ARGUMENTS if name in known), "")


def _first(found: Any) -> Tensor:
    """Some versions give the log-sum-exp unasked."""
    return found[0] if isinstance(found, tuple) else found


def _with_lse(q_BSHD: Tensor, found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp as rings want it; kernels may have rounded its length up."""
    return found[0], found[1][..., : q_BSHD.shape[1]].transpose(1, 2)
