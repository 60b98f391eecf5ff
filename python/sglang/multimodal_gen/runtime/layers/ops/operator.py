"""How a kernel becomes a torch operator: one schema, a plain twin, Triton on CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
    opaque: bool = False,
) -> F:
    """The operator with ``schema``; torch's dispatcher picks ``launch`` for CUDA tensors.

    Not ``torch.library.custom_op``: its checks cost tens of microseconds a call, and a step makes
    some four hundred calls.

    While torch compiles, the twin is traced instead: the compiler fuses it with what stands around.
    Where a gradient is asked for, the twin runs too: the kernels have no backward.

    Args:
        needs_triton: False where the launch calls torch's own kernels.
        opaque: it stays an operator while torch compiles: its twin is for reading, not for speed.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, plain, "CompositeExplicitAutograd")
    if HAS_TRITON or not needs_triton:
        _library.impl(name, launch, "CUDA")
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        traced = torch.compiler.is_compiling() and not opaque
        if traced or (torch.is_grad_enabled() and _needs_grad(args)):
            return plain(*args)
        return operator(*args)

    call.__doc__ = plain.__doc__
    return call  # type: ignore[return-value]


def _needs_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
