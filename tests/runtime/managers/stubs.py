"""Requests without a model, and a runner that makes flat pictures of their seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, DiffusionError
from sglang.multimodal_gen.runtime.utils.progress import Preview

DEFAULTS = {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 4, "seed": 1}


def parts(params_cls=ImageSamplingParams, size=4, previews=0, **values) -> list[Req]:
    """An admitted request."""
    params = params_cls.from_values(DEFAULTS | values)
    return admit(params, ImagePipelineConfig(), batching_max_size=size, previews=previews)


def flat_output(batch: Req, warnings: Iterable[str] = ()) -> OutputBatch:
    """Pictures whose every pixel is their seed / 255."""
    pixels = torch.tensor([seed % 256 / 255 for seed in batch.seeds])
    return OutputBatch(
        request_id=batch.request_id,
        output=pixels[:, None, None, None].expand(-1, 3, 4, 6).clone(),
        prompt=batch.prompt,
        seeds=batch.seeds,
        timings={"denoising_stage": 0.5},
        peak_memory_mb=1.0,
        warnings=[*batch.warnings, *warnings],
        warned_images=batch.warned_images,
    )


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class StubRunner:
    """Runs batches at once and keeps them; each takes ``seconds(batch)`` of its clock."""

    clock: Clock | None = None
    seconds: Callable[[Req], float] = lambda batch: 1.0
    on_step: Callable[[Req, int], object] = lambda batch, step: None
    fail: Callable[[Req], DiffusionError | Exception | None] = lambda batch: None
    batches: list[Req] = field(default_factory=list)
    steps: int = 0

    def run(self, batch: Req) -> OutputBatch:
        self.batches.append(batch)
        total = batch.num_inference_steps
        for step in range(total):
            if batch.control.cancelled.is_set():
                raise Cancelled("stopped")
            self.steps += 1
            if self.clock is not None:
                self.clock.now += self.seconds(batch) / total
            self.on_step(batch, step)
            for image, count in enumerate(batch.previews):
                if count:
                    pixels = np.full((4, 6, 3), batch.seeds[image] % 256, dtype=np.uint8)
                    batch.control.show(Preview(image, step + 1, total, pixels))
            batch.control.report("denoise", step + 1, total, "denoising")
        error = self.fail(batch)
        if error is not None:
            raise error
        return flat_output(batch)

    @property
    def sizes(self) -> list[int]:
        return [batch.batch_size for batch in self.batches]


@dataclass
class Heard:
    """A watcher that writes everything down."""

    events: list[str] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    previews: list[Preview] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: DiffusionError | None = None
    keeps_states: bool = False
    states: list[tuple[int, LoopState]] = field(default_factory=list)
    resumptions: list[tuple[int, int]] = field(default_factory=list)

    def checkpointed(self, part: int, state: LoopState) -> None:
        self.states.append((part, state))

    def resumed(self, part: int, step: int) -> None:
        self.resumptions.append((part, step))

    def started(self) -> None:
        self.events.append("started")

    def progressed(self, fraction: float) -> None:
        self.fractions.append(fraction)

    def previewed(self, preview: Preview) -> None:
        self.previews.append(preview)

    def made(self, output: OutputBatch) -> None:
        self.events.append("made")
        self.warnings += output.warnings
        self.seeds += [round(value * 255) for value in output.output[:, 0, 0, 0].tolist()]

    def ended(self, error: DiffusionError | None) -> None:
        self.events.append("ended")
        self.error = error
