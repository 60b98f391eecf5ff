"""Image autoencoders of Diffusers on channels-last maps: their norms and residual blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.ops.group_norm import group_norm_silu
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import (
    Chooser,
    Forward,
    channels_last,
)


def _norm(norm: nn.GroupNorm) -> Forward | None:
    return _normalize if norm.affine else None


def _normalize(norm: Any, x: Tensor, silu: bool = False) -> Tensor:
    return group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu)


def _residual_block(block: Any) -> Forward | None:
    """A block of two norms, activations and convolutions, and no more."""
    plain = (
        all(type(norm) is nn.GroupNorm and norm.affine for norm in (block.norm1, block.norm2))
        and type(block.nonlinearity) is nn.SiLU
        and block.time_emb_proj is None
        and block.time_embedding_norm != "scale_shift"
        and block.upsample is None
        and block.downsample is None
        and block.dropout.p == 0
    )
    return _residual if plain else None


def _residual(block: Any, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
    if temb is not None:
        raise ValueError("this block has nothing that looks at an embedding of time")
    x = channels_last(input_tensor)
    out = block.conv1(block.norm1(x, True))
    out = block.norm2(out, True)
    out = block.conv2(out)
    out.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))
    return out if block.output_scale_factor == 1 else out.div_(block.output_scale_factor)


IMAGE_FORWARDS: Mapping[type, Chooser] = {nn.GroupNorm: _norm, ResnetBlock2D: _residual_block}
"""Of ``AutoencoderKL`` and its kin; other layers keep the order that they are given."""
