"""Weights that stand for published ones: what time and power a product takes depends on them."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Normal weights of deviation 0.02 (so that a bf16 product runs at its real power draw).

    Norm weights stand around one: at 0.02 the queries and keys would vanish, and with them the
    attention that a comparison is to see.
    """
    for name, parameter in module.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(1.0 if is_norm else 0.0, 0.02, generator=generator)
