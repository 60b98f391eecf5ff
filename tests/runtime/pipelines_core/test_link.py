from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.pipelines_core.link import Guarded, crossing, last_use, link
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    DecodingStage,
    DenoisingStage,
    InputValidationStage,
    LatentPreparationStage,
    TextEncodingStage,
    TimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from seed_samples.stubs import stub_request


@pytest.fixture
def stages():
    return {
        "input": InputValidationStage(),
        "text": TextEncodingStage(None, None),
        "latents": LatentPreparationStage(None),
        "timesteps": TimestepPreparationStage(None),
        "denoise": DenoisingStage(None, None),
        "decode": DecodingStage(None),
    }


def test_the_standard_chain_links(stages):
    link(stages)


@pytest.mark.parametrize("gone", ["input", "text", "latents", "timesteps", "denoise"])
def test_a_chain_without_any_one_stage_is_refused_or_still_makes_sense(stages, gone):
    del stages[gone]
    if gone == "denoise":
        link(stages)  # noise decodes to a picture of noise: the fields are there
        return
    with pytest.raises(PipelineDefinitionError, match="no earlier stage writes"):
        link(stages)


def test_only_latents_cross_to_a_decoder(stages):
    assert crossing(stages, 5) - {"height", "width", "data_type"} == {"latents"}


def test_prompt_embeddings_cross_to_a_denoiser_and_generators_do_not(stages):
    crossed = crossing(stages, 4)
    assert {"prompt_embeds", "latents", "timesteps"} <= crossed
    assert "generator" not in crossed


def test_tensors_are_freed_by_their_last_reader(stages):
    freed = last_use(stages)
    assert "generator" in freed["latents"]
    assert {"prompt_embeds", "timesteps"} <= freed["denoise"]
    assert freed["decode"] == {"latents"}


def test_nothing_is_freed_beside_a_stage_that_declares_nothing(stages):
    class Opaque(PipelineStage):
        def forward(self, batch, server_args):
            return batch

    link(stages | {"opaque": Opaque()})
    assert last_use(stages | {"opaque": Opaque()}) == {}
    with pytest.raises(PipelineDefinitionError, match="must declare"):
        crossing(stages | {"opaque": Opaque()}, 4)


def test_an_unwritten_field_says_so_when_read():
    with pytest.raises(AttributeError, match=r"Req.latents was read before any stage wrote it"):
        _ = stub_request().latents
    with pytest.raises(AttributeError, match="no field 'latent'"):
        _ = stub_request().latent


def test_the_guard_refuses_undeclared_access():
    class Careless(PipelineStage):
        reads = frozenset({"prompt"})
        writes = frozenset({"latents"})

        def forward(self, batch, server_args):
            return batch

    view = Guarded(stub_request(), Careless())
    assert view.prompt == ["a"]
    view.latents = 1
    with pytest.raises(PipelineDefinitionError, match=r"reads batch.timesteps"):
        _ = view.timesteps
    with pytest.raises(PipelineDefinitionError, match=r"writes batch.prompt"):
        view.prompt = ["b"]


def test_a_subclass_may_read_more_but_not_write_less():
    class More(DecodingStage):
        reads = DecodingStage.reads | {"height"}

    assert "height" in More.reads
    with pytest.raises(PipelineDefinitionError, match="drops"):

        class Less(DecodingStage):
            writes = frozenset()
