"""Weights spread over ranks: each holds a part of every tensor, blocks are gathered to compute.

torch's ``fully_shard`` (PyTorch FSDP2; Zhao et al. 2023) on a module without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.memory.layerwise import streamed_blocks
from sglang.multimodal_gen.runtime.memory.weight_group import WeightSpec
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError


class ShardedHome:
    """Takes the weights of one component while it loads, and keeps this rank's part of each.

    Every rank of ``group`` must run the same forwards: gathering a block takes all of them.
    """

    def __init__(self, name: str, group: Group, device: torch.device) -> None:
        self.name = name
        self.group = group
        self.device = device
        self._module: nn.Module | None = None

    def prepare(self, module: nn.Module, specs: Sequence[WeightSpec]) -> None:
        """Shard a module that was built on meta, and take memory for this rank's part.

        Raises:
            PipelineDefinitionError: the module lists no blocks, or ties weights to each other.
        """
        assert self.group.handle is not None, "sharding takes two ranks or more"
        self._module = module
        for spec in specs:
            if len(spec.names) != 1:
                raise PipelineDefinitionError(
                    f"{self.name}: {', '.join(spec.names)} are one weight; such a module cannot be "
                    "sharded"
                )
            _set(module, spec.names[0], torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        mesh = DeviceMesh.from_group(self.group.handle, self.device.type)
        blocks = list(streamed_blocks(module).values())
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for block, following in pairwise(blocks):
            assert isinstance(block, FSDPModule)
            assert isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])
        for name, parameter in list(module.named_parameters()):
            _set(module, name, torch.empty_like(parameter, device=self.device))

    def take(
        self, names: Sequence[str], pieces: Sequence[Tensor], dim: int, dtype: torch.dtype
    ) -> bool:
        """Copy this rank's rows of a weight; False for buffers. Other rows are not touched, so of a
        mapped file they are not read."""
        assert self._module is not None
        path, _, leaf = names[0].rpartition(".")
        parameter = self._module.get_submodule(path)._parameters.get(leaf)
        if parameter is None:
            return False
        assert isinstance(parameter, DTensor)
        (value,) = pieces
        mine = parameter.to_local()
        rows = -(-value.shape[0] // self.group.size)
        start = min(self.group.rank * rows, value.shape[0])
        part = value[start : start + rows]
        if mine.shape != part.shape or mine.dtype != dtype:
            raise PipelineDefinitionError(
                f"{self.name}: rank {self.group.rank} of {self.group.size} holds "
                f"{tuple(mine.shape)} {mine.dtype} of {names[0]!r}, but {tuple(part.shape)} "
                f"{dtype} came"
            )
        with torch.no_grad():
            mine.copy_(part)
        return True

    def finish(self) -> None:
        """Nothing is left to do."""


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
