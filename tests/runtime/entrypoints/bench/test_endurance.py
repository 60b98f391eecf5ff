"""The bundled model behind a real server process, under more than it can do, and for long."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from pathlib import Path

import httpx
import pytest

from sglang.multimodal_gen.runtime.entrypoints.bench.load import connected, made_alone, run_load
from sglang.multimodal_gen.runtime.entrypoints.bench.mix import DEFAULT_MIX, MixEntry, plan
from sglang.multimodal_gen.runtime.entrypoints.bench.own_server import own_server
from sglang.multimodal_gen.runtime.entrypoints.bench.report import failed, summary

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.slow
QUEUE = 12
MIX = tuple(
    dataclasses.replace(entry, weight=2) if entry.name == "cancelled" else entry
    for entry in DEFAULT_MIX
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_200_mixed_requests_at_overload_are_all_answered_and_all_right():
    """None lost, none wrong, the queue bounded; small work does not starve (CB-081)."""
    with own_server(["--max-queued-requests", str(QUEUE), "--warmup-mode", "off"]) as server:

        async def run():
            async with connected(server.url, None) as http:
                begin = time.perf_counter()
                alone = await made_alone(http, MIX, 2, 120)
                rate = 3 * len(alone) / (time.perf_counter() - begin)  # of what it can do
                arrivals = plan(MIX, rate=rate, count=200, seed=6, variants=2)
                return summary(await run_load(http, arrivals, alone, 120), rate)

        found = asyncio.run(run())
    told = {name: value for name, value in found.items() if name != "outcomes"}
    print(told)
    answered = [found[kind] for kind in ("ok", "cancelled", "rejected")]
    assert sum(answered) == 200, told
    assert (found["lost"], found["error"], found["wrong"]) == (0, 0, 0), told
    assert found["rejected"] > 10, "this was no overload"
    assert found["max_waiting"] <= QUEUE
    assert found["compared"] == found["ok"] - _never_cancelled(found)
    assert found["compared"] > 30
    assert found["cancelled"] > 0
    entries = found["by_entry"]
    # Small work is asked most, and all kinds get through: nobody waits for ever.
    assert all(entry.get("ok") for name, entry in entries.items() if name != "cancelled"), entries
    assert entries["small"]["latency"]["p50"] < entries["usual"]["latency"]["max"]
    assert not failed([found])


def _never_cancelled(found):
    """Finished before their client changed its mind: these have no picture to compare with."""
    return found["by_entry"].get("cancelled", {}).get("ok", 0)


def memory_mb(pid: int) -> float:
    """What a process holds in memory, as the kernel counts it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_memory_is_flat_over_2000_requests():
    """CB-077: five sizes, counts, previews, links to files; records and files expire in between."""
    bodies = [
        {"size": "16x16"}, {"size": "32x16"}, {"size": "16x32"}, {"size": "32x32"},
        {"size": "48x16", "n": 2}, {"size": "16x16", "response_format": "url"},
        {"size": "16x16", "stream": True, "partial_images": 1},
    ]  # fmt: skip
    flags = ["--job-ttl", "2", "--file-ttl", "2", "--warmup-mode", "off",
             "--batching-max-size", "8"]  # fmt: skip
    with own_server(flags) as server:
        counter, lock, failures = iter(range(2000)), threading.Lock(), []
        samples: list[tuple[int, float]] = []

        def work():
            with httpx.Client(base_url=server.url, timeout=60) as http:
                while True:
                    with lock:
                        index = next(counter, None)
                    if index is None:
                        return
                    body = {"prompt": f"a red circle {index}", "num_inference_steps": 1,
                            "max_sequence_length": 16, "true_cfg_scale": 1.0}  # fmt: skip
                    body |= bodies[index // 16 % len(bodies)]  # neighbours share batches
                    answer = http.post("/v1/images/generations", json=body)
                    if answer.status_code != 200:
                        failures.append(answer.text)
                    if index % 50 == 0:
                        samples.append((index, memory_mb(server.pid)))

        threads = [threading.Thread(target=work) for _ in range(8)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"2000 requests in {time.perf_counter() - begin:.0f} s", sorted(samples))
    assert not failures, failures[:3]
    settled = [value for index, value in sorted(samples) if index >= 500]
    third = len(settled) // 3
    growth = sum(settled[-third:]) / third - sum(settled[:third]) / third
    # About 1000 requests lie between the two means: 10 kB a request would be seen.
    assert growth < 10, sorted(samples)


def test_small_work_is_not_stuck_behind_large():
    """CB-081: while large requests keep coming, small ones are served in between."""
    mix = (
        MixEntry("large", {"prompt": "a blue square", "num_inference_steps": 25}, 1),
        MixEntry("small", {"prompt": "a red circle", "size": "32x32", "num_inference_steps": 1}, 1),
    )
    with own_server(["--max-queued-requests", "100", "--warmup-mode", "off"]) as server:

        async def run():
            async with connected(server.url, None) as http:
                arrivals = plan(mix, rate=4, count=40, seed=2, variants=1)
                return await run_load(http, arrivals, {}, 120)

        found = summary(asyncio.run(run()), 4)
    entries = found["by_entry"]
    assert (entries["large"]["ok"], found["lost"]) == (entries["large"]["requests"], 0)
    assert entries["small"]["ok"] == entries["small"]["requests"]
    assert entries["small"]["latency"]["p50"] < entries["large"]["latency"]["p50"] / 2, entries
