"""Attention's inputs in eight bits: a scale for each head of each image."""

from __future__ import annotations

from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3_MAX, to_e4m3
from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator

SMALLEST = 1e-12
"""Stands for the largest value of a head of zeros."""


def quantize_heads_plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, S, H, D] in e4m3, contiguous, and what gives the values back: [B, H] float32."""
    largest = x.abs().amax(dim=(1, 3), keepdim=True).float().clamp_min(SMALLEST)
    scale = largest / E4M3_MAX
    return to_e4m3(x, scale), scale[:, 0, :, 0]


def _launch(x: Tensor) -> tuple[Tensor, Tensor]:
    # Triton is imported by the first kernel that runs: a second that no CPU should wait.
    from sglang.multimodal_gen.runtime.layers.ops.triton import quantize_heads_kernel

    return quantize_heads_kernel.launch(x, SMALLEST)


quantize_heads = fused_operator(
    "quantize_heads(Tensor x) -> (Tensor, Tensor)", quantize_heads_plain, _launch
)
