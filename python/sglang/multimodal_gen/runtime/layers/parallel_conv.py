"""Convolutions over a picture whose rows are spread over ranks.

A convolution's rows near a band's edge look at the neighbour's rows. The large map is never copied
for that: the layer runs on the band as it is, with its own zero padding, while the neighbours' rows
are on their way; then the few rows at the inner edges are computed again, from a strip that has the
true rows, and written over. Layers that pad by copying anyway get the neighbours' rows written into
the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.row_shard import ROWS, RowShards

Convolution = nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Which input rows the output rows of a convolution look at.

    ``above`` and ``below`` are the zero rows that it puts around the whole picture.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    above: int = 0
    below: int = 0

    @property
    def span(self) -> int:
        """Input rows from the first to the last that one output row looks at."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def keeps_shares(self) -> bool:
        """Whether h rows become exactly h / stride: only then do bands stay the same shares."""
        return -self.stride <= self.above + self.below - self.span <= -1

    @property
    def halo(self) -> tuple[int, int]:
        """How many rows above and below a band its output rows look at."""
        return self.above, max(0, self.span - self.above - self.stride)

    @property
    def touched(self) -> tuple[int, int]:
        """How many output rows at a band's upper and lower edge look beyond it."""
        above, below = self.halo
        return -(-above // self.stride), -(-below // self.stride)


def row_window(conv: Convolution, padding: Sequence[int] | None = None) -> RowWindow:
    """The window of a convolution; ``padding`` is (above, below) where another layer pads.

    Raises:
        ValueError: it pads with something else than zeros, or does not keep bands' shares.
    """
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        raise ValueError(
            f"pads with {conv.padding_mode!r}, {conv.padding!r}; zeros alone are known"
        )
    own = conv.padding[ROWS]
    above, below = (own, own) if padding is None else padding
    window = RowWindow(conv.kernel_size[ROWS], conv.stride[ROWS], conv.dilation[ROWS], above, below)
    if not window.keeps_shares:
        raise ValueError(
            f"{window.kernel} rows with stride {window.stride} and padding {above} above, {below} "
            f"below do not make h rows h / {window.stride}"
        )
    return window


def convolve_rows(conv: Convolution, shards: RowShards, x: Tensor) -> Tensor:
    """What ``conv`` makes of the whole map, this rank's rows: ``x`` is its band [..., h, W].

    One exchange, of a few rows, which runs beside the convolution of the band.
    """
    window = row_window(conv)
    above, below = window.halo
    height = x.shape[ROWS]
    _check_stride(height, window)
    edges = shards.exchange_edges(x, above, below)
    if height < 2 * window.span:  # all of it is edge
        edges.wait()
        rows = [
            _zeros_like(x, above) if edges.above is None else edges.above,
            x,
            _zeros_like(x, below) if edges.below is None else edges.below,
        ]
        return _convolve_inside(conv, torch.cat(rows, ROWS))
    out = _convolve(conv, x, conv.padding)
    edges.wait()
    upper, lower = window.touched
    if edges.above is not None:
        needed = (upper - 1) * window.stride + window.span - above
        strip = torch.cat((edges.above, x.narrow(ROWS, 0, needed)), ROWS)
        out.narrow(ROWS, 0, upper).copy_(_convolve_inside(conv, strip))
    if edges.below is not None:
        first = height - lower * window.stride - above
        strip = torch.cat((x.narrow(ROWS, first, height - first), edges.below), ROWS)
        out.narrow(ROWS, out.shape[ROWS] - lower, lower).copy_(_convolve_inside(conv, strip))
    return out


def pad_rows(x: Tensor, shards: RowShards, padding: Sequence[int]) -> Tensor:
    """``F.pad(x, padding)`` of the whole map with zeros, this rank's part.

    Rows above and below come from the neighbours, zeros from the picture's own edges. ``padding``
    is as in ``F.pad``: left, right, above, below, and for [B, C, T, h, W] before and after.
    """
    _, _, above, below, *_ = padding
    edges = shards.exchange_edges(x, above, below)
    padded = F.pad(x, tuple(padding))
    edges.wait()
    inner = padded
    for dim, before in ((-1, padding[0]), *(((-3, padding[4]),) if len(padding) > 4 else ())):
        inner = inner.narrow(dim, before, x.shape[dim])
    if edges.above is not None:
        inner.narrow(ROWS, 0, above).copy_(edges.above)
    if edges.below is not None:
        inner.narrow(ROWS, inner.shape[ROWS] - below, below).copy_(edges.below)
    return padded


def convolve_padded_rows(
    conv: Convolution, shards: RowShards, x: Tensor, padding: Sequence[int]
) -> Tensor:
    """``conv(F.pad(x, padding))`` of the whole map, this rank's rows; ``conv`` itself pads none.

    For causal convolutions over frames, and for downsampling that pads below and right alone.
    """
    window = row_window(conv, padding[2:4])
    _check_stride(x.shape[ROWS], window)
    return _convolve(conv, pad_rows(x, shards, padding), conv.padding)


def _check_stride(height: int, window: RowWindow) -> None:
    if height % window.stride:
        raise ValueError(f"a band of {height} rows does not divide by the stride {window.stride}")


def _convolve_inside(conv: Convolution, x: Tensor) -> Tensor:
    """``conv`` without its padding above and below."""
    assert not isinstance(conv.padding, str), "refused by row_window"
    padding = list(conv.padding)
    padding[ROWS] = 0
    return _convolve(conv, x, padding)


def _convolve(conv: Convolution, x: Tensor, padding: Sequence[int] | str) -> Tensor:
    function = F.conv2d if isinstance(conv, nn.Conv2d) else F.conv3d
    assert not isinstance(padding, str), "refused by row_window"
    return function(
        x, conv.weight, conv.bias, conv.stride, tuple(padding), conv.dilation, conv.groups
    )


def _zeros_like(x: Tensor, rows: int) -> Tensor:
    return x.new_zeros(*x.shape[:ROWS], rows, x.shape[-1])
