"""A denoising loop that goes on gives the bits of one that was never interrupted."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_checkpoints import StepCheckpoints
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

VALUES = {"prompt": ["a fox", "a hen"], "height": 32, "width": 48, "num_inference_steps": 6,
          "max_sequence_length": 16, "seed": 3}  # fmt: skip


@dataclass
class Sink:
    """Keeps every state, as bytes: what a disk would give back."""

    states: list[bytes] = field(default_factory=list)
    resumptions: list[int] = field(default_factory=list)

    def due(self, step, total):
        return True

    def save(self, state):
        self.states.append(state.to_bytes())

    def resumed(self, step):
        self.resumptions.append(step)


@pytest.fixture(scope="module")
def worker(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator._open()


def run(worker, state=None, sink=None, **values):
    events: list[ProgressEvent] = []
    control = RequestControl(events.append, checkpoints=sink)
    (batch,) = worker.model.admit(worker.model.sampling_params(VALUES | values), control)
    batch.resume_from = state
    output = worker.run(batch)
    steps = [event.done for event in events if event.phase == "denoise" and event.done]
    return output, steps


def test_a_model_goes_on_at_every_step_with_the_same_bits(worker):
    plain, steps = run(worker)
    assert steps == [1, 2, 3, 4, 5, 6]
    sink = Sink()
    watched, _ = run(worker, sink=sink)
    assert torch.equal(watched.output, plain.output)
    assert len(sink.states) == 5  # none after the last step
    later = Sink()
    for done, data in enumerate(sink.states, 1):
        again, steps = run(worker, LoopState.from_bytes(data), later)
        assert torch.equal(again.output, plain.output)
        assert steps == list(range(done, 7))  # first where it stands; no step is done again
    assert later.resumptions == [1, 2, 3, 4, 5]
    assert len(later.states) == 4 + 3 + 2 + 1


def test_the_state_is_what_decides(worker):
    """Sensitivity: other latents in it give another picture."""
    plain, _ = run(worker)
    sink = Sink()
    run(worker, sink=sink)
    state = LoopState.from_bytes(sink.states[2])
    state.latents.mul_(0.5)
    other, _ = run(worker, state)
    assert not torch.equal(other.output, plain.output)


def test_rows_of_a_state_are_the_images_own(worker):
    sink = Sink()
    both, _ = run(worker, sink=sink)
    half = LoopState.from_bytes(sink.states[2]).rows(1, 2)
    alone, _ = run(worker, half, prompt=["a hen"], seed=[4])
    assert (alone.output[0] - both.output[1]).abs().max() <= 2 / 255
    assert alone.seeds == [4]


@pytest.mark.parametrize("values", [{"seed": 4}, {"num_inference_steps": 7}, {"width": 32}])
def test_a_state_of_another_loop_is_not_used_and_the_caller_told(worker, values):
    sink = Sink()
    run(worker, sink=sink)
    wanted, _ = run(worker, **values)
    output, steps = run(worker, LoopState.from_bytes(sink.states[2]), **values)
    assert torch.equal(output.output, wanted.output)
    assert steps[0] == 1
    assert any("began again" in text for text in output.warnings)
    half = LoopState.from_bytes(sink.states[2])
    halved = LoopState(**{name: getattr(half, name) for name in LoopState.__slots__}
                       | {"latents": half.latents.half()})  # fmt: skip
    assert run(worker, halved)[1][0] == 1


# Schedulers with a memory of their own.

SOLVERS = {
    "euler flow": FlowMatchEulerDiscreteScheduler(),
    "heun flow": FlowMatchHeunDiscreteScheduler(),
    "ddim": DDIMScheduler(),
    "dpm 3": DPMSolverMultistepScheduler(solver_order=3),
    "euler": EulerDiscreteScheduler(),
    "pndm": PNDMScheduler(),
    "unipc": UniPCMultistepScheduler(),
}


class Loop:
    """As much of a batch as the checkpoints look at."""

    def __init__(self, scheduler, sink=None, state=None) -> None:
        self.seeds = [5, 6]
        self.batch_size = 2
        self.timesteps = scheduler.timesteps
        self.control = RequestControl(checkpoints=sink)
        self.resume_from = state
        self.generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        self.warned = []

    def warn(self, text, images):
        self.warned.append(text)

    def run(self, scheduler) -> torch.Tensor:
        """A loop that draws from the images' generators in every step."""
        checkpoints = StepCheckpoints()
        noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        first, latents = checkpoints.begin(self, scheduler, noise, self.generators)
        for step in range(first, len(self.timesteps)):
            t = self.timesteps[step]
            draws = torch.stack([torch.randn(4, 8, 8, generator=g) for g in self.generators])
            prediction = torch.tanh(latents * 0.7) + 0.05 * draws
            latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
            checkpoints.step_done(self, scheduler, step + 1, latents, self.generators)
        return latents


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_solvers_and_generators_go_on_with_the_same_bits(name):
    def fresh():
        scheduler = copy.deepcopy(SOLVERS[name])
        scheduler.set_timesteps(8)
        return scheduler

    sink = Sink()
    scheduler = fresh()
    wanted = Loop(scheduler, sink).run(scheduler)
    assert len(sink.states) == len(scheduler.timesteps) - 1
    for data in sink.states:
        scheduler = fresh()
        loop = Loop(scheduler, None, LoopState.from_bytes(data))
        assert torch.equal(loop.run(scheduler), wanted)
        assert loop.warned == []
    scheduler = fresh()  # sensitivity: the generators' states matter
    state = LoopState.from_bytes(sink.states[3])
    state.generators[0].copy_(torch.Generator().manual_seed(9).get_state())
    assert not torch.equal(Loop(scheduler, None, state).run(scheduler), wanted)


def test_a_scheduler_that_cannot_be_kept_gives_no_state():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    scheduler.noise_sampler = object()
    sink = Sink()
    Loop(scheduler, sink).run(scheduler)
    assert sink.states == []
