"""Causal video autoencoders of Diffusers on channels-last maps, with fewer passes over memory.

A convolution over frames needs the last frames of the chunk before it in front of its own. The norm
and the SiLU before the convolution write into the place behind them, so that nothing is joined or
padded by copying; rows and columns are padded by the convolution itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.ops.channel_norm import channel_rms_norm
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import (
    Chooser,
    Forward,
    channels_last,
)

FRAMES = 2


class InFront(Enum):
    """In place of a convolution's cached frames: they stand in front of its input already."""

    ALREADY = "already"


_REPEATED = "Rep"
"""The library's mark in the cache of a layer that has seen the first chunk, and left it alone."""


def causal_video_forwards(library: ModuleType, prefix: str) -> Mapping[type, Chooser]:
    """Forwards for a Diffusers module whose classes are ``{prefix}CausalConv3d`` and so on."""
    norm = getattr(library, f"{prefix}RMS_norm")
    convolution = getattr(library, f"{prefix}CausalConv3d")
    upsample = getattr(library, f"{prefix}Upsample")

    def plain_norm(module: Any) -> Forward | None:
        fits = module.channel_first and isinstance(module.bias, float)
        return _normalize if fits else None

    def activated(module: Any, norms: Sequence[nn.Module], convs: Sequence[nn.Module]) -> bool:
        return (
            type(module.nonlinearity) is nn.SiLU
            and all(type(m) is norm and plain_norm(m) is not None for m in norms)
            and all(type(m) is convolution and convolve(m) is not None for m in convs)
        )

    def convolve(conv: Any) -> Forward | None:
        left, right, above, below, *time = conv._padding
        usual = conv.padding_mode == "zeros" and set(conv.dilation) == {1}
        if not usual or (left, above) != (right, below):
            return None
        if isinstance(conv, nn.Conv2d):
            return _convolve_picture
        before, after = time
        return _convolve if after == 0 and before in (0, conv.kernel_size[0] - 1) else None

    def residual(block: Any) -> Forward | None:
        layers = (block.norm1, block.norm2), (block.conv1, block.conv2)
        return _residual if activated(block, *layers) and block.dropout.p == 0 else None

    def ends(network: Any) -> Forward | None:
        layers = [network.norm_out], [network.conv_in, network.conv_out]
        return _decode if activated(network, *layers) else None

    def resample(module: Any) -> Forward | None:
        if module.mode not in ("upsample2d", "upsample3d"):
            return None  # the library's halves as they are
        up = module.resample[0]
        twice = type(up) is upsample and tuple(up.scale_factor) == (2.0, 2.0)
        nearest = twice and up.mode in ("nearest", "nearest-exact")
        # `_upsample` hands its convolution in time what only `_convolve` takes.
        in_time = module.mode == "upsample2d" or convolve(module.time_conv) is _convolve
        return _upsample if nearest and in_time else None

    return {
        norm: plain_norm,
        convolution: convolve,
        getattr(library, f"{prefix}ResidualBlock"): residual,
        getattr(library, f"{prefix}Resample"): resample,
        getattr(library, f"{prefix}Decoder3d"): ends,
    }


def _normalize(norm: Any, x: Tensor) -> Tensor:
    x = channels_last(x)
    out = torch.empty_like(x)
    channel_rms_norm(x, norm.gamma, out, norm.scale, False)
    return out


def _convolve(
    conv: Any, x: Tensor, cache_x: Tensor | Literal[InFront.ALREADY] | None = None
) -> Tensor:
    """Zeros stand before the first frame, or the cached frames."""
    weight, before = conv.weight, conv._padding[4]
    if cache_x is None and before and x.shape[FRAMES] == 1:
        weight = weight[:, :, -1:]  # the others are multiplied by zeros
    elif cache_x is not InFront.ALREADY and before:
        room = _room(x, before, cache_x)
        room[:, :, before:].copy_(x)
        x = room
    padding = (0, conv._padding[2], conv._padding[0])
    return F.conv3d(
        channels_last(x), weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups
    )


def _convolve_picture(conv: Any, x: Tensor, cache_x: None = None) -> Tensor:
    """Where clips have one frame, the convolution is one of pictures, and remembers nothing."""
    assert cache_x is None, "it is a picture's"
    padding = (conv._padding[2], conv._padding[0])
    out = F.conv2d(
        channels_last(x.squeeze(FRAMES)),
        *(conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups),
    )
    return out.unsqueeze(FRAMES)


def _frames_before(conv: Any) -> int:
    return 0 if isinstance(conv, nn.Conv2d) else conv._padding[4]


def _residual(
    block: Any, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None
) -> Tensor:
    memory = _Memory(feat_cache, feat_idx)
    x = channels_last(x)
    out = block.conv1(*memory.behind_seen(block.conv1, x, block.norm1))
    normed = memory.behind_seen(block.conv2, out, block.norm2)
    del out  # the peak is in what follows
    out = block.conv2(*normed)
    del normed
    return out.add_(block.conv_shortcut(x))


def _decode(
    decoder: Any,
    x: Tensor,
    feat_cache: list[Any] | None = None,
    feat_idx: list[int] | None = None,
    **first: bool,
) -> Tensor:
    """A decoder's blocks; its first and last convolution have memories of their own."""
    memory = _Memory(feat_cache, feat_idx)
    x = decoder.conv_in(*memory.behind_seen(decoder.conv_in, x))
    x = decoder.mid_block(x, feat_cache=feat_cache, feat_idx=memory.at)
    for block in decoder.up_blocks:
        x = block(x, feat_cache=feat_cache, feat_idx=memory.at, **first)
    return decoder.conv_out(*memory.behind_seen(decoder.conv_out, x, decoder.norm_out))


def _upsample(
    module: Any, x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None
) -> Tensor:
    """Each pixel four times, then a convolution of each frame; before it frames become two.

    The frames' halves are channels of one map: they are put in order as pixels are repeated.
    """
    memory = _Memory(feat_cache, feat_idx)
    times = 1
    if module.mode == "upsample3d" and not memory.skips_first():
        x, times = module.time_conv(*memory.behind_seen(module.time_conv, x)), 2
    batch, _, frames, height, width = x.shape
    pixels = channels_last(x).movedim(1, -1).unflatten(-1, (times, -1))  # [B, T, h, w, times, C]
    few = pixels.movedim(-2, 2)[:, :, :, :, None, :, None]
    many = few.expand(-1, -1, -1, -1, 2, -1, 2, -1)
    pictures = many.reshape(batch * frames * times, 2 * height, 2 * width, -1).movedim(-1, 1)
    out = module.resample[1](pictures)
    return out.unflatten(0, (batch, frames * times)).movedim(1, 2)


class _Memory:
    """What the convolutions of a network saw last, in the library's list; None of single maps.

    Each has as many frames as its convolution looks back, zeros where there were none.
    """

    def __init__(self, seen: list[Any] | None, at: list[int] | None) -> None:
        self.seen, self.at = seen, [0] if at is None else at

    def skips_first(self) -> bool:
        """Whether the layer whose turn it is leaves these frames alone: they are the first."""
        if self.seen is None:
            return True
        if self.seen[self.at[0]] is not None:
            return False
        self.seen[self.at[0]] = _REPEATED
        self.at[0] += 1
        return True

    def behind_seen(self, conv: Any, x: Tensor, norm: Any = None) -> tuple[Any, ...]:
        """Arguments for ``conv``: x, or the SiLU of its norm, behind what ``conv`` saw last.

        What it will have seen is remembered.
        """
        before = _frames_before(conv)
        seen = None if self.seen is None else self.seen[self.at[0]]
        seen = None if isinstance(seen, str) else seen
        alone = before == 0 or (seen is None and x.shape[FRAMES] == 1)
        room = _room(x, 0 if alone else before, seen)
        place = room if alone else room[:, :, before:]
        if norm is None:
            place.copy_(x)
        else:
            channel_rms_norm(channels_last(x), norm.gamma, place, norm.scale, True)
        if self.seen is not None:
            self.seen[self.at[0]] = seen = None
            self.seen[self.at[0]] = room if alone else room[:, :, -before:].clone()
            self.at[0] += 1
        return (room,) if alone else (room, InFront.ALREADY)


def _room(x: Tensor, before: int, seen: Tensor | None) -> Tensor:
    """An empty channels-last map like x behind ``before`` frames: those seen last, or zeros."""
    batch, channels, frames, height, width = x.shape
    room = torch.empty(
        (batch, channels, before + frames, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last_3d,
    )
    if before:
        known = 0 if seen is None else min(before, seen.shape[FRAMES])
        room[:, :, : before - known].zero_()
        if seen is not None:
            room[:, :, before - known : before].copy_(seen[:, :, -known:])
    return room
