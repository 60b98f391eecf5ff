"""Time and memory of a denoising loop, seen from outside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Loop = Callable[[int, Callable[[], None]], Tensor]
"""Runs a number of steps, calls back after each, returns the final latents."""


@dataclass(frozen=True)
class LoopTime:
    """One loop: each step but the first (which shares its interval with the loop's set-up)."""

    steps_ms: tuple[float, ...]
    whole_ms: float


@dataclass(frozen=True)
class Summary:
    """Over all loops of a side."""

    median_ms: float
    min_ms: float
    max_ms: float
    samples: int
    whole_loop_ms: float
    """Median, from the embeddings to the final latents, on the host's clock."""


def time_loop(loop: Loop, steps: int, device: torch.device) -> LoopTime:
    """Run `loop` once. On a GPU, steps are timed by events on its stream, without waiting."""
    on_gpu = device.type == "cuda"
    events: list[torch.cuda.Event] = []
    times: list[float] = []

    def mark() -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
        else:
            times.append(time.perf_counter())

    synchronize(device)
    start = time.perf_counter()
    loop(steps, mark)
    synchronize(device)
    whole = (time.perf_counter() - start) * 1e3
    if on_gpu:
        intervals = [a.elapsed_time(b) for a, b in pairwise(events)]
    else:
        intervals = [(b - a) * 1e3 for a, b in pairwise(times)]
    if len(intervals) != steps - 1:
        raise RuntimeError(f"{len(intervals) + 1} steps were reported, not {steps}")
    return LoopTime(tuple(intervals), whole)


def alternate(
    loops: Sequence[Loop], steps: int, rounds: int, device: torch.device
) -> list[Summary]:
    """Time `loops` in turn, each round in the other order, so that a drift hits all alike."""
    taken: list[list[LoopTime]] = [[] for _ in loops]
    for number in range(rounds):
        order = range(len(loops))
        for index in order if number % 2 == 0 else reversed(order):
            taken[index].append(time_loop(loops[index], steps, device))
    return [_summary(times) for times in taken]


def peak_gib(loop: Loop, module: nn.Module, others: Sequence[nn.Module]) -> float:
    """Peak GPU memory of a short loop, without what only the modules of other sides hold."""
    own = _storages(module)
    foreign = {pointer: size for other in others for pointer, size in _storages(other).items()}
    foreign_bytes = sum(size for pointer, size in foreign.items() if pointer not in own)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loop(2, lambda: None)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - foreign_bytes) / 2**30


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it works by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _storages(module: nn.Module) -> dict[int, int]:
    """Address and bytes of each block of memory behind the module's parameters and buffers."""
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _summary(times: Sequence[LoopTime]) -> Summary:
    steps = [ms for loop in times for ms in loop.steps_ms]
    return Summary(
        median_ms=statistics.median(steps),
        min_ms=min(steps),
        max_ms=max(steps),
        samples=len(steps),
        whole_loop_ms=statistics.median(loop.whole_ms for loop in times),
    )
