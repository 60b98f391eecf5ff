"""What tests ask of processes by their number; from /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    """The processes whose parent is ``pid``."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid:
                found.append(int(place.name))
    return found


def all_gone(pids: Iterable[int], seconds: float = 10.0) -> bool:
    """Whether all processes end within some seconds."""
    left = list(pids)
    assert left, "no process to wait for: the test would prove nothing"
    deadline = time.monotonic() + seconds
    while left := [pid for pid in left if is_running(pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
