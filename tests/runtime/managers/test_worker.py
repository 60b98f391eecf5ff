from __future__ import annotations

import json

import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InternalError,
    InvalidArgument,
    InvalidRequest,
    NonFiniteOutput,
    OutOfMemory,
)

SMALL = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}


@pytest.fixture
def generator(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator


@pytest.mark.parametrize("component", ["text_encoder_2", "transformer", "vae"])
@pytest.mark.parametrize("fault", [RuntimeError("boom"), MemoryError("full")])
def test_a_failure_inside_a_component_is_this_requests_alone(generator, component, fault):
    before = generator.generate(prompt="a fox", seed=1, **SMALL)

    def fail(*_):
        raise fault

    hook = generator.pipeline.get_module(component).register_forward_pre_hook(fail)
    if component == "vae":  # decode() does not go through forward
        hook.remove()
        hook = generator.pipeline.get_module(component).decoder.register_forward_pre_hook(fail)
    with pytest.raises(InternalError, match=str(fault)) as caught:
        generator.generate(prompt="a fox", seed=1, **SMALL)
    assert caught.value.__cause__ is fault
    hook.remove()
    after = generator.generate(prompt="a fox", seed=1, **SMALL)
    assert (after[0].array == before[0].array).all()


def test_a_picture_of_nans_is_an_error_and_not_a_black_file(generator):
    vae = generator.pipeline.get_module("vae")

    def overflow(module, inputs, output):
        return output * torch.inf

    hook = vae.decoder.register_forward_hook(overflow)
    with pytest.raises(NonFiniteOutput, match=r"VAE.s picture holds NaN"):
        generator.generate(prompt="a fox", **SMALL)
    hook.remove()


def test_the_checkpoints_defaults_stand_between_the_class_and_the_request(folder, tmp_path):
    copy = tmp_path / "fine-tune"
    copy.mkdir()
    for part in folder.iterdir():
        (copy / part.name).symlink_to(part)
    (copy / "sampling_params.json").write_text(json.dumps({**SMALL, "guidance_scale": 9.0}))
    with DiffGenerator.from_pretrained(str(copy), device="cpu") as generator:
        default = generator.generate(prompt="a fox", seed=1)
        assert default[0].array.shape == (32, 32, 3)
        assert default.parameters["guidance_scale"] == 9.0
        asked = generator.generate(prompt="a fox", seed=1, width=48, guidance_scale=0)
        assert asked[0].array.shape == (32, 48, 3)
        assert asked.parameters["guidance_scale"] == 0


@pytest.mark.parametrize(
    ("defaults", "problem"),
    [({"heigth": 32}, "Did you mean 'height'"), ({"height": -1}, "height=-1: must be")],
)
def test_bad_defaults_are_refused_when_the_model_loads(folder, tmp_path, defaults, problem):
    copy = tmp_path / "fine-tune"
    copy.mkdir()
    for part in folder.iterdir():
        (copy / part.name).symlink_to(part)
    (copy / "sampling_params.json").write_text(json.dumps(defaults))
    with pytest.raises(CheckpointError, match=f"sampling_params.json of .*{problem}"):
        DiffGenerator.from_pretrained(str(copy), device="cpu")


def test_an_operators_settings_reach_the_pipeline_config(folder):
    with (
        DiffGenerator.from_pretrained(
            str(folder), device="cpu", pipeline_config={"max_pixels": 32 * 32}
        ) as generator,
        pytest.raises(InvalidRequest, match="max_pixels=1024"),
    ):
        generator.generate(prompt="a fox", **(SMALL | {"width": 48}))
    with pytest.raises(InvalidArgument, match="Did you mean 'max_pixels'"):
        DiffGenerator.from_pretrained(str(folder), device="cpu", pipeline_config={"max_pixel": 1})


def test_precisions_come_from_the_component_then_the_whole_then_the_config(folder):
    def dtypes(**arguments):
        with DiffGenerator.from_pretrained(str(folder), device="cpu", **arguments) as generator:
            return {
                name: next(generator.pipeline.get_module(name).parameters()).dtype
                for name in ("transformer", "vae", "text_encoder")
            }

    assert set(dtypes().values()) == {torch.float32}
    assert set(dtypes(precision="config").values()) == {torch.bfloat16}
    mixed = dtypes(precision="bf16", component_precisions={"vae": "fp32"})
    assert mixed["vae"] is torch.float32
    assert mixed["transformer"] is torch.bfloat16


def test_a_full_device_is_told_with_what_to_ask_for_instead(generator):
    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 9 TiB")

    hook = generator.pipeline.get_module("transformer").register_forward_pre_hook(full)
    with pytest.raises(OutOfMemory, match=r"32x32, 1 images together.*9 TiB.*batching_max_size"):
        generator.generate(prompt="a fox", **SMALL)
    hook.remove()
    assert len(generator.generate(prompt="a fox", **SMALL)) == 1
