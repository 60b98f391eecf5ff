"""The machine this process runs on: what there is, how much memory work took, when it is done.

The only functions of the runtime that ask torch about devices. torch is imported inside, since the
command line reads server arguments, and must not pay seconds for its ``--help``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): reset the peak resident set size to the current one


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What was found: the first CUDA GPU, or else the CPU.

    ``name`` and ``memory_bytes`` (all of it, not the free part) describe that device;
    ``capability`` is the GPU's compute capability, None where it is not known.
    """

    cuda_available: bool
    device_count: int
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None


def device_facts() -> DeviceFacts:
    """Look at the machine. Cheap after torch is imported."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return DeviceFacts(
            cuda_available=True,
            device_count=torch.cuda.device_count(),
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=(properties.major, properties.minor),
        )
    return DeviceFacts(
        cuda_available=False,
        device_count=0,
        name=platform.processor() or platform.machine(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def compute_capability(device: str) -> tuple[int, int] | None:
    """A CUDA GPU's, (9, 0) for Hopper; None for other devices."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_capability()


def peak_memory_mb(device: str) -> float:
    """The most memory taken at once since :func:`reset_peak_memory`, in MiB.

    On ``cuda`` it is what torch's allocator held. On ``cpu`` it is the largest resident set of this
    process, Python and libraries included; where the system cannot start a new peak (it is not
    Linux), that of the process's whole life.
    """
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    if _STATUS.exists():
        # Not ru_maxrss: Linux hands the parent's peak on to a program that it starts.
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts in bytes, other systems in KiB.
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def reset_peak_memory(device: str) -> None:
    """Start a new peak for :func:`peak_memory_mb`."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif _CLEAR_REFS.exists():
        with contextlib.suppress(OSError):  # some containers forbid it: the peak then stays
            _CLEAR_REFS.write_text(_RESET_PEAK)


def synchronize(device: str) -> None:
    """Wait until the device has finished, so that a clock read next tells the truth."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
