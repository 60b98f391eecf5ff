"""Random weights that hide nothing: no zero, no one, no equal rows, activations of order one.

A fresh model is a poor witness: zero-initialised gates and output layers silence whole branches,
norm weights of one and biases of zero make their omission invisible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

NO_GAINS: Mapping[str, float] = {}


@torch.no_grad()
def fill_with_noise(module: nn.Module, seed: int, gains: Mapping[str, float] = NO_GAINS) -> None:
    """Fill every parameter of `module` from one seeded CPU generator.

    Matrices and kernels get a standard deviation of 1/sqrt(fan in), tables one, norm weights
    1 +- 0.25, biases +- 0.2. `gains` maps patterns on parameter names (``re.search``, the last
    match counts) to a factor on the whole tensor; a pattern that matches nothing is an error.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    unused = set(gains)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            noise = 0.2 * noise if name.endswith("bias") else 1 + 0.25 * noise
        elif id(parameter) not in tables:
            noise /= parameter[0].numel() ** 0.5
        matching = [pattern for pattern in gains if re.search(pattern, name)]
        unused.difference_update(matching)
        parameter.copy_(noise * gains[matching[-1]] if matching else noise)
    if unused:
        raise ValueError(f"gains name no parameter of {type(module).__name__}: {sorted(unused)}")
