"""A low-rank change of one linear's weight.

LoRA, "Low-Rank Adaptation of Large Language Models" (Hu et al., 2021): ``W + scaling * B A``.
Legend: R rank, I input width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Two factors and their scaling: ``down`` (A) [R, I], ``up`` (B) [O, R].

    ``alpha`` None means that the file gives none: the scaling is 1. ``rank_stabilized`` is rsLoRA
    (Kalajdzievski, 2023): ``alpha / sqrt(R)`` instead of ``alpha / R``.
    """

    down: Tensor
    up: Tensor
    alpha: float | None = None
    rank_stabilized: bool = False

    @property
    def rank(self) -> int:
        """R."""
        return self.down.shape[0]

    @property
    def scaling(self) -> float:
        """What ``B A`` is multiplied with, at weight 1."""
        if self.alpha is None:
            return 1.0
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def norm(self) -> float:
        """Frobenius norm of the change at weight 1, without computing the change."""
        down, up = self.down.double(), self.up.double()
        squared = torch.einsum("ij,ij->", down @ down.T, up.T @ up).clamp(min=0)
        return abs(self.scaling) * squared.sqrt().item()


@dataclass(frozen=True, slots=True)
class Term:
    """One adapter's part in one linear: ``weight * scaling * B A``."""

    factors: LowRank
    weight: float


def stacked(terms: list[Term] | tuple[Term, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sum of some terms as one pair of float32 factors: scaling and weight are in ``up``."""
    down = torch.cat([term.factors.down.to(device, torch.float32) for term in terms])
    up = torch.cat(
        [
            term.factors.up.to(device, torch.float32) * (term.factors.scaling * term.weight)
            for term in terms
        ],
        dim=1,
    )
    return down, up
