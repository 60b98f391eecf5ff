"""Qwen-Image 2.1, text to image and edits, as Diffusers' ``QwenImage21Pipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sglang.multimodal_gen.configs.models.base import EncoderConfig, VAEConfig
from sglang.multimodal_gen.configs.models.chat_encoder import ChatEncoderConfig
from sglang.multimodal_gen.configs.picture_area import PictureArea
from sglang.multimodal_gen.configs.pipeline_configs.base import resolution_shift
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import (
    CHAT,
    MAX_ASPECT,
    PICTURE,
    PICTURE_TOKEN,
    VAE_AREA,
    QwenImagePipelineConfig,
    QwenImageVAEConfig,
    refuse_picture_tokens,
)
from sglang.multimodal_gen.configs.sample.qwen_image_21 import QwenImage21SamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
    from sglang.multimodal_gen.runtime.models.dits.qwen_image_21 import (
        Prefix,
        QwenImage21Transformer2DModel,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

CHANNELS = 64
CHAT_21 = CHAT.format("Comprehend and analyze the provided prompt.")


@dataclass
class QwenImage21VAEConfig(QwenImageVAEConfig):
    """Of pictures with transparency; names are those of its ``config.json``."""

    z_dim: int = CHANNELS
    temperal_downsample: tuple[bool, ...] = (False, True, True, True)
    latents_mean: tuple[float, ...] = (0.0,) * CHANNELS
    latents_std: tuple[float, ...] = (1.0,) * CHANNELS
    in_channels: int = 4
    scale_factor_spatial: int = 16

    @property
    def spatial_compression_ratio(self) -> int:
        """The checkpoint says it."""
        return self.scale_factor_spatial


@dataclass(frozen=True)
class QwenImage21State:
    """What stands before the picture in both branches, and where the picture itself stands."""

    positive: Prefix
    negative: Prefix | None
    rotary: Rotary


@dataclass
class QwenImage21PipelineConfig(QwenImagePipelineConfig):
    """Qwen3-VL reads prompt and pictures; a token of the denoiser is a latent pixel.

    ``sample_sigmas``: the schedule before its shift, where the checkpoint has one of its own.
    """

    pipeline_name: ClassVar[str | None] = "QwenImage21Pipeline"
    max_input_aspect: ClassVar[float | None] = MAX_ASPECT

    task_type: ModelTaskType = ModelTaskType.TI2I
    output_area: PictureArea | None = VAE_AREA
    guidance_keeps_norm: bool = False
    sample_sigmas: tuple[float, ...] = ()
    vae_config: VAEConfig = field(default_factory=QwenImage21VAEConfig)
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (
            ChatEncoderConfig(
                template=CHAT_21,
                template_head=CHAT_21[: CHAT_21.index("<|im_start|>user")],
                blank_prompt=" ",
                picture_slot=f"<image{{}}>{PICTURE}",
                picture_separator=" ",
                picture_token=PICTURE_TOKEN,
                picture_area=VAE_AREA,
            ),
        )
    )

    def with_checkpoint(
        self,
        component_configs: Mapping[str, Mapping[str, Any]],
        index: Mapping[str, Any] | None = None,
    ) -> Self:
        """Also the schedule that ``model_index.json`` may hold."""
        config = super().with_checkpoint(component_configs, index)
        sigmas = (index or {}).get("sample_sigmas")
        if sigmas is None or self.sample_sigmas:
            return config
        if (
            not isinstance(sigmas, list)
            or not sigmas
            or not all(isinstance(s, int | float) and 0 < s <= 1 for s in sigmas)
        ):
            raise CheckpointError(
                f"model_index.json: sample_sigmas={sigmas!r} must be null or numbers in 0..1"
            )
        return replace(config, sample_sigmas=tuple(map(float, sigmas)))

    def check_request(self, params: SamplingParams) -> None:
        """No picture that is only claimed in words, and no other steps than a fixed schedule's."""
        refuse_picture_tokens(params)
        steps, fixed = params.num_inference_steps, len(self.sample_sigmas)
        if fixed and steps not in (fixed, type(params).num_inference_steps):
            problem = f"this checkpoint has a schedule of {fixed} steps; leave it out"
            raise InvalidRequest("num_inference_steps", steps, problem)

    def prepare_sigmas(
        self, sigmas: list[float] | None, num_inference_steps: int
    ) -> list[float] | None:
        """The checkpoint's own, or equal steps."""
        own = list(self.sample_sigmas) or None
        return super().prepare_sigmas(own if sigmas is None else sigmas, num_inference_steps)

    def prepare_model_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: Req, transformer: QwenImage21Transformer2DModel
    ) -> QwenImage21State:
        """Texts and pictures through the denoiser, once: no step changes what they say to it."""
        *_, height, width = batch.raw_latent_shape
        rotary = transformer.rotary_embedding((height, width))
        positive = _prefix(
            transformer, batch, batch.prompt, batch.prompt_embeds, batch.prompt_attention_mask
        )
        negative = None
        if batch.do_classifier_free_guidance:
            assert batch.negative_prompt is not None
            negative = _prefix(
                transformer,
                batch,
                batch.negative_prompt,
                batch.negative_prompt_embeds,
                batch.negative_attention_mask,
            )
        return QwenImage21State(positive, negative, rotary)

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Arguments of ``QwenImage21Transformer2DModel.forward`` for the prompt."""
        return _forward_kwargs(batch.model_state, "positive", latent_model_input, t)

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt."""
        return _forward_kwargs(batch.model_state, "negative", latent_model_input, t)

    def maybe_pack_latents(self, latents: Tensor, batch_size: int, batch: Req) -> Tensor:
        """A token a latent pixel; the frame, before the channels or behind them, goes."""
        return latents.flatten(1, 2).flatten(2).transpose(1, 2)

    def post_denoising_loop(self, latents: Tensor, batch: Req) -> Tensor:
        """Tokens to [B, C, 1, h, w]."""
        *_, height, width = batch.raw_latent_shape
        return latents.transpose(1, 2).unflatten(2, (1, height, width))

    def prepare_extra_set_timesteps_kwargs(
        self, batch: Req, scheduler_config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Time shifts with the tokens of the picture to make."""
        if not scheduler_config.get("use_dynamic_shifting", False):
            return {}
        *_, height, width = batch.raw_latent_shape
        return {"mu": resolution_shift(height * width, scheduler_config)}


def _prefix(
    transformer: QwenImage21Transformer2DModel,
    batch: Req,
    prompts: list[str],
    embeds: list[Tensor],
    masks: list[Tensor],
) -> Prefix:
    """Of each row of the batch; rows of one prompt are computed once."""
    grids = [(height, width) for *_, height, width in batch.image_latent_shapes]
    first = [prompts.index(prompt) for prompt in prompts]
    distinct = list(dict.fromkeys(first))
    lengths = [masks[0][row].sum() if masks else embeds[0].shape[1] for row in distinct]
    texts = [embeds[0][row, :length] for row, length in zip(distinct, lengths, strict=True)]
    references = None if batch.image_latent is None else batch.image_latent[:1]
    prefix = transformer.prefix(texts, references, batch.picture_spans, grids)
    if first == distinct:
        return prefix
    return prefix.rows([distinct.index(row) for row in first])


def _forward_kwargs(
    state: QwenImage21State, branch: str, latents: Tensor, t: Tensor
) -> dict[str, Any]:
    # The reference rounds t to the latents' dtype before it divides.
    return {
        "hidden_states": latents,
        "timestep": t.to(latents.dtype) / 1000,
        "prefix": getattr(state, branch),
        "rotary": state.rotary,
    }


def register() -> None:
    """Make the family known to the registry."""
    from sglang.multimodal_gen.registry import register_configs

    register_configs(
        sampling_param_cls=QwenImage21SamplingParams,
        pipeline_config_cls=QwenImage21PipelineConfig,
        hf_model_paths=["Qwen/Qwen-Image-2.1"],
        model_detectors=[lambda value: value == "qwenimage21pipeline"],
    )
