"""Qwen-Image, Qwen-Image-Edit and Edit-Plus (2509, 2511), as Diffusers' pipelines of the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.multimodal_gen.configs.models.base import EncoderConfig, VAEConfig
from sglang.multimodal_gen.configs.models.chat_encoder import ChatEncoderConfig
from sglang.multimodal_gen.configs.picture_area import PictureArea
from sglang.multimodal_gen.configs.pipeline_configs.base import (
    ImagePipelineConfig,
    resolution_shift,
)
from sglang.multimodal_gen.configs.sample.qwen_image import (
    QwenImageEditPlusSamplingParams,
    QwenImageEditSamplingParams,
    QwenImageSamplingParams,
)
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.models.dits.qwen_image import (
        PictureRotary,
        QwenImageTransformer2DModel,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

MAX_TOKENS = 1024
PICTURE_TOKEN = "<|image_pad|>"
PICTURE = f"<|vision_start|>{PICTURE_TOKEN}<|vision_end|>"
VAE_AREA = PictureArea(1024 * 1024)
SMALL_AREA = PictureArea(384 * 384)

CHAT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
DESCRIBE = CHAT.format(
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
EDIT = CHAT.format(
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)


@dataclass
class QwenImageVAEConfig(VAEConfig):
    """The causal video autoencoder that makes pictures; names are those of its ``config.json``."""

    z_dim: int = 16
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = (0.0,) * 16
    latents_std: tuple[float, ...] = (1.0,) * 16
    temporal_compression_ratio: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise CheckpointError(
                    f"the VAE's config.json: {name} has {len(getattr(self, name))} entries for "
                    f"z_dim={self.z_dim}"
                )

    @property
    def spatial_compression_ratio(self) -> int:
        """Each level halves the picture."""
        return 2 ** len(self.temperal_downsample)


@dataclass(frozen=True)
class Branch:
    """What every step of one guidance branch shares; the mask is None where nothing is padded."""

    embeds: Tensor
    mask: Tensor | None
    rotary: PictureRotary


@dataclass(frozen=True)
class QwenImageState:
    """The two branches; the negative one only under guidance."""

    positive: Branch
    negative: Branch | None


@dataclass
class QwenImagePipelineConfig(ImagePipelineConfig):
    """Qwen2.5-VL reads the prompt in a chat; guidance keeps the norm of its positive branch."""

    pipeline_name: ClassVar[str | None] = "QwenImagePipeline"

    should_use_guidance: bool = False
    guidance_keeps_norm: bool = True
    vae_config: VAEConfig = field(default_factory=QwenImageVAEConfig)
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (
            ChatEncoderConfig(template=DESCRIBE, template_tokens=34, max_length_limit=MAX_TOKENS),
        )
    )
    vae_precision: str = "bf16"
    quantization_ignored_layers: tuple[str, ...] = (
        "img_in",
        "txt_in",
        "time_text_embed*",
        "norm_out*",
        "proj_out",
    )

    def seen_sizes(self, width: int, height: int) -> tuple[tuple[int, int], ...]:
        """As the language models are shown it: resized, which may round the short side down."""
        return tuple(
            encoder.picture_area.size_for(width, height)
            for encoder in self.text_encoder_configs
            if isinstance(encoder, ChatEncoderConfig) and encoder.picture_area is not None
        )

    def prepare_model_state(
        self, batch: Req, transformer: QwenImageTransformer2DModel
    ) -> QwenImageState:
        """Positions of both branches: their texts differ in length."""
        image, *references = [
            (height // 2, width // 2)
            for *_, height, width in (batch.raw_latent_shape, *batch.image_latent_shapes)
        ]

        def branch(embeds: list[Tensor], masks: list[Tensor]) -> Branch:
            rotary = transformer.rotary_embedding(embeds[0].shape[1], image, references)
            return Branch(embeds[0], masks[0] if masks else None, rotary)

        positive = branch(batch.prompt_embeds, batch.prompt_attention_mask)
        if not batch.do_classifier_free_guidance:
            return QwenImageState(positive, None)
        negative = branch(batch.negative_prompt_embeds, batch.negative_attention_mask)
        return QwenImageState(positive, negative)

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Arguments of ``QwenImageTransformer2DModel.forward`` for the prompt."""
        return _forward_kwargs(batch, batch.model_state.positive, latent_model_input, t)

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt."""
        return _forward_kwargs(batch, batch.model_state.negative, latent_model_input, t)

    def prepare_latent_shape(self, batch: Req, batch_size: int, num_frames: int) -> tuple[int, ...]:
        """Noise is drawn with the frame before the channels."""
        assert isinstance(self.vae_config, QwenImageVAEConfig)
        ratio = self.vae_config.spatial_compression_ratio
        height, width = batch.height // ratio, batch.width // ratio
        return (batch_size, 1, self.vae_config.z_dim, height, width)

    def maybe_pack_latents(self, latents: Tensor, batch_size: int, batch: Req) -> Tensor:
        """As FLUX packs; the frame, before the channels or behind them, goes."""
        return super().maybe_pack_latents(latents.flatten(1, 2), batch_size, batch)

    def post_denoising_loop(self, latents: Tensor, batch: Req) -> Tensor:
        """Tokens to [B, C, 1, h, w]."""
        *_, channels, height, width = batch.raw_latent_shape
        grid = latents.view(len(latents), height // 2, width // 2, channels, 2, 2)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(latents), channels, 1, height, width)

    def prepare_extra_set_timesteps_kwargs(
        self, batch: Req, scheduler_config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Time shifts with the resolution of the picture to make."""
        if not scheduler_config.get("use_dynamic_shifting", False):
            return {}
        *_, height, width = batch.raw_latent_shape
        return {"mu": resolution_shift((height // 2) * (width // 2), scheduler_config)}

    def get_decode_scale_and_shift(
        self, device: torch.device, dtype: torch.dtype, vae: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """One of each for every channel."""
        import torch

        assert isinstance(self.vae_config, QwenImageVAEConfig)
        config = self.vae_config
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(device, dtype)
            for values in (config.latents_mean, config.latents_std)
        )
        return 1 / std, mean


MAX_ASPECT = 200.0
"""Of what Qwen2-VL's and Qwen3-VL's picture processors take."""


@dataclass
class QwenImageEditPipelineConfig(QwenImagePipelineConfig):
    """The language model sees the picture too; its latents stand behind those to make."""

    pipeline_name: ClassVar[str | None] = "QwenImageEditPipeline"

    max_images: ClassVar[int | None] = 1
    max_input_aspect: ClassVar[float | None] = MAX_ASPECT

    task_type: ModelTaskType = ModelTaskType.I2I
    output_area: PictureArea | None = VAE_AREA
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (_seeing(PICTURE, VAE_AREA),)
    )

    def check_request(self, params: SamplingParams) -> None:
        """One picture, unless the model takes several; and none that is only claimed in words."""
        count = len(params.image_paths)
        if self.max_images is not None and count > self.max_images:
            problem = f"this model edits {self.max_images} picture, and {count} are given"
            raise InvalidRequest("image_path", params.image_paths, problem)
        refuse_picture_tokens(params)


@dataclass
class QwenImageEditPlusPipelineConfig(QwenImageEditPipelineConfig):
    """Several pictures, which the language model sees small."""

    pipeline_name: ClassVar[str | None] = "QwenImageEditPlusPipeline"

    max_images: ClassVar[int | None] = None

    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (_seeing("Picture {}: " + PICTURE, SMALL_AREA),)
    )


def refuse_picture_tokens(params: SamplingParams) -> None:
    """Raise InvalidRequest for words that would stand for an input image."""
    for name, texts in (
        ("prompt", params.prompts),
        ("negative_prompt", [params.negative_prompt or ""]),
    ):
        if any(PICTURE_TOKEN in text for text in texts):
            problem = f"holds {PICTURE_TOKEN!r}, which stands for an input image; leave it out"
            raise InvalidRequest(name, getattr(params, name), problem)


def _seeing(slot: str, area: PictureArea) -> ChatEncoderConfig:
    return ChatEncoderConfig(
        template=EDIT,
        template_tokens=64,
        picture_slot=slot,
        picture_token=PICTURE_TOKEN,
        picture_area=area,
    )


def _forward_kwargs(batch: Req, branch: Branch, latents: Tensor, t: Tensor) -> dict[str, Any]:
    import torch

    references = batch.image_latent
    # The reference rounds t to the latents' dtype before it divides.
    timestep = t.to(latents.dtype) / 1000
    return {
        "hidden_states": latents if references is None else torch.cat((latents, references), 1),
        "encoder_hidden_states": branch.embeds,
        "encoder_hidden_states_mask": branch.mask,
        "timestep": timestep,
        "rotary": branch.rotary,
    }


def register() -> None:
    """Make the family known to the registry."""
    from sglang.multimodal_gen.registry import register_configs

    register_configs(
        sampling_param_cls=QwenImageSamplingParams,
        pipeline_config_cls=QwenImagePipelineConfig,
        hf_model_paths=["Qwen/Qwen-Image", "Qwen/Qwen-Image-2512"],
        model_detectors=[lambda value: value == "qwenimagepipeline"],
    )
    register_configs(
        sampling_param_cls=QwenImageEditSamplingParams,
        pipeline_config_cls=QwenImageEditPipelineConfig,
        hf_model_paths=["Qwen/Qwen-Image-Edit"],
        model_detectors=[lambda value: value == "qwenimageeditpipeline"],
    )
    register_configs(
        sampling_param_cls=QwenImageEditPlusSamplingParams,
        pipeline_config_cls=QwenImageEditPlusPipelineConfig,
        hf_model_paths=["Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"],
        model_detectors=[lambda value: value == "qwenimageeditpluspipeline"],
    )
