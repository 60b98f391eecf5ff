"""A trace of one request, time by operation, and the host's waits for the GPU within its loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sglang.multimodal_gen.runtime.entrypoints.bench.trial import Side, StepClock
from sglang.multimodal_gen.runtime.utils.errors import OutputError

WAITS = frozenset(
    {
        "aten::_local_scalar_dense",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "Memcpy DtoH (Device -> Pageable)",
        "Memcpy DtoH (Device -> Pinned)",
    }
)
"""Names in a trace that say that the host waits, or that values come to it. A copy into pageable
memory is also a cudaStreamSynchronize: one wait may count twice, none counts as none."""

_MARK = "sglang.bench step "
_ROWS = 40


@dataclass(frozen=True, slots=True)
class Profile:
    """What was seen: waits by name between the first and the last step's end, over ``steps``."""

    steps: int
    waits: dict[str, int]
    operations: list[dict[str, Any]]


def profiled(side: Side, folder: Path) -> Profile:
    """Run one request; writes ``trace.json`` and ``operations.txt`` into the folder.

    Raises:
        OutputError: it cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if side.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        side.run(StepClock(side.device, _mark))
    by = "self_device_time_total" if side.device == "cuda" else "self_cpu_time_total"
    averages = seen.key_averages()
    rows = sorted(averages, key=lambda row: getattr(row, by), reverse=True)[:_ROWS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(folder / "trace.json"))
        table = averages.table(sort_by=by, row_limit=_ROWS)
        (folder / "operations.txt").write_text(table, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {error.strerror}.") from error
    steps, waits = waits_in_loop(seen.events() or [])
    operations = [
        {"name": row.key, "calls": row.count, "ms": getattr(row, by) / 1e3} for row in rows
    ]
    return Profile(steps, waits, operations)


def waits_in_loop(events: Iterable[Any]) -> tuple[int, dict[str, int]]:
    """Steps between the first and the last mark, and the waits that began between them."""
    known = list(events)
    marks = sorted(e.time_range.start for e in known if e.name.startswith(_MARK))
    if len(marks) < 2:
        return 0, {}
    inside = [e for e in known if marks[0] < e.time_range.start < marks[-1]]
    return len(marks) - 1, dict(Counter(e.name for e in inside if e.name in WAITS))


def _mark(step: int) -> None:
    with record_function(f"{_MARK}{step}"):
        pass


def machine(device: str) -> dict[str, str]:
    """What it ran on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
