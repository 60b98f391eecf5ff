"""Weights on their way from a checkpoint straight into host memory, never through the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.block_stream import BlockStream
from sglang.multimodal_gen.runtime.memory.layerwise import streamed_blocks
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import Placement, Residency
from sglang.multimodal_gen.runtime.memory.weight_group import WeightGroup, WeightSpec
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane
from sglang.multimodal_gen.runtime.platforms.host_memory import HostMemory
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError


class HostHome:
    """Takes the weights of one component while it loads; leaves an `OffloadedComponent`.

    A loader calls :meth:`prepare` with a module whose parameters have no values yet, offers every
    weight to :meth:`take`, and ends with :meth:`finish`.
    """

    def __init__(self, name: str, placement: Placement, lane: CopyLane, *, pin: bool) -> None:
        self.name = name
        self.placement = placement
        self.lane = lane
        self.pin = pin
        self.component: OffloadedComponent | None = None
        self._parameters: dict[str, nn.Parameter] = {}

    def prepare(self, module: nn.Module, specs: Sequence[WeightSpec]) -> None:
        """Lay the weights out and take host memory for them.

        Raises:
            PipelineDefinitionError: ``layer_names`` of the module's class does not fit it.
        """
        layerwise = self.placement.mode is Residency.LAYERWISE
        blocks = dict(streamed_blocks(module)) if layerwise else {}
        staying = list(blocks)[: self.placement.resident_layers]
        members: dict[str | None, list[WeightSpec]] = {None: []}
        for spec in specs:
            members.setdefault(_owner(spec, blocks), []).append(spec)
        for path in staying:
            members.pop(path, None)
        rest_specs = members.pop(None)
        groups = {path: WeightGroup(module, members[path]) for path in blocks if path in members}
        rest = WeightGroup(module, rest_specs) if rest_specs else None
        everything = [*groups.values(), *([rest] if rest else [])]
        memory = HostMemory(sum(group.nbytes for group in everything))
        start = 0
        for group in everything:
            self._parameters |= group.settle(memory.data[start : start + group.nbytes])
            start += group.nbytes
        slots = self.placement.slots
        stream = BlockStream(blocks, groups, self.lane, slots) if groups else None
        self.component = OffloadedComponent(self.name, module, self.lane, memory, rest, stream)

    def take(
        self, names: Sequence[str], pieces: Sequence[Tensor], dim: int, dtype: torch.dtype
    ) -> bool:
        """Copy a weight to its place; False for what stays on the device."""
        place = self._parameters.get(names[0])
        if place is None:
            return False
        shape = list(pieces[0].shape)
        if len(pieces) > 1:
            shape[dim] = sum(piece.shape[dim] for piece in pieces)
        if place.shape != torch.Size(shape) or place.dtype != dtype:
            raise PipelineDefinitionError(
                f"{self.name}: {names[0]!r} was laid out as {tuple(place.shape)} {place.dtype}, "
                f"but {tuple(shape)} {dtype} came: its loader changes weights on the way"
            )
        with torch.no_grad():
            if len(pieces) == 1:
                place.copy_(pieces[0])
            else:
                parts = place.split([piece.shape[dim] for piece in pieces], dim)
                for part, piece in zip(parts, pieces, strict=True):
                    part.copy_(piece)
        return True

    def finish(self) -> None:
        """All weights are there: let the device read them at full speed."""
        assert self.component is not None
        if self.pin and self.lane.device.type == "cuda":
            self.component.host.pin()

    def adopt(self, module: nn.Module) -> OffloadedComponent:
        """Move a finished module's weights; its buffers stay where they are."""
        values: dict[int, nn.Parameter] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            values[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(name)
        self.prepare(
            module,
            [WeightSpec(tuple(names[key]), p.shape, p.dtype) for key, p in values.items()],
        )
        for key, parameter in values.items():
            if not self.take(names[key], [parameter.detach()], 0, parameter.dtype):
                with torch.no_grad():
                    parameter.data = parameter.data.to(self.lane.device)
        self.finish()
        assert self.component is not None
        return self.component


def _owner(spec: WeightSpec, blocks: Mapping[str, nn.Module]) -> str | None:
    """The one block that all names of a weight lie in; None for one that is shared or outside."""
    found = {_block_of(name, blocks) for name in spec.names}
    return found.pop() if len(found) == 1 else None


def _block_of(name: str, blocks: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in blocks), None)
