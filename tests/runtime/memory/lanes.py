"""Copy lanes that behave as badly as a device may."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane, Mark


class LateLane(CopyLane):
    """Copies as late as is allowed: when somebody waits. Until then the target holds NaN bytes.

    Fails if a copy may start before the computation has let go of its target.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.clock = 0
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.targets: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def mark(self) -> Mark:
        self.clock += 1
        return self.clock

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        address = target.data_ptr()
        assert after is not None, "a copy must wait for the computation"
        assert after > self.used.get(address, 0), "this buffer may still be in use"
        self.bytes_copied += source.nbytes
        self.clock += 1
        target.fill_(255)
        self.pending.append((self.clock, target, source))
        self.targets[self.clock] = address
        return self.clock

    def wait(self, mark: Mark) -> None:
        self.clock += 1
        if mark in self.targets:
            self.used[self.targets[mark]] = self.clock
        while self.pending and self.pending[0][0] <= mark:
            _, target, source = self.pending.pop(0)
            target.copy_(source)
