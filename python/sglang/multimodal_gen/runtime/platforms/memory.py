"""How much memory there is to take: on the device, and in the host as this process may use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes that can be had now; None where the system does not say.

    ``device_free`` and ``device_total`` are the GPU's, or the host's where the CPU computes;
    ``host_free`` is what this process may still take of the host's memory.
    """

    device_free: int | None
    device_total: int | None
    host_free: int | None


def memory_facts(device: str) -> MemoryFacts:
    """Look at the machine, now: what other processes hold is not free."""
    host = host_free()
    if device == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryFacts(host, total, host)
    import torch

    free, total = torch.cuda.mem_get_info()
    # What torch's allocator holds and does not use is free for this process too.
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return MemoryFacts(free + unused, total, host)


def host_free(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this process may still take: the machine's, or its container's if that is less.

    A container sees the whole machine in ``/proc/meminfo``; what it may use is the limit of its
    control group (v1 or v2), or of one above it. Cached files that nobody reads now count as used
    there, and as free here: the kernel drops them first.
    """
    bounds = [_meminfo_available(proc / "meminfo"), *_cgroup_rooms(proc, cgroups)]
    known = [bound for bound in bounds if bound is not None]
    return max(min(known), 0) if known else None


def _meminfo_available(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """What is left under each limit that holds for this process."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for folder in _upwards(cgroups, path):
                yield _room(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroups / "memory", path):
                yield _room(
                    folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as this mount shows them."""
    folder = mount / path.lstrip("/")
    while True:
        if folder.is_dir():
            yield folder
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _room(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or usage is None:  # no limit ("max"), or the root group, which has no files
        return None
    cached = 0
    for line in _lines(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == cache_key:
            cached = int(value)
    return limit - max(usage - cached, 0)


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or a container that hides it
        return []
