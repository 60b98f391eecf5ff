"""Blocks of one module that take turns in a small ring of device buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.weight_group import WeightGroup
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane, Mark


@dataclass(slots=True, eq=False)
class _Slot:
    """One buffer of the ring: which block it holds, when it is full, when it may be refilled."""

    buffer: Tensor
    key: int
    free_after: Mark
    block: int | None = None
    full: Mark = None
    busy: bool = False


@dataclass(slots=True)
class StreamCounters:
    """Forwards of blocks that found their weights on the way (``hits``) or had to ask first
    (``misses``), and the bytes that were copied for them."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class BlockStream:
    """Streams the weights of blocks through ``slots`` buffers, each as large as the largest block.

    While a block computes, the copies of the next ones run; the host never waits. Which block comes
    next is learned from the last pass, so that the stream goes round from the last block of a step
    to the first of the next, and through half of a VAE.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        groups: Mapping[str, WeightGroup],
        lane: CopyLane,
        slots: int,
    ) -> None:
        self.groups = list(groups.values())
        self.lane = lane
        self.slot_count = min(slots, len(self.groups))
        self.slot_bytes = max(group.nbytes for group in self.groups)
        self.counters = StreamCounters()
        self._slots: list[_Slot] = []
        self._holder: dict[int, _Slot] = {}
        count = len(self.groups)
        self._next = [(index + 1) % count for index in range(count)]
        self._last: int | None = None
        self._first = 0
        for index, path in enumerate(groups):
            _hook(blocks[path], self, index)

    @property
    def ring_bytes(self) -> int:
        """Device memory while open."""
        return self.slot_count * self.slot_bytes

    @property
    def is_open(self) -> bool:
        """Whether there is a ring."""
        return bool(self._slots)

    def open(self) -> None:
        """Take the ring and start to fill it with the blocks that come first."""
        if self.is_open:
            return
        buffers: list[Tensor] = []
        try:
            for _ in range(self.slot_count):
                buffers.append(self.lane.allocate(self.slot_bytes))
        except BaseException:
            self.lane.free(len(buffers) * self.slot_bytes)
            raise
        now = self.lane.mark()  # the memory may have been another tensor's until here
        self._slots = [_Slot(buffer, key, now) for key, buffer in enumerate(buffers)]
        self._last = None
        self._fetch_chain(self._first, self.slot_count)

    def close(self) -> None:
        """Give the ring back; a block in use (its forward failed) goes home."""
        for slot in self._slots:
            if slot.block is not None:
                self.groups[slot.block].leave()
                self.lane.wait(slot.full)  # before the memory becomes another tensor's
        for group in self.groups:
            group.forget()
        held = self.ring_bytes if self.is_open else 0
        self._slots.clear()
        self._holder.clear()
        if held:
            self.lane.free(held)

    def before(self, index: int) -> None:
        """A block is about to compute."""
        if not self.is_open:
            return  # out of use: it computes where its weights are, in host memory
        if self._last is None:
            self._first = index
        else:
            self._next[self._last] = index
        self._last = index
        slot = self._holder.get(index)
        if slot is None:
            self.counters.misses += 1
            slot = self._fetch(index, keep=())
        else:
            self.counters.hits += 1
        slot.busy = True
        self.lane.wait(slot.full)
        self.groups[index].enter(slot.buffer, slot.key)

    def after(self, index: int) -> None:
        """A block has computed (its work is queued): its buffer takes the next one."""
        slot = self._holder.get(index)
        if slot is None:
            return
        self.groups[index].leave()
        slot.busy = False
        slot.free_after = self.lane.mark()
        self._fetch_chain(self._next[index], self.slot_count)

    def _fetch_chain(self, index: int, count: int) -> None:
        """Have the ``count`` blocks from ``index`` on in the ring or on their way, in order."""
        wanted = []
        while len(wanted) < count and index not in wanted:
            wanted.append(index)
            index = self._next[index]
        for block in wanted:
            if block not in self._holder:
                self._fetch(block, keep=wanted)

    def _fetch(self, block: int, keep: Any) -> _Slot:
        slot = next(s for s in self._slots if not s.busy and s.block not in keep)
        if slot.block is not None:
            del self._holder[slot.block]
        group = self.groups[block]
        assert group.host is not None
        slot.full = self.lane.copy(slot.buffer[: group.nbytes], group.host, slot.free_after)
        self.counters.bytes += group.nbytes
        slot.block = block
        self._holder[block] = slot
        return slot


def _hook(block: nn.Module, stream: BlockStream, index: int) -> None:
    block.register_forward_pre_hook(lambda _module, _args: stream.before(index))
    # Also when the block fails: its buffer must not stay busy.
    block.register_forward_hook(lambda _module, _args, _out: stream.after(index), always_call=True)
