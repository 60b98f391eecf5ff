"""How a kernel becomes a torch operator: one schema, a plain twin, Triton on CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.library import Library

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE = "sgl_diffusion"
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Where there is no Triton, the twin answers on CUDA too: chosen once, here."""

_library = Library(NAMESPACE, "FRAGMENT")


def fused_operator(
    schema: str,
    plain: F,
    launch: Callable[..., Any],
    *,
    needs_triton: bool = True,
    on_cpu: bool = False,
    keeps_order: bool = False,
) -> F:
    """The operator with ``schema``; torch's dispatcher picks ``launch`` for CUDA tensors.

    Not ``torch.library.custom_op``: its checks cost tens of microseconds a call, and a step makes
    some four hundred calls.

    It stays an operator while torch compiles, which sees its shapes by the twin on tensors without
    values: traced, the twins took 135.9 ms a step of FLUX.1 on an H200, and the kernels 122.4.
    Where a gradient is asked for, the twin runs in its place: the kernels have no backward.

    Args:
        needs_triton: False where the launch calls torch's own kernels.
        on_cpu: the launch is for the CPU too.
        keeps_order: kernel and twin leave results in their input's order in memory; otherwise
            results are contiguous.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    twin = plain if keeps_order else _contiguous(plain)
    _library.impl(name, twin, "CompositeExplicitAutograd")
    if HAS_TRITON or not needs_triton:
        _library.impl(name, launch, "CUDA")
    if on_cpu:
        _library.impl(name, launch, "CPU")
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        if wants_gradient(args):
            return plain(*args)
        return operator(*args)

    call.__doc__ = plain.__doc__
    return call  # type: ignore[return-value]


def _contiguous(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The twin with results as the kernels leave them: a compiler believes what it sees here."""

    def call(*args: Any) -> Any:
        results = plain(*args)
        if isinstance(results, torch.Tensor):
            return results.contiguous()
        return None if results is None else tuple(result.contiguous() for result in results)

    return call


def wants_gradient(args: Iterable[Any]) -> bool:
    """Whether a backward may come through tensors among ``args`` or their lists, here and now."""
    return torch.is_grad_enabled() and _needs_grad(args)


def _needs_grad(args: Iterable[Any]) -> bool:
    return any(
        _needs_grad(arg) if isinstance(arg, list) else getattr(arg, "requires_grad", False)
        for arg in args
    )
