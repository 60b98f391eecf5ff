"""Makes a network's layers work on maps whose channels lie side by side, found by their types.

Tensor cores read such maps as they are; others are transposed before each convolution and back
after it. Weights stay as they are loaded (what moves or merges them is not disturbed): cuDNN is
handed a copy in the maps' order, which is small beside the maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]
"""``forward(module, ...)``: the module's result, of and in channels-last maps."""

Chooser = Callable[[Any], Forward | None]
"""The forward for one module of a type; None where its own is right, or nothing else is known."""


class ChannelsLast:
    """One network's layers while they work on channels-last maps.

    Attributes:
        calls: how often a layer has worked so.
    """

    def __init__(self, parts: Mapping[str, nn.Module], choosers: Mapping[type, Chooser]) -> None:
        self.active = False
        self.calls = 0
        for part in parts.values():
            for module in part.modules():
                chooser = choosers.get(type(module))
                forward = None if chooser is None else chooser(module)
                if forward is not None:
                    module.forward = _Dispatch(self, module, forward)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the layers work on channels-last maps."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


class _Dispatch:
    """Stands in for a module's ``forward``; an object, so that copies of the module copy it."""

    def __init__(self, switch: ChannelsLast, module: nn.Module, forward: Forward) -> None:
        self.switch, self.module, self.forward = switch, module, forward
        self.otherwise = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.switch.active:
            return self.otherwise(*args, **kwargs)
        self.switch.calls += 1
        return self.forward(self.module, *args, **kwargs)


W = TypeVar("W", bound=Callable[..., Tensor])


def in_channels_last(work: W) -> W:
    """A VAE's ``_encode`` or ``_decode``, on channels-last maps where its ``arrangement`` has them.

    The result is contiguous, as it is otherwise.
    """

    @wraps(work)
    def arranged(self: Any, x: Tensor) -> Tensor:
        layers: ChannelsLast | None = self.arrangement(x)
        if layers is None:
            return work(self, x)
        with layers.working():
            return work(self, channels_last(x)).contiguous()

    return cast(W, arranged)


def channels_last(x: Tensor) -> Tensor:
    """[B, C, H, W] or [B, C, T, H, W] with its channels side by side; itself where it is so."""
    return x.contiguous(
        memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    )
