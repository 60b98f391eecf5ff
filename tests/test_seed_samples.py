"""The seed's samples run: sampling params, pipeline config, wiring in four shapes, registry."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.registry import Registry
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InternalError,
    InvalidRequest,
    PipelineDefinitionError,
)

from seed_samples import my_model
from seed_samples.stubs import StubTextEncoder, stub_modules, stub_request


def build(pipeline_cls, **observe):
    args = ServerArgs.from_flat(
        device="cpu", pipeline_config=my_model.MyModelPipelineConfig(), **observe
    )
    return pipeline_cls("org/my-model", args, loaded_modules=stub_modules())


def run(pipeline, **values):
    values = {
        "prompt": "abc",
        "seed": 1,
        "height": 32,
        "width": 48,
        "num_inference_steps": 3,
    } | values
    params = my_model.MyModelSamplingParams.from_values(values)
    (batch,) = admit(params, pipeline.server_args.pipeline_config, batching_max_size=8)
    return pipeline.forward(batch, pipeline.server_args).output


SHAPES = [
    my_model.MyModelPipeline,
    my_model.SubclassPipeline,
    my_model.SinglePurposePipeline,
    my_model.AggregatedPipeline,
]


@pytest.mark.parametrize("pipeline_cls", SHAPES)
def test_each_wiring_shape_makes_a_picture_that_heeds_its_inputs(pipeline_cls):
    pipeline = build(pipeline_cls)
    picture = run(pipeline)
    assert picture.shape == (1, 3, 32, 48)
    assert 0 <= picture.min() < picture.max() <= 1
    assert torch.equal(picture, run(pipeline))
    assert not torch.equal(picture, run(pipeline, seed=2))
    assert not torch.equal(picture, run(pipeline, prompt="xyz"))


@pytest.mark.parametrize("pipeline_cls", SHAPES)
def test_each_wiring_shape_does_classifier_free_guidance(pipeline_cls):
    pipeline = build(pipeline_cls)
    transformer = pipeline.get_module("transformer")
    plain = run(pipeline)
    assert transformer.calls == 3
    guided = run(pipeline, negative_prompt="zzz", true_cfg_scale=5.0)
    assert transformer.calls == 3 + 6
    assert not torch.equal(plain, guided)


def test_guidance_scale_is_classifier_free_guidance_where_the_config_says_so():
    pipeline = build(my_model.MyModelPipeline)
    transformer = pipeline.get_module("transformer")
    by_name = run(pipeline, negative_prompt="zzz")  # the sample's guidance_scale is 4.0
    assert transformer.calls == 6
    assert torch.equal(by_name, run(pipeline, negative_prompt="zzz", true_cfg_scale=4.0))
    assert not torch.equal(by_name, run(pipeline, negative_prompt="zzz", guidance_scale=2.0))


def test_the_subclass_changes_the_picture_and_the_single_purpose_stage_is_read_by_a_hook():
    standard = run(build(my_model.MyModelPipeline))
    assert not torch.equal(standard, run(build(my_model.SubclassPipeline)))

    seen = []

    class Reading(my_model.MyModelPipelineConfig):
        def prepare_pos_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
            seen.append(batch.image_latent)
            return super().prepare_pos_cond_kwargs(batch, latent_model_input, t, **kwargs)

    args = ServerArgs.from_flat(device="cpu", pipeline_config=Reading())
    run(my_model.SinglePurposePipeline("x", args, loaded_modules=stub_modules()))
    assert [value.item() for value in seen] == [0.5, 0.5, 0.5]


def test_shared_stages_touch_only_what_they_declare():
    for pipeline_cls in (my_model.MyModelPipeline, my_model.ReferencePipeline):
        pipeline = build(pipeline_cls, check_stages=True)
        run(pipeline, negative_prompt="zzz", true_cfg_scale=5.0)


def test_ti2i_encodes_the_input_image(tmp_path):
    from PIL import Image

    path = tmp_path / "reference.png"
    Image.new("RGBA", (50, 40), (200, 30, 30, 255)).save(path)
    pipeline = build(my_model.ReferencePipeline)
    seen = []
    stage = pipeline.get_stage("image_vae_encoding_stage")
    forward = stage.forward

    def spy(batch, server_args):
        seen.append(forward(batch, server_args).image_latent)
        return batch

    stage.forward = spy
    config = dataclasses.replace(my_model.MyModelPipelineConfig(), task_type=ModelTaskType.TI2I)
    params = my_model.MyModelSamplingParams(
        prompt=["a", "b"], height=32, width=48, num_inference_steps=2, image_path=str(path)
    )
    (batch,) = admit(params, config, batching_max_size=8)
    pipeline.forward(batch, pipeline.server_args)
    assert seen[0].shape == (2, 2 * 3, 64)
    assert torch.equal(seen[0][0], seen[0][1])
    with pytest.raises(InvalidRequest, match="image_path"):
        admit(params, my_model.MyModelPipelineConfig(), batching_max_size=8)


def test_sampling_params_keep_the_samples_defaults_and_refuse_others():
    params = my_model.MyModelSamplingParams(prompt="a")
    assert (params.guidance_scale, params.num_inference_steps) == (4.0, 28)
    with pytest.raises(InvalidRequest, match="Did you mean 'guidance_scale'"):
        my_model.MyModelSamplingParams.from_values({"guidance_scal": 9})


def test_an_admitted_request_and_a_built_pipelines_config_are_read_only():
    pipeline = build(my_model.MyModelPipeline)
    params = my_model.MyModelSamplingParams(prompt="a", height=32, width=32)
    (batch,) = admit(params, pipeline.server_args.pipeline_config, batching_max_size=1)
    with pytest.raises(InternalError, match="read-only"):
        batch.request.seed = 3
    with pytest.raises(InternalError, match="read-only"):
        pipeline.server_args.pipeline_config.should_use_guidance = False


def test_stage_factories_know_their_role():
    pipeline = build(my_model.SubclassPipeline)
    assert pipeline.stage_roles["my_model_text_encoding_stage"] is RoleType.ENCODER
    assert pipeline.stage_roles["denoising_stage"] is RoleType.DENOISER
    assert pipeline.stage_roles["decoding_stage"] is RoleType.DECODER


def test_a_chain_that_reads_what_nobody_writes_is_refused_at_build():
    class Broken(my_model.MyModelPipeline):
        def create_pipeline_stages(self, server_args):
            self.add_standard_input_validation_stage()
            self.add_standard_text_encoding_stage()
            self.add_standard_denoising_stage()

    with pytest.raises(PipelineDefinitionError, match=r"denoising_stage.*'latents'.*'timesteps'"):
        build(Broken)


def test_a_standard_stage_without_its_component_is_refused_at_build():
    class Misspelt(my_model.MyModelPipeline):
        def create_pipeline_stages(self, server_args):
            self.add_standard_timestep_preparation_stage("shceduler")

    with pytest.raises(PipelineDefinitionError, match="Did you mean 'scheduler'"):
        build(Misspelt)


def test_encoders_and_their_configs_are_counted_at_build():
    config = dataclasses.replace(my_model.MyModelPipelineConfig(), text_encoder_configs=())
    args = ServerArgs.from_flat(device="cpu", pipeline_config=config)
    with pytest.raises(PipelineDefinitionError, match=r"1 text encoders, but .* describes 0"):
        my_model.MyModelPipeline("x", args, loaded_modules=stub_modules())


def test_latents_of_another_shape_than_was_said_are_refused():
    config = my_model.MyModelPipelineConfig()
    batch = stub_request()
    batch.raw_latent_shape = (1, 4, 64)
    with pytest.raises(PipelineDefinitionError, match="raw_latent_shape"):
        config.post_denoising_loop(torch.zeros(1, 8, 32), batch)


def test_a_duplicate_stage_name_is_refused():
    class Twice(my_model.MyModelPipeline):
        def create_pipeline_stages(self, server_args):
            self.add_standard_t2i_stages()
            self.add_standard_decoding_stage()

    with pytest.raises(PipelineDefinitionError, match="Duplicate stage name detected"):
        build(Twice)


def test_a_misspelt_field_is_refused_when_the_stage_is_defined():
    with pytest.raises(PipelineDefinitionError, match="Did you mean 'prompt_embeds'"):

        class Typo(PipelineStage):
            reads = frozenset({"promt_embeds"})
            writes = frozenset()


@pytest.fixture
def registry(monkeypatch):
    """A registry whose families are the seed's sample alone."""
    from sglang.multimodal_gen import registry as module

    own = Registry(pipeline_package="seed_samples", config_package="seed_samples")
    monkeypatch.setattr(module, "register_configs", own.register_configs)
    monkeypatch.setitem(sys.modules, "seed_samples.stubs", sys.modules[StubTextEncoder.__module__])
    return own


def source(name, class_name="MyModelPipeline"):
    return ModelSource(name=name, root=None, model_index={"_class_name": class_name}, kind="local")


@pytest.mark.parametrize(
    "path",
    [
        "org/my-model",
        "ORG/My-Model",
        "/models/my-model",
        "/cache/models--org--my-model/snapshots/1f",
        "/models/a-my-model-finetune",
    ],
)
def test_registry_finds_the_sample_by_id_folder_cache_and_detector(registry, path):
    info = registry.get_model_info(source(path))
    assert info.pipeline_cls is my_model.MyModelPipeline
    assert info.sampling_param_cls is my_model.MyModelSamplingParams
    assert info.pipeline_config_cls is my_model.MyModelPipelineConfig


def test_the_samples_pipeline_is_the_one_of_its_file(registry):
    (known,) = registry.known_models()
    assert known.pipelines == ("MyModelPipeline",)
    assert known.task_types == ("T2I",)


def test_a_checkpoint_without_a_model_index_class_is_served_by_the_familys_pipeline(registry):
    info = registry.get_model_info(source("org/my-model", class_name=None))
    assert info.pipeline_cls is my_model.MyModelPipeline


def custom(registry, **options):
    """The seed's out-of-tree sample."""
    registry.register_pipeline(
        my_model.SubclassPipeline,
        sampling_param_cls=my_model.MyModelSamplingParams,
        pipeline_config_cls=my_model.MyModelPipelineConfig,
        **{
            "hf_model_paths": ["my-org/custom-diffusion-model"],
            "model_detectors": [lambda value: "custom-diffusion" in value.lower()],
            **options,
        },
    )


@pytest.mark.parametrize("path", ["my-org/custom-diffusion-model", "/models/custom-diffusion-v2"])
def test_a_pipeline_of_an_installed_package_is_found(registry, path):
    custom(registry)
    for class_name in ("SubclassPipeline", None):
        info = registry.get_model_info(source(path, class_name))
        assert info.pipeline_cls is my_model.SubclassPipeline


def test_clashes_are_refused_unless_meant(registry):
    custom(registry)
    with pytest.raises(PipelineDefinitionError, match="'SubclassPipeline' is already registered"):
        custom(registry)
    with pytest.raises(PipelineDefinitionError, match="org/My-Model"):
        registry.register_configs(
            my_model.MyModelSamplingParams,
            my_model.MyModelPipelineConfig,
            hf_model_paths=["org/My-Model"],
        )
    custom(registry, overwrite=True, hf_model_paths=["org/my-model"])
    info = registry.get_model_info(source("org/my-model", class_name=None))
    assert info.pipeline_cls is my_model.SubclassPipeline


def test_two_families_that_fit_equally_well_are_both_named(registry):
    class Other(my_model.MyModelPipelineConfig):
        pass

    custom(registry)
    registry.register_configs(
        my_model.MyModelSamplingParams, Other, model_detectors=[lambda v: "custom-diff" in v]
    )
    with pytest.raises(ValueError, match=r"MyModelPipelineConfig \(my-org/.*\) and Other"):
        registry.get_model_info(source("/models/custom-diffusion-v2", "Unknown"))


@pytest.mark.parametrize("wrong", ["pipeline_cls", "sampling_param_cls", "pipeline_config_cls"])
def test_a_class_of_a_wrong_kind_is_refused(registry, wrong):
    classes = {
        "pipeline_cls": my_model.SubclassPipeline,
        "sampling_param_cls": my_model.MyModelSamplingParams,
        "pipeline_config_cls": my_model.MyModelPipelineConfig,
        wrong: int,
    }
    with pytest.raises(TypeError, match=f"{wrong} must inherit"):
        registry.register_pipeline(classes.pop("pipeline_cls"), **classes)


def test_a_family_that_cannot_be_imported_fails_each_time_and_leaves_nothing(registry, monkeypatch):
    register = my_model.register

    def broken():
        register()
        raise ImportError("no such module")

    monkeypatch.setattr(my_model, "register", broken)
    for _ in range(2):
        with pytest.raises(ImportError, match="no such module"):
            registry.known_models()
    monkeypatch.setattr(my_model, "register", register)
    assert len(registry.known_models()) == 1


def test_registry_names_the_near_pipeline_when_nothing_matches(registry):
    with pytest.raises(ValueError, match=r"Did you mean 'MyModelPipeline'"):
        registry.get_model_info(source("/models/other", "MyModlPipeline"))
