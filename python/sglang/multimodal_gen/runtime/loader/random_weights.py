"""Modules with random weights, made where they are used: for measurements without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import (
    is_scale,
    quantized_parameters,
    quantizer_of,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import ComponentLoader
from sglang.multimodal_gen.runtime.loader.components import outline_components
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.server_args import ServerArgs

DEVIATION = 0.02
"""Of weights around zero, and of norms' around one: a product of zeros draws less power than one
of numbers, and runs faster."""


def random_components(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    default_configs: Mapping[str, Mapping[str, Any]],
    *,
    parallel: ParallelState,
) -> dict[str, Any]:
    """A pipeline's components by their configs; no file of weights is needed, or read.

    Raises:
        CheckpointError: as loading does for what is no weight.
    """
    parts = outline_components(
        source, names, server_args, loaders, default_configs,
        parallel=parallel, stored=False, buffers=True,
    )  # fmt: skip
    for module in parts.values():
        if isinstance(module, nn.Module):
            fill(module, parallel.device)
            if parallel.device.type == "cuda":
                pack_linears(module)
    return parts


@torch.no_grad()
def fill(module: nn.Module, device: torch.device, seed: int = 0) -> None:
    """Random values for every parameter, on ``device``; buffers go there as they are."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in list(owner._parameters.items()):
            if old is None:
                continue
            if is_scale(old):
                continue  # made with its weight
            method = quantizer_of(old)
            if id(old) not in made:  # ties stay ties
                dtype = torch.bfloat16 if method is not None else old.dtype
                value = torch.empty(old.shape, dtype=dtype, device=device)
                is_norm = old.ndim == 1 and name.endswith("weight")
                value.normal_(1.0 if is_norm else 0.0, DEVIATION, generator=generator)
                made[id(old)] = nn.Parameter(value, requires_grad=False)
                vars(made[id(old)]).update(vars(old))
            owner._parameters[name] = made[id(old)]
            if method is not None:
                quantized = quantized_parameters(made[id(old)], method)
                owner._parameters[name], owner._parameters[f"{name}_scale"] = quantized
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    module.eval()
