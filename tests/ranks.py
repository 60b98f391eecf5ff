"""Runs a test's function on several ranks: real processes, gloo, always cleaned up."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120.0


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each rank (picklable, defined at a module's top).

    Raises:
        AssertionError: a rank failed (its traceback is the message), died or hung.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, str(Path(folder) / "store"), sender, function, args),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(receivers: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = mp.connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting)} did not finish in time"
        for rank in [rank for rank, receiver in waiting.items() if receiver in ready]:
            try:
                kind, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert kind == "result", f"rank {rank} failed:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    sender: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        _send(sender, "result", function(rank, *args))
    except BaseException:  # noqa: BLE001 - a rank's failure is the test's message
        _send(sender, "error", traceback.format_exc())


def _send(sender: Any, kind: str, value: Any) -> None:
    # Plain pickle: torch's own would share the tensor's memory, which goes when this process does.
    sender.send_bytes(pickle.dumps((kind, value)))
