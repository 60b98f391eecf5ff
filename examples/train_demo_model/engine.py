"""One training step, made fast: bf16 copies of the weights, compiled blocks, a CUDA graph.

The networks are float32 ("masters"); the optimiser and the average work on them. Forward and
backward run on a working copy, bf16 on a GPU, so that no norm meets a weight of another type.
Every speed-up is tried before it is used (:meth:`Engine.settle`), and dropped if it fails.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.train_demo_model.clock import Clock, Log, learning_rate
from examples.train_demo_model.optim import MuonAdamW

Batch = Sequence[Tensor]
MODE_ERRORS = (RuntimeError, AssertionError, TypeError, ImportError, OSError)
"""What a compiler or a capture that does not work here raises."""
DIRECT_RUNS = 3
"""Of one batch, that a graph's must be like. One direct run was not enough where a trained network
was taken up again: gradients of norm 0.36 and 0.50, and half the speed without a graph (H200)."""
WARM_STEPS = 3
TRIAL_STEPS = 8
SYNC_EVERY = 10
"""Steps between looks at the device: a host that runs far ahead would miss its deadline."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How steps are run."""

    name: str
    graph: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.bfloat16
    batches: int = 1
    """How many batches make one step: more where each step costs the host much time."""


GPU_MODES = (
    Mode("graph", graph=True),
    Mode("compiled blocks", compiled=True, batches=2),
    Mode("eager", batches=2),
    Mode("eager float32", dtype=torch.float32, batches=2),
)
"""In the order of trial. A graph of compiled blocks is not among them: on an H200 with torch 2.11
its capture failed, and after that no step of any kind ran in the process."""
CPU_MODES = (Mode("eager float32", dtype=torch.float32),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The rate and the average's memory over one stage."""

    peak: float
    warmup: int
    decay_from: float
    average: float = 0.999
    """The average's decay for a step, once the stage is old enough."""

    def rate(self, clock: Clock) -> float:
        """The learning rate now."""
        return learning_rate(
            self.peak, clock.fraction, clock.steps, warmup=self.warmup, decay_from=self.decay_from
        )

    def blend(self, clock: Clock) -> float:
        """How much of the weights enters the average now."""
        return 1 - min(self.average, (1 + clock.steps) / (10 + clock.steps))


class Engine:
    """Trains those weights of ``master`` that ``trained`` picks by name.

    ``draw`` makes so many batches, as one, on the device; ``loss`` takes the working copy and a
    batch, draws no lots, and never makes the host wait. ``compile_blocks`` compiles the working
    copy in place.
    """

    def __init__(
        self,
        master: nn.Module,
        average: nn.Module,
        *,
        draw: Callable[[int], Batch],
        loss: Callable[[Any, Batch], Tensor],
        trained: Callable[[str], bool] = lambda _: True,
        is_matrix: Callable[[str, Tensor], bool] = lambda _n, _w: False,
        compile_blocks: Callable[[Any], None] | None = None,
    ) -> None:
        self.master, self.average = master, average
        self.draw, self.loss, self.compile_blocks = draw, loss, compile_blocks
        named = [(n, w) for n, w in master.named_parameters() if trained(n)]
        self._names = [name for name, _ in named]
        self._weights: list[Tensor] = [weight for _, weight in named]
        averages = dict(average.named_parameters())
        self._averages: list[Tensor] = [averages[name] for name in self._names]
        self.optimizer = MuonAdamW([(n, w.detach()) for n, w in named], is_matrix)
        self._grads = [torch.zeros_like(weight) for weight in self._weights]
        device = self._weights[0].device
        self.device = device
        self._rate = torch.zeros((), device=device)
        self._blend = torch.zeros((), device=device)
        self._value = torch.zeros((), device=device)
        self._norm = torch.zeros((), device=device)
        self.mode = CPU_MODES[0]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[Tensor] = []
        self._copy_master()

    def state(self) -> dict[str, Any]:
        """What a later piece resumes from, clock excepted."""
        return {
            "master": self.master.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state(),
        }

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """Continues from :meth:`state`, in place."""
        self.master.load_state_dict(saved["master"])
        self.average.load_state_dict(saved["average"])
        torch._foreach_copy_(self.optimizer.state(), saved["optimizer"])
        torch._foreach_copy_(self._working, self._weights)

    def step(self, rate: float, blend: float) -> None:
        """One step of training; the host does not wait for it."""
        self._rate.fill_(rate)
        self._blend.fill_(blend)
        batch = self.draw(self.mode.batches)
        if self._graph is None:
            self._run(batch)
        else:
            for target, source in zip(self._static, batch, strict=True):
                target.copy_(source)
            self._graph.replay()

    def last(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step; waits for it."""
        return self._value.item(), self._norm.item()

    def settle(self, modes: Sequence[Mode], log: Log, stage: str) -> Mode:
        """The first mode whose trial steps run and stay finite; the weights are as before.

        Where there is only one, it is taken without trial.
        """
        if len(modes) == 1:
            self._prepare(modes[0])
            return modes[0]
        before = [tensor.clone() for tensor in self._memory()]
        for mode in modes:
            begin = log.seconds()
            try:
                self._prepare(mode)
                for _ in range(TRIAL_STEPS):
                    self.step(1e-5, 0.01)
                sums = torch.stack([tensor.float().sum() for tensor in self._memory()])
                fault = "" if bool(torch.isfinite(sums).all()) else "not finite"
                if not math.isfinite(self._value.item()):
                    fault = "loss not finite"
            except MODE_ERRORS as error:
                fault = repr(error)[:300]
            with torch.no_grad():
                torch._foreach_copy_(self._memory(), before)
                torch._foreach_copy_(self._working, self._weights)
            log(stage, mode=mode.name, fault=fault or "none", seconds=log.seconds() - begin)
            if not fault:
                self.mode = mode
                return mode
        raise RuntimeError(
            f"stage {stage!r}: no way to run a step works; see the lines above. "
            "A failed capture of a CUDA graph can spoil the process: try --no-graphs."
        )

    def close(self) -> None:
        """Frees the graph and its memory."""
        self._graph, self._static = None, []
        gc.collect()

    def _memory(self) -> list[Tensor]:
        """All that training changes, where a trial must leave no trace."""
        return [*(w.detach() for w in self._weights), *self._averages, *self.optimizer.state()]

    def _copy_master(self) -> None:
        self.work = copy.deepcopy(self.master).to(self.mode.dtype).train()
        weights = dict(self.work.named_parameters())
        for name, weight in weights.items():
            weight.requires_grad_(name in set(self._names))
        self._working: list[Tensor] = [weights[name] for name in self._names]

    def _prepare(self, mode: Mode) -> None:
        self.close()
        torch.compiler.reset()
        self.mode = mode
        self._copy_master()
        if mode.compiled and self.compile_blocks is not None:
            self.compile_blocks(self.work)
        if mode.graph:
            self._capture()

    def _capture(self) -> None:
        self._static = [tensor.clone() for tensor in self.draw(self.mode.batches)]
        self._rate.fill_(1e-5)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_STEPS):
                self._run(self._static)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(self._static)
        # The graph must do what it has recorded, on another batch than it was recorded with.
        for target, source in zip(self._static, self.draw(self.mode.batches), strict=True):
            target.copy_(source)
        graph.replay()
        replayed = self.last()
        runs = []
        for _ in range(DIRECT_RUNS):
            self._run(self._static)
            runs.append(self.last())
        if not all(_among(a, direct) for a, *direct in zip(replayed, *runs, strict=True)):
            raise RuntimeError(f"the graph gives loss, gradient {replayed}, running it {runs}")
        self._graph = graph

    def _run(self, batch: Batch) -> None:
        """Forward, backward, clipping, optimiser, average; on the device only."""
        loss = self.loss(self.work, batch)
        found = torch.autograd.grad(loss, self._working, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_copy_(self._grads, found)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._grads)))
            torch._foreach_mul_(self._grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
            self.optimizer.step(self._grads, self._rate)
            torch._foreach_copy_(self._working, self._weights)
            apart = torch._foreach_sub(self._weights, self._averages)
            torch._foreach_mul_(apart, self._blend)
            torch._foreach_add_(self._averages, apart)
            self._value.copy_(loss.detach())
            self._norm.copy_(norm)


@dataclass
class Hook:
    """Something to do now and then while training: looks, saves."""

    every: float
    """Seconds."""
    action: Callable[[], None]
    due: float = 0.0


def train(
    engine: Engine, clock: Clock, schedule: Schedule, log: Log, stage: str, hooks: Sequence[Hook]
) -> bool:
    """Steps until the clock says so; True when the stage is complete.

    Raises :class:`FloatingPointError` where the loss is not finite; the last saved state stays.
    """
    for hook in hooks:
        hook.due = log.seconds() + hook.every
    report_steps, report_at, next_report = clock.steps, log.seconds(), 0.0
    while not (clock.done or clock.out_of_time):
        engine.step(schedule.rate(clock), schedule.blend(clock))
        clock.tick()
        if clock.steps % SYNC_EVERY:
            continue
        value, norm = engine.last()
        if not math.isfinite(value) or not math.isfinite(norm):
            raise FloatingPointError(f"{stage}: loss={value}, gradient={norm}, step {clock.steps}")
        now = log.seconds()
        if now >= next_report:
            speed = (clock.steps - report_steps) / max(now - report_at, 1e-6)
            rates = {"it_s": speed, "done": clock.fraction, "eta": clock.eta()}
            log(stage, step=clock.steps, loss=value, grad=norm, **rates, lr=schedule.rate(clock))
            report_steps, report_at, next_report = clock.steps, now, now + 5
        for hook in hooks:
            if now >= hook.due:
                hook.action()
                clock.pause()
                report_steps, report_at = clock.steps, log.seconds()
                hook.due = log.seconds() + hook.every
    return clock.done


def _among(value: float, direct: Sequence[float]) -> bool:
    """Whether a value lies among those of direct runs, or outside by no more than they spread."""
    spread = max(0.1 * max(map(abs, direct)), max(direct) - min(direct))
    return min(direct) - spread <= value <= max(direct) + spread
