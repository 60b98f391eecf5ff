"""The seed's code samples, letter for letter where it gives code; imports are added.

Configs, sampling params, registry, and the wiring in all four shapes.
"""

from dataclasses import dataclass, field

import torch

from sglang.multimodal_gen.configs.models import DiTConfig, VAEConfig
from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    InputValidationStage,
    TextEncodingStage,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs


@dataclass
class MyModelDiTConfig(DiTConfig):
    pass


@dataclass
class MyModelVAEConfig(VAEConfig):
    block_out_channels: tuple[int, ...] = (8, 8, 8, 8)


@dataclass
class MyModelSamplingParams(ImageSamplingParams):
    guidance_scale: float = 4.0
    num_inference_steps: int = 28


@dataclass
class MyModelPipelineConfig(ImagePipelineConfig):
    task_type: ModelTaskType = ModelTaskType.T2I
    should_use_guidance: bool = True
    dit_config: DiTConfig = field(default_factory=MyModelDiTConfig)
    vae_config: VAEConfig = field(default_factory=MyModelVAEConfig)

    def prepare_pos_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
        return {
            "hidden_states": latent_model_input,
            "encoder_hidden_states": batch.prompt_embeds[0],
            "timestep": t,
        }

    def prepare_neg_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
        return {
            "hidden_states": latent_model_input,
            "encoder_hidden_states": batch.negative_prompt_embeds[0],
            "timestep": t,
        }


class MyModelPipeline(LoRAPipeline, ComposedPipelineBase):
    pipeline_name = "MyModelPipeline"

    _required_config_modules = [
        "text_encoder",
        "tokenizer",
        "transformer",
        "scheduler",
        "vae",
    ]

    def create_pipeline_stages(self, server_args: ServerArgs):
        self.add_standard_t2i_stages()


class MyModelTextEncodingStage(TextEncodingStage):
    def encode_one(self, batch, prompt, encoder, tokenizer, config):
        return super().encode_one(batch, f"<{prompt}>", encoder, tokenizer, config)


class SubclassPipeline(MyModelPipeline):
    pipeline_name = "SubclassPipeline"

    def create_pipeline_stages(self, server_args: ServerArgs):
        self.add_stage(InputValidationStage())
        self.add_stage_factory(
            RoleType.ENCODER,
            lambda: MyModelTextEncodingStage(
                text_encoder=self.get_module("text_encoder"),
                tokenizer=self.get_module("tokenizer"),
            ),
            "my_model_text_encoding_stage",
        )
        self.add_standard_latent_preparation_stage()
        self.add_standard_timestep_preparation_stage()
        self.add_standard_denoising_stage()
        self.add_standard_decoding_stage()


class MyModelConditioningStage(PipelineStage):
    def __init__(self, scheduler, vae):
        self.scheduler = scheduler
        self.vae = vae

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        batch.image_latent = torch.full((1,), 0.5)
        return batch


class SinglePurposePipeline(MyModelPipeline):
    pipeline_name = "SinglePurposePipeline"

    def create_pipeline_stages(self, server_args: ServerArgs):
        self.add_stage(InputValidationStage())
        self.add_standard_text_encoding_stage()
        self.add_stage_factory(
            RoleType.ENCODER,
            lambda: MyModelConditioningStage(
                scheduler=self.get_module("scheduler"),
                vae=self.get_module("vae"),
            ),
            "my_model_conditioning_stage",
        )
        self.add_standard_latent_preparation_stage()
        self.add_standard_timestep_preparation_stage()
        self.add_standard_denoising_stage()
        self.add_standard_decoding_stage()


class MyModelBeforeDenoisingStage(PipelineStage):
    def __init__(self, text_encoder, tokenizer, scheduler, vae):
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.vae = vae

    def _encode_prompt(self, batch):
        tokens = self.tokenizer(
            batch.prompt[0], padding="max_length", max_length=6, truncation=True
        )
        embeds = self.text_encoder(tokens.input_ids).last_hidden_state
        return embeds, embeds * 0.5

    def _prepare_latents(self, batch):
        shape = (1, 16, batch.height // 8, batch.width // 8)
        return torch.randn(shape, generator=batch.generator[0])

    def _prepare_timesteps(self, batch):
        self.scheduler.set_timesteps(batch.num_inference_steps)
        return self.scheduler.timesteps, self.scheduler.sigmas[:-1]

    @torch.no_grad()
    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        prompt_embeds, negative_prompt_embeds = self._encode_prompt(batch)
        latents = self._prepare_latents(batch)
        timesteps, sigmas = self._prepare_timesteps(batch)

        batch.prompt_embeds = [prompt_embeds]
        batch.negative_prompt_embeds = [negative_prompt_embeds]
        batch.latents = latents
        batch.timesteps = timesteps
        batch.num_inference_steps = len(timesteps)
        batch.sigmas = sigmas.tolist()
        batch.raw_latent_shape = latents.shape
        return batch


class AggregatedPipeline(MyModelPipeline):
    pipeline_name = "AggregatedPipeline"

    def create_pipeline_stages(self, server_args: ServerArgs):
        self.add_stage(InputValidationStage())
        self.add_stage(
            MyModelBeforeDenoisingStage(
                text_encoder=self.get_module("text_encoder"),
                tokenizer=self.get_module("tokenizer"),
                scheduler=self.get_module("scheduler"),
                vae=self.get_module("vae"),
            )
        )
        self.add_standard_denoising_stage()
        self.add_standard_decoding_stage()


class ReferencePipeline(MyModelPipeline):
    """The ti2i helper: the same stages, and the input image's latents."""

    pipeline_name = "ReferencePipeline"

    def create_pipeline_stages(self, server_args: ServerArgs):
        self.add_standard_ti2i_stages()


EntryClass = [MyModelPipeline]


def register():
    from sglang.multimodal_gen.registry import register_configs

    register_configs(
        sampling_param_cls=MyModelSamplingParams,
        pipeline_config_cls=MyModelPipelineConfig,
        hf_model_paths=["org/my-model"],
        model_detectors=[lambda hf_id: "my-model" in hf_id.lower()],
    )
