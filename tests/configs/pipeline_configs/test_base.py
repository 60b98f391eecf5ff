from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import (
    ImagePipelineConfig,
    PipelineConfig,
    get_request_task_type,
    resolution_shift,
)
from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import (
    InternalError,
    InvalidArgument,
    InvalidRequest,
    PipelineDefinitionError,
)

from seed_samples.stubs import stub_request

T2I, I2I, T2V, I2V = (ModelTaskType[name] for name in ("T2I", "I2I", "T2V", "I2V"))


@dataclass
class Several(PipelineConfig):
    task_type: ModelTaskType = T2V
    supported_task_types = (T2I, I2I, T2V, I2V)


def test_packing_and_unpacking_are_inverse_and_the_channel_order_is_the_references():
    config, batch = ImagePipelineConfig(), stub_request()
    latents = torch.randn(2, 16, 4, 6)
    batch.raw_latent_shape = tuple(latents.shape)
    packed = config.maybe_pack_latents(latents, 2, batch)
    assert packed.shape == (2, 6, 64)
    assert packed[0, 4, 4 * 3 + 2 * 1 + 0] == latents[0, 3, 2 * 1 + 1, 2 * 1 + 0]
    assert torch.equal(config.post_denoising_loop(packed, batch), latents)


def test_the_shift_is_the_line_through_two_points_and_is_not_clamped():
    assert resolution_shift(256, {}) == pytest.approx(0.5)
    assert resolution_shift(4096, {}) == pytest.approx(1.15)
    assert resolution_shift(96, {}) < 0.5
    assert resolution_shift(10, {"base_image_seq_len": 10, "base_shift": 3.0}) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("requested", "data_type", "has_image", "expected"),
    [
        (None, None, False, T2V),
        (None, None, True, I2V),  # the default's output type is preferred
        (None, DataType.IMAGE, False, T2I),
        (None, DataType.IMAGE, True, I2I),
        ("t2i", None, False, T2I),
        (I2I, DataType.IMAGE, True, I2I),
    ],
)
def test_the_task_of_a_request(requested, data_type, has_image, expected):
    config = Several()
    task = config.resolve_task_type(requested, data_type=data_type, has_image=has_image)
    assert task is expected


@pytest.mark.parametrize(
    ("requested", "data_type", "has_image", "field"),
    [
        ("V2V", None, False, "task_type"),
        ("T2I", DataType.VIDEO, False, "task_type"),
        ("T2I", None, True, "image_path"),
        ("I2V", None, False, "image_path"),
        (None, DataType.MESH, False, "task_type"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(requested, data_type, has_image, field):
    with pytest.raises(InvalidRequest) as caught:
        Several().resolve_task_type(requested, data_type=data_type, has_image=has_image)
    assert caught.value.field == field


def test_what_fits_equally_must_be_named():
    @dataclass
    class Ambiguous(PipelineConfig):
        task_type: ModelTaskType = T2V
        supported_task_types = (ModelTaskType.TI2I, I2I, T2V)

    with pytest.raises(InvalidRequest, match="fits TI2I, I2I of"):
        Ambiguous().resolve_task_type(has_image=True)


def test_a_request_without_a_task_has_the_default():
    batch = stub_request()
    assert get_request_task_type(batch, Several()) is T2V
    batch.task_type = I2V
    assert get_request_task_type(batch, Several()) is I2V


@pytest.mark.parametrize("declared", [(), (T2I, T2I, T2V), (T2I,)])
def test_a_bad_declaration_of_tasks_is_refused(declared):
    class Bad(Several):
        supported_task_types = declared

    with pytest.raises(PipelineDefinitionError, match="nonempty, unique, and include"):
        Bad().get_supported_task_types()


def test_an_operator_may_choose_another_default_among_those_served():
    assert Several().with_settings({"task_type": "i2v"}).task_type is I2V
    with pytest.raises(InvalidArgument, match="serves T2I"):
        FluxPipelineConfig().with_settings({"task_type": "I2I"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixels": "x"}, "pipeline_config.max_pixels='x': must be of type int"),
        ({"max_pixels": True}, "must be of type int"),
        ({"vae_precisoin": "fp32"}, "Did you mean 'vae_precision'"),
        ({"dit_config": {"guidance_embed": True}}, "Did you mean 'guidance_embeds'"),
        ({"dit_config": 3}, "must be of type DiTConfig"),
        ({"task_type": "T2X"}, "T2X"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        FluxPipelineConfig().with_settings(settings)


def test_good_settings_arrive_also_in_component_configs():
    config = FluxPipelineConfig().with_settings(
        {"vae_config": {"scaling_factor": 2.0}, "text_encoder_precisions": ["fp32", "fp32"]}
    )
    assert config.vae_config.scaling_factor == 2.0
    assert config.text_encoder_precisions == ("fp32", "fp32")
    config = FluxPipelineConfig().with_settings(
        {"dit_precision": "FP16", "text_encoder_precisions": ["BF16", "fp32"]}
    )
    assert (config.dit_precision, config.text_encoder_precisions) == ("fp16", ("bf16", "fp32"))


def test_a_sealed_config_is_read_only_to_the_bottom_and_its_copies_are_not():
    config = FluxPipelineConfig().seal()
    for change in (
        lambda c: setattr(c, "max_pixels", 1),
        lambda c: setattr(c.vae_config, "scaling_factor", 1),
        lambda c: setattr(c.text_encoder_configs[0], "max_length", 1),
    ):
        with pytest.raises(InternalError, match="read-only"):
            change(config)
    assert replace(config, max_pixels=5).max_pixels == 5
