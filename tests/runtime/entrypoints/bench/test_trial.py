"""Clocks, spreads, turns, and waits in a trace."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.cache.graph_runner import GraphCounters, GraphRunner
from sglang.multimodal_gen.runtime.entrypoints.bench.profile import waits_in_loop
from sglang.multimodal_gen.runtime.entrypoints.bench.sides import describe, our_side
from sglang.multimodal_gen.runtime.entrypoints.bench.trial import (
    Forwards,
    Spread,
    StepClock,
    measure,
)
from sglang.multimodal_gen.runtime.loader.random_weights import fill
from sglang.multimodal_gen.runtime.pipelines_core.stages import DenoisingStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent


def event(name, start):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start))


def test_waits_between_the_first_and_the_last_step_count():
    events = [
        event("cudaStreamSynchronize", 1),
        event("sglang.bench step 0", 2),
        event("aten::_local_scalar_dense", 3),
        event("cudaLaunchKernel", 4),
        event("sglang.bench step 1", 5),
        event("cudaStreamSynchronize", 6),
        event("cudaStreamSynchronize", 7),
        event("sglang.bench step 2", 8),
        event("cudaStreamSynchronize", 9),
    ]
    waits = {"aten::_local_scalar_dense": 1, "cudaStreamSynchronize": 2}
    assert waits_in_loop(events) == (2, waits)
    assert waits_in_loop(events[:3]) == (0, {})


def test_a_clock_tells_loops_apart():
    marks = []
    clock = StepClock("cpu", marks.append)
    for loop in range(2):
        for done in range(4):
            clock.heard(ProgressEvent("denoise", done, 3, "denoising"))
        clock.heard(ProgressEvent("decode", loop, 1, "decoding"))
    assert len(clock.intervals_ms()) == 2 * 2  # not across loops, not the first of each
    assert marks == list(range(6))


def test_spread():
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, (3.0, 3.0), 1)
    assert Spread.of([1.0, 2.0, 9.0]) == Spread(2.0, 1.0, 9.0, (1.5, 5.5), 3)


def test_sides_take_turns():
    order = []

    def side(name):
        return SimpleNamespace(run=lambda: order.append(name), trials=[], warm_ups=[])

    measure([side("a"), side("b")], 1, 3)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]


def test_forwards_are_counted_by_hooks_or_by_the_graph_runner():
    module, counters = nn.Linear(2, 2), GraphCounters(direct=3, replays=4)
    with Forwards([module]) as forwards:
        module(torch.ones(2))
    module(torch.ones(2))
    assert forwards.count == 1
    with Forwards([module], counters) as forwards:
        assert not module._forward_pre_hooks  # a hook would have each request recorded anew
        counters.direct += 1
        counters.replays += 5
    assert forwards.count == 6


class Replays:
    """Records nothing: replays by calling again."""

    def __init__(self):
        self.device = torch.device("cpu")

    def record(self, call, what):
        output = call()
        return SimpleNamespace(output=output, replay=lambda: output.copy_(call()))

    def forget(self):
        """Nothing is kept."""


@pytest.mark.parametrize("settings", [{}, {"step_cache": "first-block"}])
def test_forwards_are_counted_with_graphs_and_a_step_cache(settings):
    values = {"prompt": "a red circle", "num_inference_steps": 3, "seed": 1, **settings}
    model = describe(ServerArgs.from_flat(model_path="demo", device="cpu"))
    side = our_side(model, values, random_weights=False)
    with closing(side.pipeline):
        side.pipeline.graphs = runner = GraphRunner(Replays())
        (loop,) = (s for s in side.pipeline.stages.values() if isinstance(s, DenoisingStage))
        loop.guidance.call = runner
        plain = side.run().forwards_a_step
        called = runner.counters.direct + runner.counters.replays
    # A step cache goes past the runner.
    assert called == (0 if settings else 6)
    assert plain == 2


def test_random_weights_keep_ties_dtypes_and_buffers():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.RMSNorm(64))
    module[1].weight = module[0].weight
    module[2].to(torch.bfloat16)
    module.register_buffer("table", torch.arange(3))
    fill(module, torch.device("cpu"))
    assert module[1].weight is module[0].weight
    assert abs(module[0].weight.std().item() - 0.02) < 2e-3
    assert abs(module[2].weight.float().mean().item() - 1) < 2e-2
    assert module[2].weight.dtype == torch.bfloat16
    assert module.table.tolist() == [0, 1, 2]
    assert not any(p.is_meta or p.requires_grad for p in module.parameters())
