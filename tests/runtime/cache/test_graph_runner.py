"""The runner with a backend that records on the CPU: what it keeps, copies, drops and leaves."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.cache.graph_runner import GraphRunner, call_plainly


class Pair(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.calls = 0

    def forward(self, x, time, pair, extra=(), factor=1.0):
        self.calls += 1
        return x * self.weight * factor + time + pair.cos - pair.sin + sum(extra)


class Fake:
    """Replays by calling again, into one buffer that every replay of all recordings overwrites."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.records = self.forgets = 0

    def record(self, call, what):
        self.records += 1
        return FakeRecording(call)

    def forget(self):
        self.forgets += 1


class FakeRecording:
    def __init__(self, call):
        self.call = call
        result = call()
        with torch.inference_mode(False):
            self.output = torch.full(result.shape, torch.nan, dtype=result.dtype)

    def replay(self):
        self.output.copy_(self.call())


def arguments(seed, size=3, **more):
    torch.manual_seed(seed)
    pair = Pair(torch.randn(size), torch.randn(size))
    return {"x": torch.randn(2, size), "time": torch.randn(2, 1), "pair": pair, **more}


@pytest.fixture
def runner():
    return GraphRunner(Fake(), limit=2)


def counts(runner):
    counters = runner.counters
    return counters.direct, counters.captures, counters.replays


def test_the_second_call_of_a_kind_is_recorded_and_later_ones_replayed(runner):
    model = Denoiser()
    results = [runner(model, arguments(seed)) for seed in range(4)]
    assert counts(runner) == (1, 1, 3)
    expected = [call_plainly(model, arguments(seed)) for seed in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert not torch.equal(results[2], results[3])


def test_a_result_outlives_the_next_replay(runner):
    model = Denoiser()
    for seed in (0, 1):
        runner(model, arguments(seed))
    kept = runner(model, arguments(2))
    before = kept.clone()
    runner(model, arguments(3))
    assert torch.equal(kept, before)


def test_a_tensor_changed_in_place_is_copied_again(runner):
    model, given = Denoiser(), arguments(0)
    for _ in range(2):
        runner(model, given)
    first = runner(model, given)
    given["x"].add_(1)
    assert torch.equal(runner(model, given), call_plainly(model, given))
    assert not torch.equal(first, call_plainly(model, given))


def test_the_loops_own_mode_does_not_matter(runner):
    model = Denoiser()
    with torch.inference_mode():
        for seed in range(3):
            runner(model, arguments(seed))
    assert torch.equal(runner(model, arguments(5)), call_plainly(model, arguments(5)))
    assert runner.counters.captures == 1


@pytest.mark.parametrize(
    "other",
    [
        {"factor": 2.0},
        {"extra": [torch.ones(())]},
        {"extra": (1,)},
        {"x": torch.ones(1, 3), "time": torch.ones(1, 1)},
        {"time": torch.ones(2, 1, dtype=torch.float64)},
    ],
)
def test_other_shapes_dtypes_constants_and_trees_are_other_kinds(runner, other):
    model = Denoiser()
    for _ in range(2):
        runner(model, arguments(0))
    for _ in range(2):
        given = arguments(1) | other
        assert torch.equal(runner(model, given), call_plainly(model, given))
        assert runner.counters.direct == 2
    assert runner.counters.captures == 2


def test_the_least_used_recordings_leave(runner):
    model = Denoiser()
    for size in (3, 4):
        for _ in range(2):
            runner(model, arguments(0, size))
    runner(model, arguments(0, 3))  # 4 is now the older one
    for _ in range(2):
        runner(model, arguments(0, 5))
    assert len(runner) == 2
    assert runner.counters.captures == 3
    runner(model, arguments(0, 3))
    assert runner.counters.captures == 3
    runner(model, arguments(0, 4))
    assert runner.counters.captures == 4
    assert runner.backend.forgets == 0


def test_a_runner_of_one_gives_the_memory_back_before_the_next():
    runner, model = GraphRunner(Fake(), limit=1), Denoiser()
    for size in (3, 4):
        for _ in range(2):
            runner(model, arguments(0, size))
    assert (len(runner), runner.backend.forgets) == (1, 1)
    with pytest.raises(ValueError, match="limit=0"):
        GraphRunner(Fake(), limit=0)


def test_drop_forgets_kinds_and_recordings(runner):
    model = Denoiser()
    for _ in range(2):
        runner(model, arguments(0))
    runner.drop()
    assert (len(runner), runner.backend.forgets) == (0, 1)
    before = counts(runner)
    runner(model, arguments(0))
    assert counts(runner) == (before[0] + 1, before[1], before[2])


class Opaque:
    pass


def test_what_the_runner_does_not_know_runs_directly(runner):
    class Takes(nn.Module):
        def forward(self, x, thing):
            return (x + 1, thing)

    for _ in range(3):
        given = {"x": torch.ones(2), "thing": {"a": [Opaque()]}}
        assert torch.equal(runner(Takes(), given), torch.full((2,), 2.0))
    assert counts(runner) == (3, 0, 0)


def test_tensors_elsewhere_run_directly(runner):
    runner.backend.device = torch.device("meta")
    for _ in range(3):
        runner(Denoiser(), arguments(0))
    assert counts(runner) == (3, 0, 0)


def test_a_hook_sees_the_first_call_after_it_came(runner):
    model, seen = Denoiser(), []
    for _ in range(3):
        runner(model, arguments(0))
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    runner(model, arguments(0))
    assert seen == [1]
    handle.remove()
    runner(model, arguments(0))
    assert counts(runner) == (2, 1, 3)
