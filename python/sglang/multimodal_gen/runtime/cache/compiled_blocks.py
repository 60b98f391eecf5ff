"""A denoiser's repeated blocks as code that torch compiled, one piece of code for a kind of block.

Blocks of one class differ in their weights alone, and weights are inputs of what is compiled: 57
blocks of two classes cost two compilations. What is hooked around a block (its weights' arrival)
and what stands in its place (a step cache) stays outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.linear import ParallelLinear
from sglang.multimodal_gen.runtime.memory.layerwise import streamed_blocks
from sglang.multimodal_gen.runtime.utils.environ import compiled_code_folder

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]

VERSIONS = 64
"""Compilations of one class of blocks at most: by which sizes vary, batches of one or more, with
or without masks. torch's own limit is 8; beyond it, `fullgraph` makes torch raise an error."""


@dataclass(slots=True)
class CompileCounters:
    """What became of the blocks: the proof that they are compiled.

    Attributes:
        blocks: those that run compiled code.
        direct: those that do not for now, because adapters are live on their linears.
        graphs: compilations so far, by class of block. Each is one whole graph: breaks are errors.
    """

    blocks: int = 0
    direct: int = 0
    graphs: dict[str, int] = field(default_factory=dict)


class CompiledBlocks:
    """Compiles at a block's first call, again for the second size (sizes are then variables of the
    code), and for nothing that only changes values: prompts, steps, seeds.

    Args:
        mode: torch's name of how long it searches: ``default`` or ``max-autotune-no-cudagraphs``.
        backend: what turns graphs into code, or torch's name of it.
    """

    def __init__(self, mode: str = "default", *, backend: Compiler | str = "inductor") -> None:
        self.mode = mode
        self.backend = backend
        self.counters = CompileCounters()
        self._blocks: list[nn.Module] = []
        self._forwards: dict[type, Callable[..., Any]] = {}

    @property
    def kinds(self) -> int:
        """Classes of blocks that code is made for, of all denoisers together."""
        return len(self._forwards)

    def add(self, denoiser: nn.Module) -> None:
        """Compile the blocks that a denoiser names.

        Raises:
            PipelineDefinitionError: it names none.
        """
        import torch._dynamo

        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, VERSIONS)
        blocks = list(streamed_blocks(denoiser).values())
        self._blocks += blocks
        for cls in {type(block) for block in blocks} - self._forwards.keys():
            self._forwards[cls] = torch.compile(
                cls.forward, backend=self._compiler(cls), fullgraph=True
            )
        self.refresh()

    def refresh(self) -> None:
        """Adapters changed: blocks on whose linears some are live run as they are written.

        The compiler looks for hooks once, and would go on without those that came later.
        """
        self.counters.blocks = self.counters.direct = 0
        for block in self._blocks:
            _restore(block)
            if _is_adapted(block):
                self.counters.direct += 1
            else:
                block.forward = MethodType(self._forwards[type(block)], block)
                self.counters.blocks += 1

    def close(self) -> None:
        """All blocks run as they are written again."""
        for block in self._blocks:
            _restore(block)
        self._blocks.clear()
        self.counters.blocks = self.counters.direct = 0

    def _compiler(self, cls: type) -> Compiler:
        """What torch hands each graph of a class's forward to."""

        def to_code(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs, name = self.counters.graphs, cls.__name__
            graphs[name] = graphs.get(name, 0) + 1
            if self.backend != "inductor":
                return torch._dynamo.lookup_backend(self.backend)(graph, inputs)
            from torch._inductor import list_mode_options
            from torch._inductor.compile_fx import compile_fx

            code: Any = compile_fx(graph, inputs, config_patches=list_mode_options(self.mode))
            return code

        return to_code


def keep_compiled_code() -> str:
    """See to it that what is compiled is found by the next start; returns the folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return compiled_code_folder(os.path.abspath(default_cache_dir()))


def _restore(block: nn.Module) -> None:
    vars(block).pop("forward", None)


def _is_adapted(block: nn.Module) -> bool:
    """Whether a hook or an adapter sees the product of one of the linears."""
    linears = (module for module in block.modules() if isinstance(module, nn.Linear))
    return any(
        linear._forward_hooks
        or linear._forward_pre_hooks
        or (isinstance(linear, ParallelLinear) and linear.on_product is not None)
        for linear in linears
    )
