"""Causal video autoencoders of Diffusers on bands of rows.

Several of them are one design under different names: convolutions that pad frames in front alone
and are handed the last frames of the chunk before, RMS norms over channels, attention within each
frame. The cached frames are bands like everything else, so caching needs no change.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.parallel_conv import convolve_padded_rows, row_window
from sglang.multimodal_gen.runtime.layers.row_shard import RowShards, attend_to_all_rows
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import (
    ROW_BY_ROW,
    TORCH_PLANNERS,
    Planner,
    RowPlan,
    row_by_row,
)

_ROW_BY_ROW = (
    "RMS_norm",
    "Resample",
    "ResidualBlock",
    "MidBlock",
    "UpBlock",
    "DownBlock",
    "ResidualUpBlock",
    "ResidualDownBlock",
    "Encoder3d",
    "Decoder3d",
)
_UNPREFIXED = ("AvgDown3D", "DupUp3D")


def causal_video_planners(library: ModuleType, prefix: str) -> Mapping[type, Planner]:
    """Planners for a Diffusers module whose classes are ``{prefix}CausalConv3d`` and so on.

    Raises:
        AttributeError: it has no such convolution, attention or upsampling.
    """
    planners: dict[type, Planner] = {
        **TORCH_PLANNERS,
        getattr(library, f"{prefix}CausalConv3d"): plan_causal_convolution,
        getattr(library, f"{prefix}AttentionBlock"): lambda _: RowPlan(_attend_in_frames),
        getattr(library, f"{prefix}Upsample"): _plan_upsample,
    }
    names = (*(prefix + name for name in _ROW_BY_ROW), *_UNPREFIXED)
    found = (getattr(library, name, None) for name in names)
    return planners | {cls: row_by_row for cls in found if cls is not None}


def plan_causal_convolution(conv: Any) -> RowPlan:
    """A ``Conv3d`` without padding of its own that pads by ``_padding`` and takes cached frames."""
    if tuple(conv.padding) != (0, 0, 0):
        raise ValueError("pads twice")
    halo = max(row_window(conv, conv._padding[2:4]).halo)
    return RowPlan(_convolve_causally, halo=halo) if halo else ROW_BY_ROW


def _convolve_causally(
    conv: Any, shards: RowShards, x: Tensor, cache_x: Tensor | None = None
) -> Tensor:
    padding = list(conv._padding)
    if cache_x is not None and padding[4] > 0:
        x = torch.cat((cache_x.to(x.device), x), dim=2)
        padding[4] -= cache_x.shape[2]
    return convolve_padded_rows(conv, shards, x, padding)


def _plan_upsample(up: nn.Upsample) -> RowPlan:
    if not up.mode.startswith("nearest"):
        raise ValueError(f"upsamples by {up.mode!r}, which looks at neighbours")
    return ROW_BY_ROW


def _attend_in_frames(block: Any, shards: RowShards, x: Tensor) -> Tensor:
    """One-headed attention over the pixels of each frame of [B, C, T, h, W]."""
    batch, channels, frames, height, width = x.shape
    images = x.transpose(1, 2).flatten(0, 1)
    q, k, v = block.to_qkv(block.norm(images)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
    mixed = attend_to_all_rows(q, k, v, shards)
    out = block.proj(mixed.transpose(1, 2).reshape(images.shape))
    return out.view(batch, frames, channels, height, width).transpose(1, 2) + x
