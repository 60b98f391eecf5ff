"""What a Wan checkpoint says about itself, and what that makes of its tasks and sizes."""

from __future__ import annotations

import pytest

from sglang.multimodal_gen.configs.pipeline_configs.wan import (
    WanImageToVideoPipelineConfig,
    WanPipelineConfig,
)
from sglang.multimodal_gen.configs.sample.wan import WanSamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
)

SMALL = {"expand_timesteps": True, "boundary_ratio": None}
COMPONENTS = {"vae": {"scale_factor_spatial": 16}, "transformer": {"patch_size": [1, 2, 2]}}


def test_tasks_and_sizes_follow_from_the_checkpoint():
    text = WanPipelineConfig().with_checkpoint({}, {"expand_timesteps": False})
    assert (text.task_type, text.size_multiple, text.frame_multiple) == (ModelTaskType.T2V, 16, 4)
    small = WanPipelineConfig().with_checkpoint(COMPONENTS, SMALL)
    assert (small.task_type, small.size_multiple) == (ModelTaskType.TI2V, 32)
    assert small.resolve_task_type(has_image=True) is ModelTaskType.TI2V
    assert small.resolve_task_type(has_video=True) is ModelTaskType.V2V
    assert small.resolve_task_type("T2V") is ModelTaskType.T2V
    image = WanImageToVideoPipelineConfig().with_checkpoint({}, {"boundary_ratio": 0.9})
    assert image.get_supported_task_types() == (ModelTaskType.I2V,)
    assert image.boundary_ratio == 0.9


def test_an_operators_boundary_stays():
    config = WanPipelineConfig().with_settings({"boundary_ratio": 0.5})
    assert config.with_checkpoint({}, {"boundary_ratio": 0.9}).boundary_ratio == 0.5
    with pytest.raises(InvalidArgument, match="must be a number"):
        WanPipelineConfig().with_settings({"boundary_ratio": 2})


@pytest.mark.parametrize("index", [{"boundary_ratio": 875}, {"expand_timesteps": "yes"}])
def test_an_index_that_makes_no_sense_is_the_checkpoints_fault(index):
    with pytest.raises(CheckpointError, match="makes no sense"):
        WanPipelineConfig().with_checkpoint({}, index)


@pytest.mark.parametrize(
    ("name", "most", "beyond"), [("height", 16384, 16400), ("num_frames", 4093, 4097)]
)
def test_what_the_positions_do_not_reach_is_refused_with_the_limit(name, most, beyond):
    config = WanPipelineConfig()
    small = {"prompt": "a", "height": 16, "width": 16, "num_frames": 1}
    config.check_request(WanSamplingParams(**small | {name: most}))
    with pytest.raises(InvalidRequest, match=f"{name}.*at most {most} "):
        config.check_request(WanSamplingParams(**small | {name: beyond}))


def test_strength_without_a_video_is_not_ignored():
    with pytest.raises(InvalidRequest, match="no input video"):
        WanSamplingParams(prompt="a", strength=0.3).check()
    WanSamplingParams(prompt="a", strength=0.3, video_path="a.mp4").check()
