"""Which slice of a whole tensor a rank holds: what a parameter knows, and a loader asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MARK = "shard"


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of rank ``rank`` of ``size``.

    The whole is, along ``dim``, a row of blocks of the given widths. Each block is dealt out by
    itself: a rank holds its piece of every block, one after the other. Pieces differ by at most
    one where a block does not divide.
    """

    dim: int
    blocks: tuple[int, ...]
    rank: int
    size: int

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Start and stop in the whole, of this rank's piece of each block."""
        found, start = [], 0
        for width in self.blocks:
            found.append(
                (
                    start + width * self.rank // self.size,
                    start + width * (self.rank + 1) // self.size,
                )
            )
            start += width
        return tuple(found)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's slice; shares the whole's memory where it is one piece."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The whole's shape, from a slice's."""
        shape = list(local)
        shape[self.dim] = sum(self.blocks)
        return tuple(shape)


def shard_of(tensor: Tensor) -> Shard | None:
    """What a parameter is a slice of; None if it is whole."""
    return vars(tensor).get(_MARK)


def sharded(whole: Tensor, shard: Shard) -> nn.Parameter:
    """A frozen parameter that is a slice, and knows which; on meta if the whole is."""
    local = shard.of(whole.detach()).clone(memory_format=torch.contiguous_format)
    parameter = nn.Parameter(local, requires_grad=False)
    vars(parameter).update(vars(whole))
    vars(parameter)[_MARK] = shard
    return parameter
