"""Makes a network's layers work on a band of rows, found by their types, or refuses it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.parallel_conv import (
    convolve_padded_rows,
    convolve_rows,
    row_window,
)
from sglang.multimodal_gen.runtime.layers.parallel_norm import group_norm_rows
from sglang.multimodal_gen.runtime.layers.row_shard import RowShards

RowForward = Callable[..., Tensor]
"""``forward(module, shards, ...)``: what the module makes of the whole map, this rank's band."""


class RowsNotSeparable(ValueError):
    """A layer that mixes rows in a way that nobody taught this runtime to spread over ranks."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How one module works on a band.

    Args:
        forward: takes the place of the module's own; None where that is right as it is.
        covers_children: ``forward`` does the children's work, so they are not looked at.
        halo: the most rows beyond its band that the module asks a neighbour for.
    """

    forward: RowForward | None = None
    covers_children: bool = False
    halo: int = 0


Planner = Callable[[Any], RowPlan]
"""Plans one module; a ValueError says why it cannot be spread."""

ROW_BY_ROW = RowPlan()


def row_by_row(_module: nn.Module) -> RowPlan:
    """A module that treats each row by itself, or only runs its children."""
    return ROW_BY_ROW


def plan_convolution(conv: nn.Conv2d | nn.Conv3d) -> RowPlan:
    """A convolution with its own zero padding."""
    halo = max(row_window(conv).halo)
    return RowPlan(convolve_rows, halo=halo) if halo else ROW_BY_ROW


def plan_sequence(sequence: nn.Sequential) -> RowPlan:
    """A chain of modules; zero padding goes with the convolution after it."""
    children: list[Any] = list(sequence)
    if not any(isinstance(child, nn.ZeroPad2d) for child in children):
        return ROW_BY_ROW
    if [type(child) for child in children] != [nn.ZeroPad2d, nn.Conv2d]:
        raise ValueError("zero padding is known before one convolution alone")
    padding = children[0].padding
    halo = max(row_window(children[1], padding[2:4]).halo)
    return RowPlan(_padded_convolution, covers_children=True, halo=halo)


def _padded_convolution(sequence: nn.Sequential, shards: RowShards, x: Tensor) -> Tensor:
    children: list[Any] = list(sequence)
    pad, conv = children
    return convolve_padded_rows(conv, shards, x, pad.padding)


TORCH_PLANNERS: Mapping[type, Planner] = {
    nn.Conv2d: plan_convolution,
    nn.Conv3d: plan_convolution,
    nn.GroupNorm: lambda _: RowPlan(group_norm_rows),
    nn.Sequential: plan_sequence,
    **dict.fromkeys(
        (nn.ModuleList, nn.Identity, nn.Dropout, nn.SiLU, nn.ReLU, nn.GELU, nn.Linear), row_by_row
    ),
}
"""Exact types of torch's own modules."""


def spread_rows(
    parts: Mapping[str, nn.Module], shards: RowShards, planners: Mapping[type, Planner]
) -> int:
    """Teach all modules of ``parts`` to work on bands, in place; nothing changes if one cannot.

    Parameters, names, hooks and classes stay; outside ``shards.holding`` so does the result.

    Returns:
        The rows that a band must have at least, where the maps are smallest.

    Raises:
        RowsNotSeparable: a module's exact type is not in ``planners``, or its plan fails.
    """
    plans = [found for name, part in parts.items() for found in _plans(part, name, planners)]
    for module, plan in plans:
        if plan.forward is not None:
            _replace_forward(module, plan.forward, shards)
    return max(1, *(plan.halo for _, plan in plans))


def _plans(
    module: nn.Module, name: str, planners: Mapping[type, Planner]
) -> Iterator[tuple[nn.Module, RowPlan]]:
    planner = planners.get(type(module))
    if planner is None:
        raise RowsNotSeparable(f"{name} is a {type(module).__name__}, which is not known")
    try:
        plan = planner(module)
    except ValueError as error:
        raise RowsNotSeparable(f"{name} ({type(module).__name__}) {error}") from error
    yield module, plan
    if not plan.covers_children:
        for child_name, child in module.named_children():
            yield from _plans(child, f"{name}.{child_name}", planners)


def _replace_forward(module: nn.Module, forward: RowForward, shards: RowShards) -> None:
    on_band, on_whole = partial(forward, module, shards), module.forward

    def dispatch(*args: Any, **kwargs: Any) -> Tensor:
        return (on_band if shards.active else on_whole)(*args, **kwargs)

    module.forward = dispatch
