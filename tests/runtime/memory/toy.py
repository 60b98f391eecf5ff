"""A small model with two lists of blocks, no two alike in size, a tie and a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.host_home import HostHome
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import Placement, Residency
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane

WIDTH = 6


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()
        self.down.float()  # a block of two dtypes
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden.float()).double() + self.shift


class Toy(nn.Module, LayerwiseOffloadableModuleMixin):
    layer_names = ["first", "second.blocks"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward = nn.Linear(WIDTH, WIDTH).double()
        self.outward = nn.Linear(WIDTH, WIDTH).double()
        self.outward.weight = self.inward.weight
        self.first = nn.ModuleList(Block(inner) for inner in (5, 11))
        self.second = nn.Module()
        self.second.blocks = nn.Sequential(*(Block(inner) for inner in (26, 17, 7)))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.first:
            x = block(x)
        return self.outward(self.second.blocks(x))


def block_bytes(block: nn.Module) -> int:
    return sum(-(-p.nbytes // 256) * 256 for p in block.parameters())


def layerwise(lane: CopyLane, slots: int = 2, resident_layers: int = 0) -> OffloadedComponent:
    placement = Placement(Residency.LAYERWISE, slots, resident_layers)
    return HostHome("toy", placement, lane, pin=True).adopt(Toy())


def whole(lane: CopyLane) -> OffloadedComponent:
    return HostHome("toy", Placement(Residency.COMPONENT), lane, pin=True).adopt(Toy())
