"""The engine: the optimiser's arithmetic, and that no speed-up is kept that does not work."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from examples.train_demo_model.clock import Clock, Log
from examples.train_demo_model.engine import CPU_MODES, Engine, Hook, Mode, Schedule, train
from examples.train_demo_model.optim import MuonAdamW, orthogonal


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_orthogonal_brings_all_singular_values_near_one(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    before = torch.linalg.svdvals(matrices)
    after = torch.linalg.svdvals(orthogonal(matrices))
    assert before.max() / before.min() > 2
    assert after.min() > 0.3
    assert after.max() < 1.3


def test_without_matrices_the_optimiser_is_adamw():
    torch.manual_seed(0)
    mine = [torch.randn(4, 3), torch.randn(5)]
    theirs = [nn.Parameter(tensor.clone()) for tensor in mine]
    ours = MuonAdamW([("a", mine[0]), ("b", mine[1])], lambda _n, _w: False, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [
            {"params": theirs[:1], "weight_decay": 0.1},
            {"params": theirs[1:], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.98),
    )
    for _ in range(5):
        grads = [torch.randn_like(tensor) for tensor in mine]
        ours.step(grads, torch.tensor(0.01))
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


def small_engine(seed: int = 0) -> Engine:
    """Learns a linear map."""
    torch.manual_seed(seed)
    truth = torch.randn(6, 4)
    master = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def draw(batches: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32 * batches, 6)
        return x, x @ truth

    def loss(work: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (work(batch[0]) - batch[1]).square().mean()

    average = copy.deepcopy(master).requires_grad_(False)
    return Engine(master, average, draw=draw, loss=loss, is_matrix=lambda n, w: n == "0.weight")


SCHEDULE = Schedule(peak=0.02, warmup=5, decay_from=0.5, average=0.9)


def test_training_learns_and_the_average_follows(tmp_path):
    engine, log = small_engine(), Log(tmp_path / "log.jsonl")
    engine.step(0.0, 0.0)
    first = engine.last()[0]
    seen = []
    clock = Clock(1e9, 200, 1e18)
    hook = Hook(0.0, lambda: seen.append(clock.steps))
    assert train(engine, clock, SCHEDULE, log, "toy", [hook])
    assert engine.last()[0] < 0.3 * first
    assert seen
    for a, b in zip(engine.master.parameters(), engine.average.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0.2, atol=0.05)


def test_a_resumed_engine_goes_on_as_if_nothing_had_happened():
    whole, first, second = small_engine(), small_engine(), small_engine(1)
    second.draw = whole.draw

    def steps(engine: Engine, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(3):
            engine.step(0.01, 0.1)

    steps(whole, 5)
    steps(first, 5)
    second.load(copy.deepcopy(first.state()))
    steps(whole, 6)
    steps(second, 6)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state()["optimizer"], second.state()["optimizer"], strict=True)
    )
    for a, b in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(a, b)


def test_modes_that_fail_or_give_nan_are_passed_over_without_a_trace(tmp_path):
    engine = small_engine()
    before = [weight.detach().clone() for weight in engine.master.parameters()]
    broken, wild = Mode("broken", compiled=True), Mode("wild", dtype=torch.float64)
    right = engine.loss

    def compile_blocks(_: nn.Module) -> None:
        raise RuntimeError("no compiler")

    def loss(work: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        dtype = next(work.parameters()).dtype
        found = right(work, (batch[0].to(dtype), batch[1].to(dtype)))
        return found * float("nan") if found.dtype == torch.float64 else found

    engine.compile_blocks, engine.loss = compile_blocks, loss
    log = Log(tmp_path / "log.jsonl")
    chosen = engine.settle([broken, wild, Mode("plain", dtype=torch.float32)], log, "toy")
    assert chosen.name == "plain"
    lines = log.path.read_text()
    assert "no compiler" in lines
    assert "not finite" in lines
    for old, new in zip(before, engine.master.parameters(), strict=True):
        assert torch.equal(old, new.detach())
    assert not any(tensor.any() for tensor in engine.optimizer.state())

    with pytest.raises(RuntimeError, match="no way"):
        engine.settle([broken, wild], log, "toy")


def test_on_a_cpu_there_is_one_mode():
    assert [mode.graph or mode.compiled for mode in CPU_MODES] == [False]
