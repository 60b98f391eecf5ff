"""Wan 2.1 and 2.2: conditioning and decoding as in Diffusers' Wan pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sglang.multimodal_gen.configs.models.base import DiTConfig, EncoderConfig, VAEConfig
from sglang.multimodal_gen.configs.models.causal_video_vae import CausalVideoVAEConfig
from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.wan import (
    Wan22ImageSamplingParams,
    Wan22SamplingParams,
    Wan720pSamplingParams,
    WanSamplingParams,
    WanTI2VSamplingParams,
)
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
    from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

UMT5_TOKENS = 512


@dataclass
class WanDiTConfig(DiTConfig):
    """``image_dim``: it attends to CLIP's view of pictures; ``pos_embed_seq_len``: of two."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    rope_max_seq_len: int = 1024
    image_dim: int | None = None
    pos_embed_seq_len: int | None = None


@dataclass(frozen=True)
class WanState:
    """What every step of one request shares.

    ``beside`` [B, 4 + C, T, h, w] are channels that go in with the latents: which frames are given,
    and the clip of given frames. ``first_frame`` [B, C, 1, h, w] stands in place of the latents'
    first frame (2.2's 5B). ``seen`` [B * images, tokens, D] is CLIP's view of the images: each
    output of the batch looks at all of them.
    """

    rotary: Rotary
    dtype: torch.dtype
    seen: Tensor | None = None
    beside: Tensor | None = None
    first_frame: Tensor | None = None


@dataclass
class WanPipelineConfig(PipelineConfig):
    """Text to video, and video to video; with ``expand_timesteps`` from a first frame too.

    The latents stay float32: the denoiser rounds its input. Text is padded with zeros, which are
    attended to.
    """

    pipeline_name: ClassVar[str | None] = "WanPipeline"
    index_settings: ClassVar[tuple[str, ...]] = ("boundary_ratio", "expand_timesteps")
    float32_latents: ClassVar[bool] = True

    task_type: ModelTaskType = ModelTaskType.T2V
    dit_config: DiTConfig = field(default_factory=WanDiTConfig)
    vae_config: VAEConfig = field(default_factory=CausalVideoVAEConfig)
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (
            EncoderConfig(max_length_limit=UMT5_TOKENS, prompt_cleaning=True, zero_padding=True),
        )
    )
    expand_timesteps: bool = False
    """Each token has a time of its own, 0 for those of a given first frame (2.2's 5B)."""

    def with_checkpoint(
        self,
        component_configs: Mapping[str, Mapping[str, Any]],
        index: Mapping[str, Any] | None = None,
    ) -> Self:
        """The 5B's first task is text with or without an image."""
        config = super().with_checkpoint(component_configs, index)
        both = config.expand_timesteps and config.task_type is ModelTaskType.T2V
        return replace(config, task_type=ModelTaskType.TI2V) if both else config

    def get_supported_task_types(self) -> tuple[ModelTaskType, ...]:
        """What the checkpoint's denoiser can do."""
        text = (ModelTaskType.T2V, ModelTaskType.V2V)
        return (ModelTaskType.TI2V, ModelTaskType.I2V, *text) if self.expand_timesteps else text

    @property
    def size_multiple(self) -> int:
        """A token covers a patch of latent pixels."""
        assert isinstance(self.dit_config, WanDiTConfig)
        return self.vae_config.spatial_compression_ratio * max(self.dit_config.patch_size[1:])

    @property
    def encodes_images_alone(self) -> bool:
        """The 5B sees a first frame in place of its latents; the others, a clip beside them."""
        return self.expand_timesteps

    def check_request(self, params: SamplingParams) -> None:
        """Refuse settings of a second expert that is not there, images in a wrong number, and
        clips with more patches along an axis than the denoiser has positions.
        """
        self._check_positions(params)
        for name in ("guidance_scale_2", "boundary_ratio"):
            value = getattr(params, name, None)
            if value is not None and self.boundary_ratio is None:
                raise InvalidRequest(name, value, "this checkpoint has one denoiser; leave it out")
        images, most = len(params.image_paths), 1 if self.expand_timesteps else 2
        assert isinstance(self.dit_config, WanDiTConfig)
        if self.dit_config.pos_embed_seq_len is not None and images == 1:
            problem = "this checkpoint goes from a first frame to a last one: give two images"
            raise InvalidRequest("image_path", params.image_paths, problem)
        if self.dit_config.image_dim is not None and self.dit_config.pos_embed_seq_len is None:
            most = 1
        if images > most:
            takes = "a first frame" if most == 1 else "a first frame and a last one"
            problem = f"{images} images are given; this checkpoint takes {takes}"
            raise InvalidRequest("image_path", params.image_paths, problem)
        if images == 2 and getattr(params, "num_frames", 2) < 2:
            raise InvalidRequest("num_frames", 1, "a first and a last frame need more than one")

    def _check_positions(self, params: SamplingParams) -> None:
        """Before anything is loaded or allocated: the denoiser would find out in the loop."""
        assert isinstance(self.dit_config, WanDiTConfig)
        depth, *sides = self.dit_config.patch_size
        most, ratio = self.dit_config.rope_max_seq_len, self.vae_config.spatial_compression_ratio
        for name, patch in zip(("height", "width"), sides, strict=True):
            value = getattr(params, name)
            if value is not None and value // (ratio * patch) > most:
                problem = f"this checkpoint has positions for at most {most * ratio * patch} pixels"
                raise InvalidRequest(name, value, problem)
        frames = getattr(params, "num_frames", 1)
        if ((frames - 1) // self.frame_multiple + 1) // depth > most:
            longest = (most * depth - 1) * self.frame_multiple + 1
            problem = f"this checkpoint has positions for at most {longest} frames"
            raise InvalidRequest("num_frames", frames, problem)

    def prepare_model_state(self, batch: Req, transformer: WanTransformer3DModel) -> WanState:
        """Positions of the clip's patches, and the given frames."""
        rotary = transformer.rotary_embedding(*batch.raw_latent_shape[2:])
        dtype = transformer.patch_embedding.weight.dtype
        given = batch.image_latent
        seen = batch.image_embeds
        if seen is not None:
            seen = seen.repeat(batch.raw_latent_shape[0], 1, 1).to(dtype)
        if given is None:
            return WanState(rotary, dtype)
        if self.expand_timesteps:
            return WanState(rotary, dtype, first_frame=given)
        both = len(batch.image_path) > 1
        return WanState(rotary, dtype, seen, _beside(given, self.frame_multiple, both=both))

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Arguments of ``WanTransformer3DModel.forward`` for the prompt."""
        return self._forward_kwargs(batch, latent_model_input, t, batch.prompt_embeds[0])

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt."""
        return self._forward_kwargs(batch, latent_model_input, t, batch.negative_prompt_embeds[0])

    def _forward_kwargs(
        self, batch: Req, latents: Tensor, t: Tensor, text: Tensor
    ) -> dict[str, Any]:
        import torch

        state: WanState = batch.model_state
        token_timestep = None
        if state.first_frame is not None:
            latents = _with_first_frame(latents, state.first_frame)
            assert isinstance(self.dit_config, WanDiTConfig)
            token_timestep = _times_of_tokens(latents, t, self.dit_config.patch_size)
        if state.beside is not None:
            latents = torch.cat([latents, state.beside], dim=1)
        return {
            "hidden_states": latents.to(state.dtype),
            "timestep": t,
            "encoder_hidden_states": text.to(state.dtype),
            "encoder_hidden_states_image": state.seen,
            "token_timestep": token_timestep,
            "rotary": state.rotary,
        }

    def post_denoising_loop(self, latents: Tensor, batch: Req) -> Tensor:
        """Latents as the VAE takes them; the 5B's given first frame is what it was."""
        state = batch.model_state
        if isinstance(state, WanState) and state.first_frame is not None:
            return _with_first_frame(latents, state.first_frame)
        return latents

    def get_decode_scale_and_shift(
        self, device: torch.device, dtype: torch.dtype, vae: nn.Module
    ) -> tuple[float | Tensor, float | Tensor]:
        """By channel: one over the latents' deviation, and their mean."""
        import torch

        config = self.vae_config
        assert isinstance(config, CausalVideoVAEConfig)
        shape = (1, -1, 1, 1, 1)
        std = torch.tensor(config.latents_std).view(shape).to(device, dtype)
        return 1.0 / std, torch.tensor(config.latents_mean).view(shape).to(device, dtype)


@dataclass
class WanTI2VPipelineConfig(WanPipelineConfig):
    """2.2's 5B: text, or text and a first frame, to video."""

    task_type: ModelTaskType = ModelTaskType.TI2V
    expand_timesteps: bool = True


@dataclass
class WanImageToVideoPipelineConfig(WanPipelineConfig):
    """From a first frame, and a last one where the checkpoint knows it, to video."""

    pipeline_name: ClassVar[str | None] = "WanImageToVideoPipeline"

    task_type: ModelTaskType = ModelTaskType.I2V

    def get_supported_task_types(self) -> tuple[ModelTaskType, ...]:
        """Image to video alone."""
        return (ModelTaskType.I2V,)


def _beside(given: Tensor, frames_in_one: int, *, both: bool) -> Tensor:
    """Channels [B, n + C, T, h, w]: for each of the n frames in a latent frame whether it is given,
    then the latents of the given clip.

    The first latent frame stands for one frame, which counts n times.
    """
    import torch

    mask = given.new_zeros(len(given), frames_in_one, *given.shape[2:])
    mask[:, :, 0] = 1
    if both:
        mask[:, -1, -1] = 1
    return torch.cat([mask, given], dim=1)


def _with_first_frame(latents: Tensor, first: Tensor) -> Tensor:
    """Latents [B, C, T, h, w] with another first frame [B, C, 1, h, w]."""
    import torch

    return torch.cat([first.to(latents.dtype), latents[:, :, 1:]], dim=2)


def _times_of_tokens(latents: Tensor, t_B: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, S]: 0 for the patches of the first frame, the step's time for all others."""
    frames, height, width = (n // p for n, p in zip(latents.shape[2:], patch, strict=True))
    times = t_B.float()[:, None].repeat(1, frames * height * width)
    times[:, : height * width] = 0
    return times


def register() -> None:
    """Make Wan known to the registry."""
    from sglang.multimodal_gen.registry import register_configs

    def known(params: type, config: type, *paths: str, class_name: str | None = None) -> None:
        detectors = [] if class_name is None else [lambda value: value == class_name]
        register_configs(
            sampling_param_cls=params,
            pipeline_config_cls=config,
            hf_model_paths=[f"Wan-AI/{path}" for path in paths],
            model_detectors=detectors,
        )

    text, image = WanPipelineConfig, WanImageToVideoPipelineConfig
    small, large = "Wan2.1-T2V-1.3B-Diffusers", "Wan2.1-T2V-14B-Diffusers"
    known(WanSamplingParams, text, small, large, class_name="wanpipeline")
    known(Wan22SamplingParams, text, "Wan2.2-T2V-A14B-Diffusers")
    known(WanTI2VSamplingParams, WanTI2VPipelineConfig, "Wan2.2-TI2V-5B-Diffusers")
    at_480p, at_720p = "Wan2.1-I2V-14B-480P-Diffusers", "Wan2.1-I2V-14B-720P-Diffusers"
    known(WanSamplingParams, image, at_480p, class_name="wanimagetovideopipeline")
    known(Wan720pSamplingParams, image, at_720p, "Wan2.1-FLF2V-14B-720P-diffusers")
    known(Wan22ImageSamplingParams, image, "Wan2.2-I2V-A14B-Diffusers")
