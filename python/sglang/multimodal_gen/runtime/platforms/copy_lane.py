"""Copies from host memory to the device that run beside the computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Mark = Any
"""A point in the device's work; None on the CPU, where everything is over when it returns."""

_WORTH_GIVING_BACK = 256 << 20


class CopyLane:
    """The lane of the CPU: "device" memory is host memory too, and copies happen at once.

    The counters are the proof that streaming happened: ``bytes_copied`` in all, ``held`` bytes of
    device memory now, ``peak`` at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_copied = 0
        self.held = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory as a flat uint8 tensor; give it back with :meth:`free`."""
        with torch.inference_mode(False):  # whoever asks: weights in it are ordinary tensors
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        return memory

    def free(self, nbytes: int) -> None:
        """The owner of ``nbytes`` has let go of its tensors."""
        self.held -= nbytes

    def mark(self) -> Mark:
        """The point that the computation has come to."""
        return None

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """Start a copy once the computation has passed ``after``; returns the copy's end."""
        self.bytes_copied += source.nbytes
        target.copy_(source)
        return None

    def wait(self, mark: Mark) -> None:
        """The computation goes on only after ``mark``; the host does not wait."""


class CudaCopyLane(CopyLane):
    """A stream of its own beside the current one; the two meet in events alone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def free(self, nbytes: int) -> None:
        """The same; large pieces go back to the driver, for whoever needs another shape."""
        super().free(nbytes)
        if nbytes >= _WORTH_GIVING_BACK:
            torch.cuda.empty_cache()

    def mark(self) -> Mark:
        """An event on the computation's stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, after: Mark) -> Mark:
        """One asynchronous copy on the lane's stream."""
        self.bytes_copied += source.nbytes
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """The computation's stream waits for the event."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


def copy_lane(device: str | torch.device) -> CopyLane:
    """The lane of a device."""
    device = torch.device(device)
    return CudaCopyLane(device) if device.type == "cuda" else CopyLane(device)
