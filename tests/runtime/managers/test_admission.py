import dataclasses

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import (
    QwenImageEditPipelineConfig,
    QwenImageEditPlusPipelineConfig,
)
from sglang.multimodal_gen.configs.sample.flux import FluxSamplingParams
from sglang.multimodal_gen.configs.sample.qwen_image import QwenImageEditSamplingParams
from sglang.multimodal_gen.configs.sample.sampling_params import MAX_SEED
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.utils.errors import InternalError, InvalidRequest


def batches(size=100, config=None, **values):
    values = {"prompt": "a", "height": 64, "width": 64} | values
    config = FluxPipelineConfig() if config is None else config
    return admit(FluxSamplingParams(**values), config, batching_max_size=size)


def test_images_are_prompts_in_order_with_their_outputs_and_count_seeds_up():
    (batch,) = batches(prompt=["a", "b"], num_outputs_per_prompt=2, seed=5)
    assert batch.prompt == ["a", "a", "b", "b"]
    assert batch.seeds == [5, 6, 7, 8]
    assert batch.batch_size == 4


def test_batches_are_cut_without_losing_or_changing_an_image():
    (whole,) = batches(prompt=list("abcde"), seed=1, negative_prompt="n", true_cfg_scale=2.0)
    parts = batches(2, prompt=list("abcde"), seed=1, negative_prompt="n", true_cfg_scale=2.0)
    assert [len(p.prompt) for p in parts] == [2, 2, 1]
    assert [p for b in parts for p in b.prompt] == whole.prompt
    assert [s for b in parts for s in b.seeds] == whole.seeds
    assert all(len(b.negative_prompt) == b.batch_size for b in parts)


def test_a_seed_left_out_is_drawn_anew_and_told():
    drawn = {batches(seed=seed)[0].seeds[0] for seed in (None, -1, None, -1)}
    assert len(drawn) == 4
    assert batches(seed=0)[0].seeds == [0]


def test_a_list_of_seeds_is_one_an_image():
    assert batches(seed=[9, 3], num_outputs_per_prompt=2)[0].seeds == [9, 3]
    with pytest.raises(InvalidRequest, match="2 seeds for 3 images"):
        batches(seed=[9, 3], num_outputs_per_prompt=3)
    with pytest.raises(InvalidRequest, match="no room"):
        batches(seed=MAX_SEED, num_outputs_per_prompt=2)


@pytest.mark.parametrize(("value", "hint"), [(72, "64 or 80"), (8, "16"), (1000, "992 or 1008")])
@pytest.mark.parametrize("name", ["height", "width"])
def test_a_size_off_the_grid_is_refused_with_the_nearest(name, value, hint):
    with pytest.raises(InvalidRequest, match=f"{name}={value}.*multiple of 16.*{hint}"):
        batches(**{name: value})


def test_the_multiple_comes_from_the_checkpoint():
    config = FluxPipelineConfig().with_checkpoint({"vae": {"block_out_channels": [8, 8, 8, 8, 8]}})
    assert config.size_multiple == 32
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        batches(config=config, height=48)


def test_a_gigantic_size_is_refused_before_anything_is_allocated():
    with pytest.raises(InvalidRequest, match="max_pixels"):
        batches(width=999_984)


@pytest.mark.parametrize("prompt", [None, "", "  ", "\u200b", ["a", ""], []])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(InvalidRequest, match="prompt"):
        batches(prompt=prompt)


def test_an_empty_prompt_passes_where_the_model_needs_none():
    @dataclasses.dataclass
    class Optional(FluxSamplingParams):
        prompt_optional = True

    (batch,) = admit(Optional(height=64, width=64), FluxPipelineConfig(), batching_max_size=1)
    assert batch.prompt == [""]


@pytest.mark.parametrize(
    ("scale", "negative", "guided"),
    [(None, "n", False), (1.0, "n", False), (1 + 1e-9, "n", False), (1.5, "n", True),
     (1.5, "", True), (1.5, None, False)],
)  # fmt: skip
def test_the_second_forward_is_paid_only_where_it_works_and_the_rest_is_said(
    scale, negative, guided
):
    (batch,) = batches(true_cfg_scale=scale, negative_prompt=negative)
    assert batch.do_classifier_free_guidance is guided
    if not guided and (negative or (scale or 0) > 1.1):
        assert any("no effect" in warning for warning in batch.warnings)
    else:
        assert not batch.warnings


def test_text_beyond_the_encoders_limit_is_refused():
    assert batches(max_sequence_length=512)
    with pytest.raises(InvalidRequest, match="at most 512"):
        batches(max_sequence_length=513)


def test_a_task_that_is_not_served_is_refused():
    with pytest.raises(InvalidRequest, match=r"task_type.*serves T2I"):
        batches(task_type="I2V")
    with pytest.raises(InvalidRequest, match="image_path"):
        batches(image_path="x.png")


def test_numbers_of_numpy_are_numbers():
    (batch,) = batches(seed=np.int64(3), height=np.int32(32), guidance_scale=np.float32(2.0))
    assert batch.seeds == [3]
    assert type(batch.seeds[0]) is int
    assert type(batch.height) is int
    assert batch.guidance_scale == 2.0


def test_a_request_for_endless_pictures_is_refused():
    with pytest.raises(InvalidRequest, match="at most 1000"):
        batches(num_outputs_per_prompt=10**9)
    with pytest.raises(InvalidRequest, match="at most 10000"):
        batches(prompt=["a"] * 101, num_outputs_per_prompt=100)


def test_guidance_that_a_checkpoint_does_not_take_is_said():
    schnell = FluxPipelineConfig().with_checkpoint({"transformer": {"guidance_embeds": False}})
    (batch,) = batches(config=schnell, guidance_scale=7.0)
    assert any("takes no guidance" in warning for warning in batch.warnings)
    assert any("use true_cfg_scale" in warning for warning in batch.warnings)
    on = {"guidance_scale": 9.0, "true_cfg_scale": 3.0, "negative_prompt": ""}
    (guided,) = batches(config=schnell, **on)
    assert any("true_cfg_scale=3.0 is what" in warning for warning in guided.warnings)
    assert not batches(config=schnell)[0].warnings
    assert not batches(guidance_scale=7.0)[0].warnings


def test_an_admitted_request_cannot_change():
    (batch,) = batches(prompt=["a", "b"])
    assert batch.request.prompt == ("a", "b")
    with pytest.raises(InternalError, match="read-only"):
        batch.request.height = 3


@pytest.mark.parametrize("path", [5, "", ["a.png", None]])
def test_an_image_path_that_is_none_is_refused(path):
    with pytest.raises(InvalidRequest, match="image_path"):
        batches(image_path=path)


@pytest.mark.parametrize(
    ("config", "least", "refused"),
    # The second is shown a picture of fewer pixels, whose rounding is more often up.
    [(QwenImageEditPipelineConfig(), 150, 199), (QwenImageEditPlusPipelineConfig(), 199, 2000)],
    ids=["large", "small"],
)
def test_a_picture_that_is_a_line_is_refused_as_the_model_would_see_it(
    tmp_path, config, least, refused
):
    thin, wide = tmp_path / "thin.png", tmp_path / "wide.png"
    Image.new("RGB", (1, refused)).save(thin)
    Image.new("RGB", (least, 1)).save(wide)
    params = QwenImageEditSamplingParams(
        prompt="a", image_path=str(thin), height=64, width=64, seed=0
    )
    with pytest.raises(InvalidRequest, match=rf"1x{refused}.*less than 200 times"):
        admit(params, config, batching_max_size=1)
    assert admit(dataclasses.replace(params, image_path=str(wide)), config, batching_max_size=1)
