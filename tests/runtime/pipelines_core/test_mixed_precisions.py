"""Components of one pipeline in precisions of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.multimodal_gen import DiffGenerator

REQUEST = {
    "prompt": "a fox",
    "seed": 1,
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "negative_prompt": "blur",
    "true_cfg_scale": 2.0,
}


def picture(folder, **precisions):
    with DiffGenerator.from_pretrained(
        str(folder), device="cpu", precision="fp32", component_precisions=precisions
    ) as generator:
        seen = []
        denoiser = generator.pipeline.get_module("transformer")
        denoiser.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(
                {kwargs[name].dtype for name in kwargs if name.endswith(("states", "projections"))}
            ),
            with_kwargs=True,
        )
        made = generator.generate(**REQUEST)[0].array.astype(float)
        assert len(seen) == 4
        assert all(dtypes == {denoiser.x_embedder.weight.dtype} for dtypes in seen)
        return made


@pytest.fixture(scope="module")
def whole(folder):
    return picture(folder)


@pytest.mark.parametrize(
    "precisions",
    [
        {"transformer": "bf16"},
        {"transformer": "fp16"},
        {"text_encoder": "bf16"},
        {"text_encoder_2": "bf16"},
        {"text_encoder": "bf16", "text_encoder_2": "bf16"},
        {"text_encoder": "fp16", "transformer": "bf16"},
        {"vae": "bf16"},
        {"text_encoder_2": "bf16", "vae": "bf16"},
    ],
)
def test_any_mix_gives_the_picture_of_the_whole_but_for_rounding(folder, whole, precisions):
    made = picture(folder, **precisions)
    assert 0 < np.abs(made - whole).mean() < 12


def test_equal_precisions_are_handed_on_as_they_are(folder, whole):
    same = dict.fromkeys(("text_encoder", "text_encoder_2", "transformer", "vae"), "fp32")
    assert np.array_equal(picture(folder, **same), whole)


def test_the_demo_runs_with_a_denoiser_of_its_own_precision():
    with DiffGenerator.from_pretrained(
        "demo", device="cpu", component_precisions={"transformer": "bf16"}
    ) as generator:
        assert len(generator.generate(prompt="a red circle", seed=1, num_inference_steps=1)) == 1
        assert (
            generator.pipeline.get_module("transformer").x_embedder.weight.dtype == torch.bfloat16
        )
