"""What every VAE here can do: whole pictures, tiles, and both shared among ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import ClassVar, Self

import torch
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.ops.operator import wants_gradient
from sglang.multimodal_gen.runtime.layers.row_shard import ROWS, RowShards, split_evenly
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import ChannelsLast, Chooser
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import Planner, spread_rows
from sglang.multimodal_gen.runtime.models.vaes.tiles import (
    FRAMES,
    TileAxis,
    TileGrid,
    TilePlan,
    blend,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Tiling:
    """Size and distance of tiles, in pixels and frames; ``num_frames`` None cuts no clip."""

    height: int
    width: int
    stride_height: int
    stride_width: int
    num_frames: int | None = None
    stride_num_frames: int | None = None

    def checked(self, space: int, time: int) -> Self:
        """Itself, if its tiles are whole latent pixels and frames, and overlap or meet.

        Raises:
            InvalidArgument: names the tile or stride.
        """
        for name, tile, stride, unit in (
            ("height", self.height, self.stride_height, space),
            ("width", self.width, self.stride_width, space),
            ("num_frames", self.num_frames, self.stride_num_frames, time),
        ):
            if tile is None and stride is None:
                continue
            for field, value in ((f"tile_{name}", tile), (f"tile_stride_{name}", stride)):
                if value is None or value < unit or value % unit:
                    raise InvalidArgument(field, value, f"must be a multiple of {unit}")
            if tile is not None and stride is not None and stride > tile:
                problem = f"must be at most the tile's {tile}: pixels would be left out"
                raise InvalidArgument(f"tile_stride_{name}", stride, problem)
        return self


class ParallelTiledVAE(ABC, nn.Module):
    """Base of VAEs: a subclass says how a whole picture is encoded and decoded, and no more.

    `encode` and `decode` work on one rank, in tiles where `enable_tiling` says so.
    ``parallel_tiled_*`` deal the tiles to the ranks of a group, ``spatial_shard_*`` give each rank
    a band of rows: these are called by every rank of the group, with the same input. What is
    encoded comes back on all ranks; a picture on the first alone, an empty tensor on the others.

    A subclass puts this class before its library's. Pictures are [B, C, H, W], clips
    [B, C, T, H, W] of a causal autoencoder, whose first frame stands alone.
    """

    row_planners: ClassVar[Mapping[type, Planner]] = {}
    """How its modules work on bands of rows; see ``parallel/``."""
    row_parts: ClassVar[tuple[str, ...]] = ("encoder", "quant_conv", "decoder", "post_quant_conv")
    """The children that `_encode` and `_decode` run, where there are."""

    layer_forwards: ClassVar[Mapping[type, Chooser]] = {}
    """How its modules work on channels-last maps; see ``channels_last/``."""
    wants_channels_last: bool | None = None
    """Whether `_encode` and `_decode` work on such maps; None: on CUDA, where they are faster."""

    spatial_compression_ratio: int
    temporal_compression_ratio: int = 1
    use_slicing: bool = False
    tiling: Tiling | None = None
    _shards: RowShards | None = None
    _least_rows: int = 1
    _channels_last: ChannelsLast | None = None

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor:
        """Pixels to moments, all at once."""

    @abstractmethod
    def _decode(self, z: Tensor) -> Tensor:
        """Latents to pixels, all at once."""

    @abstractmethod
    def default_tiling(self) -> Tiling:
        """The tiles that the checkpoint asks for."""

    # One rank.

    def encode(
        self, x: Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Pixels in -1..1 to the posterior of their latents."""
        moments = self._each(x, self._encode if self.tiling is None else self.tiled_encode)
        return self.posterior(moments, return_dict)

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Latents, in the VAE's own scale, to pixels in -1..1."""
        sample = self._each(z, self._decode if self.tiling is None else self.tiled_decode)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    @staticmethod
    def posterior(
        moments: Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Moments as `encode` returns them."""
        latents = DiagonalGaussianDistribution(moments)
        return AutoencoderKLOutput(latent_dist=latents) if return_dict else (latents,)

    def _each(self, x: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        if self.use_slicing and len(x) > 1:
            return torch.cat([work(one) for one in x.split(1)])
        return work(x)

    def arrangement(self, x: Tensor) -> ChannelsLast | None:
        """Its layers, if they are to work on channels-last maps of ``x``.

        Not where a gradient is asked for: norms and sums are written in place. Bands of rows keep
        to the library's layers.
        """
        # Maps without values stand for a GPU's, as where operators choose their kernels.
        on_gpu = x.device.type in ("cuda", "meta")
        wanted = on_gpu if self.wants_channels_last is None else self.wants_channels_last
        banded = self._shards is not None and self._shards.active
        if (
            not wanted
            or banded
            or not self.layer_forwards
            or wants_gradient(chain((x,), self.parameters()))
        ):
            return None
        if self._channels_last is None:
            self._channels_last = ChannelsLast(self._row_parts(), self.layer_forwards)
        return self._channels_last

    def _row_parts(self) -> dict[str, nn.Module]:
        parts = {name: getattr(self, name, None) for name in self.row_parts}
        return {name: part for name, part in parts.items() if part is not None}

    # Tiles.

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_min_num_frames: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
        tile_sample_stride_num_frames: int | None = None,
    ) -> None:
        """Encode and decode in overlapping tiles from now on: less memory, nearly the same result.

        Sizes are pixels and frames; what is left out is the checkpoint's, or of a tile that is
        given, three quarters of it for the stride.

        Raises:
            InvalidArgument: a tile is no whole number of latents, or is smaller than its stride.
        """
        given: dict[str, int] = {}
        space, time = self.spatial_compression_ratio, self.temporal_compression_ratio
        for name, tile, stride, unit in (
            ("height", tile_sample_min_height, tile_sample_stride_height, space),
            ("width", tile_sample_min_width, tile_sample_stride_width, space),
            ("num_frames", tile_sample_min_num_frames, tile_sample_stride_num_frames, time),
        ):
            if tile is not None:
                given[name] = tile
                given[f"stride_{name}"] = max(1, tile * 3 // 4 // unit) * unit
            if stride is not None:
                given[f"stride_{name}"] = stride
        self.tiling = replace(self.default_tiling(), **given).checked(space, time)

    def disable_tiling(self) -> None:
        """Encode and decode all at once again."""
        self.tiling = None

    def tiled_encode(self, x: Tensor) -> Tensor:
        """Pixels to moments, tile by tile."""
        tiles, results = self._tile_plans(x, encoding=True)
        return results.join(map(self._encode, tiles.cut(x)))

    def tiled_decode(self, z: Tensor) -> Tensor:
        """Latents to pixels, tile by tile."""
        tiles, results = self._tile_plans(z, encoding=False)
        return results.join(map(self._decode, tiles.cut(z)))

    def parallel_tiled_encode(self, x: Tensor, group: Group) -> Tensor:
        """`tiled_encode` with the tiles dealt to the ranks; the same bits, on every rank."""
        tiles, results = self._tile_plans(x, encoding=True)
        return _dealt(self._encode, tiles.cut(x), results, group, everywhere=True)

    def parallel_tiled_decode(self, z: Tensor, group: Group) -> Tensor:
        """`tiled_decode` with the tiles dealt to the ranks; the same bits, on the first rank."""
        tiles, results = self._tile_plans(z, encoding=False)
        return _dealt(self._decode, tiles.cut(z), results, group, everywhere=False)

    def _tile_plans(self, x: Tensor, *, encoding: bool) -> tuple[TilePlan, TilePlan]:
        """Tiles of the input, and where their results lie."""
        tiling = self.default_tiling() if self.tiling is None else self.tiling
        space, time = self.spatial_compression_ratio, self.temporal_compression_ratio
        unit, period = (1, 1) if encoding else (space, time)
        height, width = x.shape[-2:]
        frames = None
        if x.ndim == 5 and tiling.num_frames is not None and tiling.stride_num_frames is not None:
            cut = TileAxis(
                x.shape[FRAMES] - 1, tiling.num_frames // period, tiling.stride_num_frames // period
            )
            frames = cut if len(cut.starts) > 1 else None
        grid = TileGrid(
            TileAxis(height, tiling.height // unit, tiling.stride_height // unit),
            TileAxis(width, tiling.width // unit, tiling.stride_width // unit),
        )
        plan = TilePlan(grid, frames)
        return plan, plan.scaled(
            *(((1, space), (1, time)) if encoding else ((space, 1), (time, 1)))
        )

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        """Blend the first rows of ``b``, in place, with the last of ``a`` above it."""
        return blend(a, b, blend_extent, ROWS)

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        """Blend the first columns of ``b``, in place, with the last of ``a`` left of it."""
        return blend(a, b, blend_extent, -1)

    def blend_t(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        """Blend the first frames of ``b``, in place, with the last of ``a`` before it."""
        return blend(a, b, blend_extent, FRAMES)

    # Bands of rows.

    def enable_spatial_shard(self, group: Group) -> None:
        """Get ready for ``spatial_shard_*`` by the ranks of ``group``; the rest stays as it is.

        Raises:
            RowsNotSeparable: a layer mixes rows in an unknown way; it is named.
            ValueError: it is ready for another group.
        """
        if self._shards is not None:
            if self._shards.group is not group:
                raise ValueError("this VAE's rows are shared out in another group already")
            return
        shards = RowShards(group)
        self._least_rows = spread_rows(self._row_parts(), shards, self.row_planners)
        self._shards = shards

    def can_shard_rows(self, latent_rows: int) -> bool:
        """Whether so many latent rows are enough for each rank, and for what neighbours need."""
        if self._shards is None:
            return False
        return latent_rows // self._shards.group.size >= self._least_rows

    def spatial_shard_encode(self, x: Tensor) -> Tensor:
        """Pixels to moments, a band of rows on each rank; the whole comes back on all."""
        shards, unit = self._ready(), self.spatial_compression_ratio
        with shards.holding(split_evenly(x.shape[ROWS] // unit, shards.group.size)):
            return shards.everyones(self._encode(shards.mine(x, scale=unit)))

    def spatial_shard_decode(self, z: Tensor) -> Tensor:
        """Latents to pixels, a band of rows on each rank; the whole on the first alone."""
        shards = self._ready()
        with shards.holding(split_evenly(z.shape[ROWS], shards.group.size)):
            return shards.on_first(self._decode(shards.mine(z)))

    def _ready(self) -> RowShards:
        assert self._shards is not None, "enable_spatial_shard comes first"
        return self._shards


def _dealt(
    work: Callable[[Tensor], Tensor],
    tiles: list[Tensor],
    results: TilePlan,
    group: Group,
    *,
    everywhere: bool,
) -> Tensor:
    """Each rank's share of the tiles, joined on the first rank; others get an empty tensor."""
    share = slice(group.rank, None, group.size)
    # One result even where no tile is left: it says how many channels there are.
    mine = [work(tile) for tile in tiles[share] or tiles[:1]]
    like = mine[0]
    shapes = results.shapes(like)
    if group.is_first:
        done: list[Tensor] = [like] * len(tiles)
        done[share] = mine
        pieces = {
            # At least a number: a rank without a tile takes part too.
            rank: like.new_empty(max(1, sum(map(prod, shapes[rank :: group.size]))))
            for rank in range(1, group.size)
        }
        for job in group.exchange({}, pieces):
            job.wait()
        for rank, piece in pieces.items():
            theirs = shapes[rank :: group.size]
            parts = piece.split([prod(s) for s in theirs]) if theirs else ()
            done[rank :: group.size] = [p.view(s) for p, s in zip(parts, theirs, strict=True)]
        whole = results.join(done)
    else:
        sent = torch.cat([tile.flatten() for tile in mine]) if tiles[share] else like.new_zeros(1)
        for job in group.exchange({0: sent}, {}):
            job.wait()
        whole = like.new_empty(0 if not everywhere else len(like), *results.shape(like)[1:])
    return group.broadcast(whole) if everywhere else whole
