"""The layout of ranks: how many ways each thing is split. Plain numbers; torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

MESH_DIMS = ("dp", "cfg", "ring", "ulysses", "tp")
"""From the outermost to the innermost: neighbours in rank share the fastest link, and tensor
parallelism speaks most often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How many ways each thing is split; their product is the number of ranks.

    ``dp`` copies of the model serve different batches. Within a copy: ``cfg`` branches of guidance,
    ``ring`` x ``ulysses`` pieces of the sequence, ``tp`` pieces of each weight.
    """

    dp: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_DIMS`."""
        return tuple(getattr(self, name) for name in MESH_DIMS)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.shape)

    @property
    def sp(self) -> int:
        """Pieces of the sequence."""
        return self.ring * self.ulysses

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each copy of the model; a copy's first rank is its lead."""
        size = self.world_size // self.dp
        return tuple(tuple(range(size * i, size * (i + 1))) for i in range(self.dp))
