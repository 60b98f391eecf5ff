from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stages import DenoisingStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, PipelineDefinitionError

from seed_samples.my_model import MyModelPipelineConfig
from seed_samples.stubs import StubTransformer, stub_request

STEPS = 4


def prepared(**fields):
    batch = dataclasses.replace(stub_request(), **fields)
    generator = torch.Generator().manual_seed(0)
    batch.latents = torch.randn(1, 4, 64, generator=generator)
    batch.raw_latent_shape = (1, 16, 4, 4)
    batch.prompt_embeds = [torch.randn(1, 6, 8, generator=generator)]
    batch.timesteps = torch.linspace(1000, 250, STEPS)
    batch.sigmas = torch.linspace(1, 0.25, STEPS).tolist()
    return batch


def denoise(batch, scheduler=None):
    torch.manual_seed(0)
    transformer = StubTransformer().requires_grad_(False)
    stage = DenoisingStage(transformer, scheduler or FlowMatchEulerDiscreteScheduler())
    args = ServerArgs.from_flat(device="cpu", pipeline_config=MyModelPipelineConfig())
    return stage.forward(batch, args), transformer


def test_the_loop_is_eulers():
    batch = prepared()
    expected, steps = batch.latents, [*batch.sigmas, 0.0]
    torch.manual_seed(0)
    transformer = StubTransformer().requires_grad_(False)
    for now, after, t in zip(steps, steps[1:], batch.timesteps, strict=False):
        expected = expected + (after - now) * transformer(
            expected, batch.prompt_embeds[0], t.expand(1)
        )
    out, _ = denoise(batch)
    unpacked = MyModelPipelineConfig().post_denoising_loop(expected, batch)
    torch.testing.assert_close(out.latents, unpacked)


def test_the_shared_scheduler_is_not_touched():
    scheduler = FlowMatchEulerDiscreteScheduler()
    before = scheduler.timesteps.clone()
    first, _ = denoise(prepared(), scheduler)
    second, _ = denoise(prepared(), scheduler)
    assert scheduler.step_index is None
    assert torch.equal(scheduler.timesteps, before)
    assert torch.equal(first.latents, second.latents)


def test_a_scheduler_that_a_custom_stage_prepared_is_copied_as_it_is():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    batch = prepared()
    batch.timesteps, batch.sigmas = scheduler.timesteps, None
    out, _ = denoise(batch, scheduler)
    assert torch.equal(out.scheduler.sigmas, scheduler.sigmas)


def test_progress_is_told_after_every_step():
    seen = []
    denoise(prepared(control=RequestControl(listener=seen.append)))
    assert [(event.done, event.total) for event in seen] == [(i, STEPS) for i in range(STEPS + 1)]


def test_cancelling_stops_within_one_step():
    stop = threading.Event()

    def listener(event):
        if event.done == 2:
            stop.set()

    torch.manual_seed(0)
    transformer = StubTransformer().requires_grad_(False)
    stage = DenoisingStage(transformer, FlowMatchEulerDiscreteScheduler())
    args = ServerArgs.from_flat(device="cpu", pipeline_config=MyModelPipelineConfig())
    with pytest.raises(Cancelled, match="3 of 4"):
        stage.forward(prepared(control=RequestControl(listener, stop)), args)
    assert transformer.calls == 3


def test_guidance_without_negative_embeddings_is_refused():
    with pytest.raises(PipelineDefinitionError, match="negative_prompt_embeds is empty"):
        denoise(prepared(do_classifier_free_guidance=True, true_cfg_scale=2.0))


def test_guidance_extrapolates_from_the_negative_branch():
    batch = prepared(do_classifier_free_guidance=True, true_cfg_scale=3.0)
    batch.negative_prompt_embeds = [torch.zeros(1, 6, 8)]
    guided, transformer = denoise(batch)
    assert transformer.calls == 2 * STEPS
    # This stub is linear in the text, so guidance of strength s equals text moved s times as far.
    moved = prepared()
    moved.prompt_embeds = [3.0 * moved.prompt_embeds[0]]
    expected, _ = denoise(moved)
    torch.testing.assert_close(guided.latents, expected.latents)
