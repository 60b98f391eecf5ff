"""The method put on a finished model's linears, by the patterns of their paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from torch import nn

from sglang.multimodal_gen.runtime.layers.linear import MethodLinear, ParallelLinear
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import (
    Fp8Method,
    fits,
    quantized_parameters,
)


def quantize_linears(
    model: nn.Module,
    method: Fp8Method,
    *,
    ignored: Iterable[str] = (),
    only: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Put ``method`` on a model's linears; returns their paths.

    On meta, places are made and a loader fills them; elsewhere the weights are quantised at once.
    Linears stay as they are where their path matches a pattern (``fnmatch``; ``*`` crosses dots) of
    ``ignored`` or is not among ``only``, where a width is no multiple of 16, where their weight is
    another module's too, and where a class has a forward of its own.
    """
    patterns = tuple(ignored)
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    chosen = [
        (path, module)
        for path, module in model.named_modules()
        if path
        and _takes(module)
        and (only is None or path in only)
        and not is_ignored(path, patterns)
        and fits(module.weight)
        and owners[id(module.weight)] == 1
    ]
    for path, module in chosen:
        _put(model, path, module, method)
    return tuple(path for path, _ in chosen)


def is_ignored(path: str, patterns: Iterable[str]) -> bool:
    """Whether a linear's path matches one of the patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def method_of(module: nn.Module) -> Fp8Method | None:
    """The method on a linear; None where there is none, and on anything else."""
    return getattr(module, "method", None) if isinstance(module, nn.Linear) else None


def _takes(module: nn.Module) -> TypeGuard[nn.Linear]:
    if isinstance(module, ParallelLinear):
        return module.method is None
    return type(module) is nn.Linear


def _put(model: nn.Module, path: str, module: nn.Linear, method: Fp8Method) -> None:
    plain: Any = module
    target: Any = module if isinstance(module, ParallelLinear) else MethodLinear(module)
    weight, scale = quantized_parameters(plain.weight, method)
    target.weight, target.weight_scale, target.method = weight, scale, method
    if target is not module:
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, target)
