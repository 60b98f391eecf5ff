"""Diffusers' image autoencoders on bands of rows: their blocks, resampling and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import (
    DownEncoderBlock2D,
    UNetMidBlock2D,
    UpDecoderBlock2D,
)
from diffusers.models.upsampling import Upsample2D
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

_BELOW_AND_RIGHT = (0, 1, 0, 1)
"""How the encoder pads before a convolution halves the map."""


def _plan_resnet(block: ResnetBlock2D) -> RowPlan:
    for resampling in (block.upsample, block.downsample):
        if resampling is not None and not isinstance(resampling, nn.Module):
            raise ValueError("resamples with a filter")
    return ROW_BY_ROW


def _plan_upsample(up: Upsample2D) -> RowPlan:
    """Nearest neighbours, then a convolution among its children."""
    if up.use_conv_transpose or up.norm is not None:
        raise ValueError("upsamples with a transposed convolution, or normalises before it")
    return ROW_BY_ROW


def _plan_downsample(down: Downsample2D) -> RowPlan:
    if down.norm is not None or not isinstance(down.conv, nn.Conv2d):
        raise ValueError("downsamples without a convolution, or normalises before it")
    if down.padding != 0:
        return ROW_BY_ROW  # its convolution pads, and is planned by itself
    halo = max(row_window(down.conv, _BELOW_AND_RIGHT[2:]).halo)
    return RowPlan(_downsample, covers_children=True, halo=halo)


def _downsample(down: Downsample2D, shards: RowShards, x: Tensor) -> Tensor:
    assert isinstance(down.conv, nn.Conv2d)
    return convolve_padded_rows(down.conv, shards, x, _BELOW_AND_RIGHT)


def _plan_attention(attention: Attention) -> RowPlan:
    unusual = (
        attention.spatial_norm is not None
        or attention.norm_cross is not None
        or attention.added_kv_proj_dim is not None
        or attention.fused_projections
    )
    if unusual or type(attention.processor) not in (AttnProcessor, AttnProcessor2_0):
        raise ValueError("is more than self-attention over pixels")
    return RowPlan(_attend)


def _attend(
    attention: Any, shards: RowShards, hidden_states: Tensor, temb: Tensor | None = None
) -> Tensor:
    """Self-attention over the pixels of a map [B, C, h, W]; ``temb`` belongs to spatial norms."""
    tokens = hidden_states.flatten(2)
    if attention.group_norm is not None:
        tokens = attention.group_norm(tokens)
    tokens = tokens.transpose(1, 2)
    q, k, v = (
        projection(tokens).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    if attention.norm_q is not None:
        q = attention.norm_q(q)
    if attention.norm_k is not None:
        k = attention.norm_k(k)
    mixed = attend_to_all_rows(q, k, v, shards).transpose(1, 2).flatten(2)
    for layer in attention.to_out:
        mixed = layer(mixed)
    out = mixed.transpose(1, 2).reshape(hidden_states.shape)
    if attention.residual_connection:
        out = out + hidden_states
    return out / attention.rescale_output_factor


IMAGE_PLANNERS: Mapping[type, Planner] = {
    **TORCH_PLANNERS,
    ResnetBlock2D: _plan_resnet,
    Upsample2D: _plan_upsample,
    Downsample2D: _plan_downsample,
    Attention: _plan_attention,
    **dict.fromkeys(
        (Encoder, Decoder, UNetMidBlock2D, DownEncoderBlock2D, UpDecoderBlock2D), row_by_row
    ),
}
"""Exact types of the blocks of ``AutoencoderKL`` and its kin."""
