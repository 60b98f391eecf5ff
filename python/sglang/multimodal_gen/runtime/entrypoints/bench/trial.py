"""One request after another on a loaded pipeline, timed step by step and as a whole."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.configs.step_cache_choice import chosen
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompileCounters
from sglang.multimodal_gen.runtime.cache.graph_runner import GraphCounters
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.platforms.device import synchronize
from sglang.multimodal_gen.runtime.utils.component_roles import is_denoiser
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent


@dataclass(frozen=True, slots=True)
class Trial:
    """One request: milliseconds of each step but the first (which shares its time with the loop's
    set-up), seconds in all and by stage, the peak of memory in MiB, and the denoisers' forwards a
    step."""

    steps_ms: tuple[float, ...]
    seconds: float
    stages: Mapping[str, float]
    peak_mb: float
    forwards_a_step: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over all trials; quartiles tell more of a noisy machine than a deviation."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        first = third = values[0]
        if len(values) > 1:
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), min(values), max(values), (first, third), len(values))


class StepClock:
    """Marks the ends of steps: by events on the GPU's stream, without waiting, or by the clock.

    Attributes:
        on_step: called at each mark too, with the number of marks before it.
    """

    def __init__(self, device: str, on_step: Callable[[int], None] | None = None) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[list[Any]] = []
        self.on_step = on_step

    def heard(self, event: ProgressEvent) -> None:
        """A `RequestControl`'s listener: a loop begins at 0 steps done."""
        if event.phase != "denoise":
            return
        if event.done == 0 or not self._marks:
            self._marks.append([])
        if event.done == 0:
            return
        if self.on_step is not None:
            self.on_step(self.steps)
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks[-1].append(mark)
        else:
            self._marks[-1].append(time.perf_counter())

    @property
    def steps(self) -> int:
        """That have ended, of all loops."""
        return sum(map(len, self._marks))

    def intervals_ms(self) -> tuple[float, ...]:
        """Between the marks of each loop; the device must be done."""
        pairs = [pair for marks in self._marks for pair in pairwise(marks)]
        if self._on_gpu:
            return tuple(first.elapsed_time(second) for first, second in pairs)
        return tuple(1e3 * (second - first) for first, second in pairs)


class Forwards:
    """Counts the forwards of modules while it is entered, by hooks or, with CUDA graphs, by their
    runner's counters: to it a hook is another kind of call, to be recorded anew.

    Args:
        graphs: the runner's counters, if all forwards go through it. Those under a step cache do
            not; they are counted by hooks.
    """

    def __init__(self, modules: Iterable[nn.Module], graphs: GraphCounters | None = None) -> None:
        self.count = 0
        self._modules = [] if graphs is not None else list(modules)
        self._graphs = graphs
        self._handles: list[Any] = []

    def __enter__(self) -> Forwards:
        self._handles = [m.register_forward_pre_hook(self._heard) for m in self._modules]
        self.count -= self._called()
        return self

    def __exit__(self, *_: object) -> None:
        self.count += self._called()
        for handle in self._handles:
            handle.remove()

    def _called(self) -> int:
        return 0 if self._graphs is None else self._graphs.direct + self._graphs.replays

    def _heard(self, _module: nn.Module, _inputs: Any) -> None:
        self.count += 1


class Side(ABC):
    """A loaded model that is measured.

    Attributes:
        name: of its row.
        device: where it runs.
        modules: its components by name, networks and others.
        trials: what was measured so far.
        warm_ups: what ran before, of which the first waited for compilers and the like.
        notes: one sentence for each choice made while loading.
        graphs: counters of CUDA graphs, where they are on.
        compiled: counters of compiled blocks, where this runtime compiles them.
    """

    name: str
    device: str
    modules: Mapping[str, Any]
    notes: Sequence[str] = ()
    graphs: GraphCounters | None = None
    compiled: CompileCounters | None = None

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.warm_ups: list[Trial] = []

    @abstractmethod
    def run(self, clock: StepClock | None = None) -> Trial:
        """One request, from its settings to pixels."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Those of the components that compute."""
        return {n: part for n, part in self.modules.items() if isinstance(part, nn.Module)}

    def forwards(self, *, step_cache: bool = False) -> Forwards:
        """A counter of the denoisers', for a request with or without a step cache."""
        denoisers = (module for name, module in self.networks.items() if is_denoiser(name))
        return Forwards(denoisers, None if step_cache else self.graphs)

    def weight_bytes(self) -> int:
        """What its modules hold on the device."""
        return sum(_storages(self.networks.values()).values())

    def dtypes(self) -> dict[str, torch.dtype]:
        """Network -> the floating dtype of 16 bits or more that most of its weights have."""
        found = {}
        for name, module in self.networks.items():
            counts: Counter[torch.dtype] = Counter()
            for parameter in module.parameters():
                if parameter.is_floating_point() and parameter.element_size() > 1:
                    counts[parameter.dtype] += parameter.numel()
            if counts:
                ((found[name], _),) = counts.most_common(1)
        return found


class RuntimeSide(Side):
    """This runtime, or whatever ``--backend`` put behind its doors."""

    def __init__(
        self,
        name: str,
        model: ModelDescription,
        pipeline: ComposedPipelineBase,
        values: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.name = name
        self.model = model
        self.pipeline = pipeline
        self.values = values
        self.device = pipeline.parallel.device.type
        self.modules = pipeline.modules
        self.notes = pipeline.notes
        self.compiled = None if pipeline.compiled is None else pipeline.compiled.counters

    @property
    def graphs(self) -> GraphCounters | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of its graph runner."""
        return None if self.pipeline.graphs is None else self.pipeline.graphs.counters

    def run(self, clock: StepClock | None = None) -> Trial:
        """See `Side.run`."""
        clock = StepClock(self.device) if clock is None else clock
        params = self.model.sampling_params(self.values)
        synchronize(self.device)
        start = time.perf_counter()
        batches = self.model.admit(params, RequestControl(clock.heard))
        wishes = [(b.request.step_cache, b.request.step_cache_threshold) for b in batches]
        step_cache = any(chosen(*wish, None) is not None for wish in wishes)
        with self.forwards(step_cache=step_cache) as forwards:
            outputs = [self.pipeline.forward(b, self.pipeline.server_args) for b in batches]
        synchronize(self.device)
        seconds = time.perf_counter() - start
        stages: dict[str, float] = {}
        for output in outputs:
            for name, taken in output.timings.items():
                stages[name] = stages.get(name, 0.0) + taken
        peak = max(output.peak_memory_mb for output in outputs)
        counted = forwards.count / clock.steps
        return Trial(clock.intervals_ms(), seconds, stages, peak, counted)


def measure(sides: Sequence[Side], warm_up: int, rounds: int) -> None:
    """Warm all sides up, then time them in turn, each round in the other order: clocks, heat and
    neighbours hit all alike."""
    for side in sides:
        for _ in range(warm_up):
            side.warm_ups.append(side.run())
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.trials.append(side.run())


def summary(side: Side, others: Sequence[Side]) -> dict[str, Any]:
    """A side's numbers; on a GPU its peak is without what the others' modules hold meanwhile."""
    trials = side.trials
    peak = max(trial.peak_mb for trial in trials)
    if side.device == "cuda":
        peak -= sum(other.weight_bytes() for other in others) / 2**20
    stages = {
        name: statistics.median(trial.stages.get(name, 0.0) for trial in trials)
        for name in trials[0].stages
    }
    return {
        "name": side.name,
        "step_ms": Spread.of([ms for trial in trials for ms in trial.steps_ms]),
        "seconds": Spread.of([trial.seconds for trial in trials]),
        "first_seconds": (side.warm_ups or trials)[0].seconds,
        "stages": stages,
        "peak_gib": peak / 1024,
        "forwards_a_step": trials[-1].forwards_a_step,
        "dtypes": {name: str(d).removeprefix("torch.") for name, d in side.dtypes().items()},
        "notes": list(side.notes),
        "graphs": side.graphs,
        "compiled": side.compiled,
    }


def _storages(parts: Iterable[Any]) -> dict[int, int]:
    """Address and bytes of each block of device memory behind modules' tensors."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    held = [tensor.untyped_storage() for tensor in tensors if tensor.is_cuda]
    return {storage.data_ptr(): storage.nbytes() for storage in held}
