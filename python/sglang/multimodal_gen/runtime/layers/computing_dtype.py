"""The precision that a module computes in, of which only most of its weights tell."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.quantization.fp8 import is_scale

_COMPUTES_IN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Weights of other dtypes (quantised ones) and their scales say nothing about a module's inputs."""


def computing_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of most of a module's parameters: islands of float32 do not count.

    None for a module that has none. Parameters are counted, not their values: those whose weights
    are elsewhere at the moment have a dtype too.
    """
    found = Counter(
        p.dtype for p in module.parameters() if p.dtype in _COMPUTES_IN and not is_scale(p)
    )
    return found.most_common(1)[0][0] if found else None
