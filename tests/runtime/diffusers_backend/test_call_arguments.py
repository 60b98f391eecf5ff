from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang.multimodal_gen.runtime.diffusers_backend.call_arguments import (
    calls_of,
    check_call,
    refused_field,
)
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import (
    CallSignature,
    offers,
    pipeline_class,
    signature_of,
)
from sglang.multimodal_gen.runtime.diffusers_backend.settings import (
    DiffusersPipelineConfig,
    DiffusersSamplingParams,
)
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, ModelNotFound


def calls(defaults, images=(), **values):
    signature = CallSignature("AnyPipeline", {"generator": None, **defaults})
    params = DiffusersSamplingParams(seed=1, **values)
    config = DiffusersPipelineConfig(signature=signature)
    (batch,) = admit(params, config, batching_max_size=9)
    batch.generator = [torch.Generator().manual_seed(seed) for seed in batch.seeds]
    batch.condition_image = list(images)
    made = calls_of(batch, signature)
    for call in made:
        call.pop("generator")
    return made


TEXT = {"prompt": None, "prompt_2": None, "negative_prompt": None, "height": 8, "eta": 0.0}


def test_only_what_was_set_is_passed_and_zero_is_a_value():
    assert calls(TEXT, prompt="a") == [{"prompt": "a"}]
    assert calls(TEXT, prompt="a", height=9, diffusers_kwargs={"eta": 0}) == [
        {"prompt": "a", "height": 9, "eta": 0}
    ]
    guided = {**TEXT, "guidance_scale": 7.5}
    assert calls(guided, prompt="a", guidance_scale=0)[0]["guidance_scale"] == 0


def test_texts_of_a_batch_have_one_entry_an_image():
    (call,) = calls(
        TEXT, prompt=["a", "b"], negative_prompt="n", diffusers_kwargs={"prompt_2": "c"}
    )
    assert call == {
        "prompt": ["a", "b"],
        "negative_prompt": ["n", "n"],
        "prompt_2": ["c", "c"],
    }


def test_images_that_a_call_cannot_tell_apart_are_made_one_by_one():
    image = SimpleNamespace()
    made = calls({**TEXT, "image": None}, images=[image], prompt="a", num_outputs_per_prompt=2)
    assert made == [{"prompt": "a", "image": image}] * 2
    assert calls({}, num_outputs_per_prompt=2) == [{}, {}]
    assert calls({"batch_size": 1}, num_outputs_per_prompt=2) == [{"batch_size": 2}]


def test_further_arguments_are_copied_for_each_call():
    options = {"eta": {"scale": 1}}
    (call,) = calls(TEXT, prompt="a", diffusers_kwargs=options)
    call["eta"].clear()
    assert options == {"eta": {"scale": 1}}


def test_embeddings_stand_for_a_prompt():
    embeds = torch.ones(1, 2, 3)
    (call,) = calls({**TEXT, "prompt_embeds": None}, diffusers_kwargs={"prompt_embeds": embeds})
    assert list(call) == ["prompt_embeds"]
    assert torch.equal(call["prompt_embeds"], embeds)


def test_what_has_no_default_must_be_given():
    signature = CallSignature("AnyPipeline", {"labels": inspect.Parameter.empty, "generator": None})
    with pytest.raises(
        InvalidRequest, match=r"diffusers_kwargs\.labels=None: AnyPipeline needs it"
    ):
        check_call(DiffusersSamplingParams(), signature)
    check_call(DiffusersSamplingParams(diffusers_kwargs={"labels": [1]}), signature)
    image = CallSignature("AnyPipeline", {"image": inspect.Parameter.empty})
    with pytest.raises(InvalidRequest, match="image_path=None"):
        check_call(DiffusersSamplingParams(), image)


def test_a_seed_that_would_not_count_is_refused():
    signature = CallSignature("AnyPipeline", {"steps": 1})
    with pytest.raises(InvalidRequest, match="seed=3: AnyPipeline takes no argument 'generator'"):
        check_call(DiffusersSamplingParams(seed=3), signature)


def test_a_refusal_of_the_pipeline_is_named_after_the_setting_it_is_about():
    arguments = {"prompt": "a", "image": 3, "eta": 1}
    assert refused_field("`image` has the wrong size", arguments) == ("image_path", 3)
    assert refused_field("eta must be 0", arguments) == ("diffusers_kwargs.eta", 1)
    assert refused_field("imagery", arguments) is None


def test_a_signature_is_the_named_parameters_of_the_real_class():
    signature = signature_of(pipeline_class("StableDiffusionPipeline"))
    assert signature.defaults["guidance_scale"] == 7.5
    assert "self" not in signature
    assert "kwargs" not in signature
    assert signature_of(pipeline_class("DiTPipeline")).required == ["class_labels"]


def test_a_name_that_is_no_pipeline_is_answered_with_the_nearest():
    with pytest.raises(ModelNotFound, match="Did you mean 'StableDiffusionPipeline'"):
        pipeline_class("StableDifusionPipeline")
    for name in (None, "", "UNet2DModel", "__doc__", "OnnxStableDiffusionPipeline"):
        assert not offers(name)
    assert offers("DDPMPipeline")
