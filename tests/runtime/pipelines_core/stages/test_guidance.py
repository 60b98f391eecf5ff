"""Guidance on two ranks: one branch each, the same prediction on both; nothing done twice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import (
    ClassifierFreeGuidance,
    ParallelGuidance,
    guidance_for,
)
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from seed_samples.my_model import MyModelPipelineConfig
from seed_samples.stubs import StubTransformer, stub_request


class Rounded(StubTransformer):
    """Predicts in bf16 from float32 latents, as a bf16 model does where noise is float32."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).bfloat16()


class TwiceAsWide(StubTransformer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).repeat(1, 1, 2)


def transformer(cls=StubTransformer):
    torch.manual_seed(0)
    return cls().requires_grad_(False)


def request(scale=None, seed=0, images=1):
    batch = dataclasses.replace(
        stub_request(),
        do_classifier_free_guidance=scale is not None,
        true_cfg_scale=1.0 if scale is None else scale,
    )
    generator = torch.Generator().manual_seed(seed)
    batch.latents = torch.randn(images, 4, 64, generator=generator)
    batch.raw_latent_shape = (images, 16, 4, 4)
    batch.prompt_embeds = [torch.randn(images, 6, 8, generator=generator)]
    # A negative prompt of another length: each branch has its own.
    batch.negative_prompt_embeds = [torch.randn(images, 3, 8, generator=generator)]
    return batch


CASES = (
    request(),
    request(3.0),
    request(seed=1),
    request(1.5, seed=2, images=3),
    request(images=2),
)


def predict(guidance, model, batch, **settings):
    t = torch.full((len(batch.latents),), 500.0)
    config = MyModelPipelineConfig(**settings)
    return guidance.predict(model, config, batch, batch.latents, t)


def _predictions(_rank):
    guidance = guidance_for(ParallelState.create(ParallelLayout(cfg=2), "cpu").cfg)
    found = []
    for cls in (StubTransformer, Rounded):
        model = transformer(cls)
        for batch in CASES:
            calls = model.calls
            found.append((predict(guidance, model, batch), model.calls - calls))
    told = guidance.group.traffic["broadcast"]
    with pytest.raises(PipelineDefinitionError, match="TwiceAsWide predicts something other"):
        predict(guidance, transformer(TwiceAsWide), CASES[0])
    return found, told


def test_two_ranks_predict_what_one_does():
    (first, told), (second, _) = run_ranks(2, _predictions)
    expected = [
        predict(ClassifierFreeGuidance(), model, batch)
        for model in (transformer(), transformer(Rounded))
        for batch in CASES
    ]
    guided = 2 * [batch.do_classifier_free_guidance for batch in CASES]
    for (mine, calls), (other, other_calls), right, on in zip(
        first, second, expected, guided, strict=True
    ):
        assert mine.dtype == other.dtype == right.dtype
        assert torch.equal(mine, right)
        assert torch.equal(other, right)
        assert (calls, other_calls) == ((1, 1) if on else (1, 0))
    assert told == 6 + 2  # each prediction without guidance, and each model's dtype once


def test_the_branches_differ():
    batch = CASES[1]
    plain = dataclasses.replace(batch, do_classifier_free_guidance=False)
    plain.latents, plain.prompt_embeds = batch.latents, batch.prompt_embeds
    model = transformer()
    guided = predict(ClassifierFreeGuidance(), model, batch)
    assert (guided - predict(ClassifierFreeGuidance(), model, plain)).norm() > 1e-2 * guided.norm()


def test_a_family_may_keep_the_norm_of_the_positive_branch():
    model, batch = transformer(), CASES[3]
    plain = dataclasses.replace(batch, do_classifier_free_guidance=False)
    plain.latents, plain.prompt_embeds = batch.latents, batch.prompt_embeds
    positive = predict(ClassifierFreeGuidance(), model, plain)
    guided = predict(ClassifierFreeGuidance(), model, batch)
    kept = predict(ClassifierFreeGuidance(), model, batch, guidance_keeps_norm=True)
    torch.testing.assert_close(kept.norm(dim=-1), positive.norm(dim=-1))
    assert not torch.allclose(guided.norm(dim=-1), positive.norm(dim=-1), rtol=1e-3)
    torch.testing.assert_close(F.normalize(kept, dim=-1), F.normalize(guided, dim=-1))


def test_one_rank_needs_no_group():
    assert type(guidance_for(Group("cfg"))) is ClassifierFreeGuidance
    with pytest.raises(ValueError, match="guidance has 2 branches, and 'cfg' 3"):
        ParallelGuidance(Group("cfg", 0, (0, 1, 2)))
