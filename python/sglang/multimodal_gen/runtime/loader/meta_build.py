"""Modules built without memory for their parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

M = TypeVar("M", bound=nn.Module)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, a parameter that this thread registers has a shape and a dtype but no memory.

    Buffers stay real: rotary tables and position ids are computed by the constructor and are not
    in the checkpoint, so a module built wholly on the meta device could not get them back. Ties
    stay ties: a parameter that is already on meta is registered as it is.

    torch keeps registration hooks for the whole process; the thread check keeps a module that
    another thread builds meanwhile as it should be.
    """
    owner = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != owner:
            return None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        vars(empty).update(vars(parameter))
        return empty

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def build_on_meta(construct: Callable[[], M]) -> M:
    """The module that ``construct`` returns, with its parameters on the meta device.

    The caller's random state is left as it was: initial values that the constructor draws are
    thrown away, and a seed must not depend on which components were loaded.
    """
    with torch.random.fork_rng(devices=[]), parameters_on_meta():
        return construct()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating-point tensors made without a dtype have this one (in the whole process)."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
