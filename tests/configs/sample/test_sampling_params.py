import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_SEED,
    ImageSamplingParams,
    SamplingParams,
    is_blank,
)
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

BAD = {
    "prompt": [3, ["a", None], "half \ud83d", "x" * 100_001],
    "negative_prompt": [3, ["a"]],
    "seed": [-2, 1.5, "42", True, [], [1, None], MAX_SEED + 1],
    "num_outputs_per_prompt": [0, -1, 2.5, "3", True, None],
    "height": [0, -16, 16.0, "64", True],
    "width": [0, -16, math.inf],
    "num_inference_steps": [0, -1, 1.5, "4", 10**9, True, None],
    "guidance_scale": [-1, math.nan, math.inf, "3", None, True],
    "true_cfg_scale": [-0.5, math.nan, "4"],
    "max_sequence_length": [0, -1, 1.5],
    "task_type": ["T2X", 3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as caught:
        ImageSamplingParams(**{name: value})
    assert caught.value.field == name
    assert name in str(caught.value)


def test_zero_is_a_value():
    params = ImageSamplingParams(seed=0, guidance_scale=0, true_cfg_scale=0.0)
    assert (params.seed, params.guidance_scale, params.true_cfg_scale) == (0, 0, 0.0)


def test_a_task_may_be_named_in_any_case():
    assert (
        ModelTaskType.parse(ImageSamplingParams(task_type=" t2i ").task_type) is ModelTaskType.T2I
    )


def test_an_unknown_field_offers_the_nearest():
    with pytest.raises(InvalidRequest, match="Did you mean 'num_inference_steps'"):
        SamplingParams.from_values({"num_inference_step": 4})


@pytest.mark.parametrize("text", ["", "   ", "\u200b", "\n\t\x00", "\u2060\ufeff"])
def test_what_shows_nothing_is_blank(text):
    assert is_blank(text)


@given(st.text())
def test_any_valid_text_is_a_prompt(text):
    if all(not "\ud800" <= c <= "\udfff" for c in text):
        assert SamplingParams(prompt=text).prompts == [text]
