"""RMS norm over the channels of a map, and SiLU after it, in one pass over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator

EPS = 1e-12
"""The least norm to divide by, as in ``torch.nn.functional.normalize``."""


def channel_rms_norm_plain(x: Tensor, gamma: Tensor, out: Tensor, scale: float, silu: bool) -> None:
    """Write ``normalize(x) * scale * gamma`` over channels, or SiLU of it, into ``out``.

    x and out are [B, C, ...], gamma has C numbers. ``out`` may be part of a larger map.
    Half precision is normalised in float32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = F.normalize(wide, dim=1, eps=EPS).to(x.dtype)
    normed = normed * scale * gamma.view(-1, *(1,) * (x.ndim - 2))
    out.copy_(F.silu(normed) if silu else normed)


def _launch(x: Tensor, gamma: Tensor, out: Tensor, scale: float, silu: bool) -> None:
    # Triton is imported by the first kernel that runs: a second that no CPU should wait.
    from sglang.multimodal_gen.runtime.layers.ops.triton import channel_norm_kernel

    if not channel_norm_kernel.takes(x, out):
        channel_rms_norm_plain(x, gamma, out, scale, silu)
    else:
        channel_norm_kernel.launch(x, gamma, out, scale, EPS, silu)


channel_rms_norm = fused_operator(
    "channel_rms_norm(Tensor x, Tensor gamma, Tensor(a!) out, float scale, bool silu) -> ()",
    channel_rms_norm_plain,
    _launch,
)
