"""A component whose weights live in host memory and come to the device for each use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.block_stream import BlockStream, StreamCounters
from sglang.multimodal_gen.runtime.memory.weight_group import WeightGroup
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane, Mark
from sglang.multimodal_gen.runtime.platforms.host_memory import HostMemory


@dataclass(slots=True)
class UseCounters:
    """How often it was used, how often it was on its way already, and the bytes moved for it
    (without those of its stream)."""

    uses: int = 0
    prefetched: int = 0
    bytes: int = 0


class OffloadedComponent:
    """A module at rest in host memory.

    Offloaded whole, all its weights are ``rest`` and come in one copy; offloaded by layers,
    ``rest`` are those outside its blocks, and the blocks take turns in the ring of ``stream``.
    Between uses nothing of it but small buffers and blocks chosen to stay is on the device.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        lane: CopyLane,
        host: HostMemory,
        rest: WeightGroup | None,
        stream: BlockStream | None,
    ) -> None:
        self.name = name
        self.module = module
        self.lane = lane
        self.host = host
        self.rest = rest
        self.stream = stream
        self.counters = UseCounters()
        self.in_use = False
        self._buffer: Tensor | None = None
        self._full: Mark = None
        self._coming = False

    @property
    def stream_counters(self) -> StreamCounters:
        """The counters of its stream; zeros without one."""
        return StreamCounters() if self.stream is None else self.stream.counters

    @property
    def device_bytes(self) -> int:
        """Device memory while it is in use or on its way."""
        rest = 0 if self.rest is None else self.rest.nbytes
        return rest + (0 if self.stream is None else self.stream.ring_bytes)

    @property
    def is_home(self) -> bool:
        """Whether nothing of it is on the device or on its way."""
        return not self._coming

    def prefetch(self) -> None:
        """Start to bring it to the device; returns at once."""
        if self._coming:
            return
        if self.rest is not None:
            assert self.rest.host is not None
            self._buffer = self.lane.allocate(self.rest.nbytes)
        self._coming = True  # from here on there is something to give back
        if self.rest is not None:
            assert self.rest.host is not None
            assert self._buffer is not None
            self._full = self.lane.copy(self._buffer, self.rest.host, self.lane.mark())
            self.counters.bytes += self.rest.nbytes
        if self.stream is not None:
            self.stream.open()

    def begin_use(self) -> None:
        """From here until :meth:`end_use` the module computes on the device."""
        if self.in_use:
            return
        self.counters.uses += 1
        self.counters.prefetched += self._coming
        self.prefetch()
        self.in_use = True
        if self.rest is not None:
            assert self._buffer is not None
            self.lane.wait(self._full)
            self.rest.enter(self._buffer, 0)

    def end_use(self) -> None:
        """Back to rest: what it took of the device is free again. Does nothing at rest."""
        if not self._coming:
            return
        self._coming = self.in_use = False
        if self.stream is not None:
            self.stream.close()
        if self.rest is not None:
            self.rest.leave()
            self.rest.forget()
            self.lane.wait(self._full)  # before the memory becomes another tensor's
            self._buffer = None
            self.lane.free(self.rest.nbytes)
