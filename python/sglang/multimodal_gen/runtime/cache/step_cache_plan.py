"""What a denoiser says of itself so that steps can be skipped: a table at the end of its file.

::

    STEP_CACHE = StepCachePlan(
        blocks=(
            CachedBlocks("transformer_blocks", carries=("image_BND", "text_BTD")),
            CachedBlocks("single_transformer_blocks", carries=("x_BSD",)),
        ),
        streams=("image",),
    )
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.model_table import table_of
from sglang.multimodal_gen.runtime.layers.sequence_plan import RETURN, SequencePlan, sequence_plan
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

TABLE = "STEP_CACHE"


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """A list of blocks that run one after the other, each on what the one before returned.

    Args:
        path: the list, by its name in the denoiser.
        carries: the arguments of a block's ``forward`` in whose place the next block gets what it
            returns, in the order in which it returns them. Images are their first dimension.
        per_image: its other arguments with images first (None allowed): one row an image, or
            several times all images' rows.
    """

    path: str
    carries: tuple[str, ...]
    per_image: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCachePlan:
    """Which blocks a step may leave out, and by what it is decided.

    Args:
        blocks: the lists, in the order in which they run.
        streams: what the first of the carried tensors holds, in the words of the `SequencePlan`:
            where sequences are split, their padding is left out of what is measured.
        signal: for TeaCache: the first block's modulated input, [B, ...], of the first block and
            the arguments of its ``forward``. Called when the block's weights are there.
        polynomial: for TeaCache: from the signal's relative change to the output's, coefficients
            from the highest power on, as fitted for this architecture.
    """

    blocks: tuple[CachedBlocks, ...]
    streams: tuple[str, ...] = ()
    signal: Callable[..., Tensor] | None = None
    polynomial: tuple[float, ...] = ()

    def lists(self, denoiser: nn.Module) -> list[tuple[CachedBlocks, nn.ModuleList]]:
        """The lists that have blocks, found in a denoiser.

        Raises:
            PipelineDefinitionError: a line names no list of blocks, or no argument of a block.
        """
        found = [(line, _list_at(denoiser, line)) for line in self.blocks]
        for line, blocks in found:
            for block in blocks:
                _check_arguments(line, block)
        return [(line, blocks) for line, blocks in found if len(blocks)]


def step_cache_plan(model_class: type) -> StepCachePlan | None:
    """The plan of a denoiser's class: its attribute ``STEP_CACHE``, or its file's; or inherited.

    Raises:
        PipelineDefinitionError: it is something else.
    """
    found = table_of(model_class, TABLE)
    if found is None or found[0] is None:
        return None
    plan, cls = found
    if not isinstance(plan, StepCachePlan):
        raise PipelineDefinitionError(
            f"{TABLE} of {cls.__module__}.{cls.__name__} must be a StepCachePlan, not "
            f"{type(plan).__name__}"
        )
    return plan


def method_problem(model_class: type, method: str) -> str | None:
    """Why a denoiser of this class cannot have a method's step cache, with the remedy, if so."""
    plan = step_cache_plan(model_class)
    if plan is None:
        return (
            f"{model_class.__name__} has no {TABLE} in its file, so no step of it can be skipped; "
            "leave it out, or write the table (docs/adding_a_model.md)"
        )
    if method == "teacache" and (plan.signal is None or not plan.polynomial):
        return (
            f"{TABLE} of {model_class.__name__} has no signal and polynomial for TeaCache; use "
            "first-block, which needs none"
        )
    return None


def check_split(denoiser: nn.Module, plan: StepCachePlan) -> None:
    """Refuse a `SequencePlan` with an edge at blocks that a step may leave out.

    Raises:
        PipelineDefinitionError: so it is.
    """
    sequences: SequencePlan | None = sequence_plan(type(denoiser))
    if sequences is None:
        return
    lists = plan.lists(denoiser)
    paths = [f"{line.path}.{name}" for line, blocks in lists for name, _ in blocks.named_children()]
    for edge in sequences.edges:
        for index, path in enumerate(paths):
            enters_first = index == 0 and edge.value != RETURN
            if fnmatch.fnmatchcase(path, edge.at) and not enters_first:
                raise PipelineDefinitionError(
                    f"SP_PLAN: {edge} is at a block that {TABLE} may leave out; put the edge "
                    "before or behind the blocks"
                )


def _list_at(denoiser: nn.Module, line: CachedBlocks) -> nn.ModuleList:
    owner = type(denoiser).__name__
    try:
        found: Any = denoiser.get_submodule(line.path)
    except AttributeError:
        found = None
    if not isinstance(found, nn.ModuleList):
        raise PipelineDefinitionError(
            f"{TABLE} of {owner} names {line.path!r}, which is no ModuleList of it"
        )
    return found


def _check_arguments(line: CachedBlocks, block: nn.Module) -> None:
    arguments = list(inspect.signature(block.forward).parameters)
    for name in (*line.carries, *line.per_image):
        if name not in arguments:
            raise PipelineDefinitionError(
                f"{TABLE}: a {type(block).__name__} of {line.path!r} has no argument {name!r}; it "
                f"has: {', '.join(arguments)}"
            )
