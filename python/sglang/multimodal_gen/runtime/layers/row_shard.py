"""A picture whose rows are spread over ranks: who holds which, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group

ROWS = -2
"""The dimension of rows in a map [B, C, h, W] or [B, C, T, h, W]."""


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """``total`` rows for ``parts`` ranks: equal, or the first ranks hold one more."""
    share, extra = divmod(total, parts)
    return tuple(share + (rank < extra) for rank in range(parts))


@dataclass(frozen=True, slots=True)
class Edges:
    """Rows on their way from the neighbours; None where there is no neighbour, or none is needed.

    ``sent`` keeps what goes out alive until it is out.
    """

    above: Tensor | None
    below: Tensor | None
    sent: tuple[Tensor, ...]
    jobs: tuple[Any, ...]

    def wait(self) -> None:
        """Until they are here."""
        for job in self.jobs:
            job.wait()


class RowShards:
    """What the layers of one network share while each rank of ``group`` holds a band of rows.

    Rank r holds the r-th band, from the top. Outside `holding` the layers work as if there were
    one rank. A layer that makes a map larger or smaller does so with all bands alike: a band
    stays the same share of the whole.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._bands: tuple[int, ...] | None = None
        self._shares: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether the maps are bands now."""
        return self._bands is not None

    @property
    def bands(self) -> tuple[int, ...]:
        """Rows of each rank, in the units of `holding`."""
        assert self._bands is not None, "no rows are shared out: see RowShards.holding"
        return self._bands

    @contextmanager
    def holding(self, bands: Sequence[int]) -> Iterator[None]:
        """Inside, maps are bands of these heights (times whatever a layer scales them by).

        Raises:
            ValueError: not one band, of at least a row, for each rank.
        """
        if len(bands) != self.group.size or min(bands) < 1:
            raise ValueError(f"{bands} are no bands of rows for {self.group.size} ranks")
        self._bands, self._shares = tuple(bands), None
        try:
            yield
        finally:
            self._bands, self._shares = None, None

    def mine(self, x: Tensor, scale: int = 1) -> Tensor:
        """This rank's band of a whole map whose rows are ``scale`` a row of `bands`; a view."""
        start = sum(self.bands[: self.group.rank])
        return x.narrow(ROWS, start * scale, self.bands[self.group.rank] * scale)

    def exchange_edges(self, x: Tensor, above: int, below: int) -> Edges:
        """Start fetching the rows just above and below this rank's band from its neighbours.

        Every rank calls this with the same two numbers, at most the height of the least band.
        """
        rank, last = self.group.rank, self.group.size - 1
        sends: dict[int, Tensor] = {}
        receives: dict[int, Tensor] = {}
        if above and rank < last:
            sends[rank + 1] = x.narrow(ROWS, x.shape[ROWS] - above, above).contiguous()
        if above and rank > 0:
            receives[rank - 1] = _rows_like(x, above)
        if below and rank > 0:
            sends[rank - 1] = x.narrow(ROWS, 0, below).contiguous()
        if below and rank < last:
            receives[rank + 1] = _rows_like(x, below)
        jobs = self.group.exchange(sends, receives)
        return Edges(
            receives.get(rank - 1), receives.get(rank + 1), tuple(sends.values()), tuple(jobs)
        )

    def whole_moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over all ranks' rows, from those over each rank's.

        The same bits on every rank. Chan, Golub and LeVeque 1979: no sum of squares of numbers
        that are far from zero, so nothing cancels.
        """
        mine = torch.stack((mean, variance))[None]
        means, variances = self.group.all_gather(mine).unbind(1)
        shares = self._shares_like(means)
        whole_mean = (shares * means).sum(0)
        spread = variances + (means - whole_mean).square()
        return whole_mean, (shares * spread).sum(0)

    def everyones(self, x: Tensor, dim: int = ROWS) -> Tensor:
        """All ranks' pieces of ``x``, joined along ``dim``, whose size goes with the rows."""
        sizes = self._sizes(x.shape[dim])
        if len(set(sizes)) == 1:
            return self.group.all_gather(x, dim)
        dim = dim % x.ndim
        missing = max(sizes) - x.shape[dim]
        padded = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
        pieces = self.group.all_gather(padded[None])
        return torch.cat(
            [piece.narrow(dim, 0, n) for piece, n in zip(pieces, sizes, strict=True)], dim
        )

    def on_first(self, x: Tensor) -> Tensor:
        """The whole map on the first rank; on the others an empty one, of no batch."""
        if not self.group.is_first:
            for job in self.group.exchange({0: x.contiguous()}, {}):
                job.wait()
            return x.new_empty(0, *x.shape[1:])
        sizes = self._sizes(x.shape[ROWS])
        pieces = {rank: _rows_like(x, sizes[rank]) for rank in range(1, self.group.size)}
        for job in self.group.exchange({}, pieces):
            job.wait()
        return torch.cat([x, *pieces.values()], ROWS)

    def _sizes(self, mine: int) -> list[int]:
        """What each rank has of something of which this rank has ``mine``."""
        own = self.bands[self.group.rank]
        return [mine * band // own for band in self.bands]

    def _shares_like(self, x: Tensor) -> Tensor:
        """Each rank's share of the rows, to multiply ``x`` [ranks, ...] with; made once."""
        if self._shares is None:
            total = sum(self.bands)
            self._shares = torch.tensor([b / total for b in self.bands], device=x.device)
        return self._shares.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


def _rows_like(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:ROWS], rows, x.shape[-1])


def attend_to_all_rows(q: Tensor, k: Tensor, v: Tensor, shards: RowShards) -> Tensor:
    """Attention of this band's queries to all ranks' keys and values: [..., T, D] each.

    One exchange; no rank computes another's rows.
    """
    keys, values = shards.everyones(torch.cat((k, v), dim=-1)).split([k.shape[-1], v.shape[-1]], -1)
    return F.scaled_dot_product_attention(q, keys, values)
