"""What a pipeline's shared stages ask a family: data, and a handful of pure hooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from sglang.multimodal_gen.configs.models.base import (
    DiTConfig,
    EncoderConfig,
    ModelConfig,
    VAEConfig,
)
from sglang.multimodal_gen.configs.picture_area import PictureArea
from sglang.multimodal_gen.configs.sealed import Sealable
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.precision import PRECISIONS
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

__all__ = ["ImagePipelineConfig", "ModelTaskType", "PipelineConfig"]


@dataclass
class PipelineConfig(Sealable):
    """One family's answers to the shared stages.

    Fields are data that an operator may set (``pipeline_config={...}``). Hooks are pure: they see
    the request and the tensors they are given, and change neither. Every hook that has a default
    does the plain thing; a family overrides the few in which its reference differs.
    """

    supported_task_types: ClassVar[tuple[ModelTaskType, ...] | None] = None
    opaque: ClassVar[bool] = False
    """The pipeline is another library's from end to end: it checks sizes and reads guidance itself,
    and a setting that is left out (None) is its to choose."""
    pipeline_name: ClassVar[str | None] = None
    """Whose settings these are, in a family of several pipelines; None serves all of them."""
    index_settings: ClassVar[tuple[str, ...]] = ()
    """Fields that a checkpoint's ``model_index.json`` sets, where no operator did."""
    float32_latents: ClassVar[bool] = False
    """Noise and latents are float32; else they have the precision of the prompt's embeddings."""

    task_type: ModelTaskType = ModelTaskType.T2I
    should_use_guidance: bool = True
    """Whether ``guidance_scale`` above 1, with a negative prompt, is classifier-free guidance.
    False where guidance is embedded in the model: then ``true_cfg_scale`` alone turns it on."""
    guidance_keeps_norm: bool = False
    """Whether a guided prediction is scaled back, token by token, to the norm of the positive one:
    guidance turns it, and does not lengthen it."""
    dit_config: DiTConfig = field(default_factory=DiTConfig)
    vae_config: VAEConfig = field(default_factory=VAEConfig)
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (EncoderConfig(),)
    )
    dit_precision: str = "bf16"
    vae_precision: str = "fp32"
    text_encoder_precisions: tuple[str, ...] = ("bf16",)
    image_encoder_precision: str = "fp32"
    quantization_ignored_layers: tuple[str, ...] = ("*embed*", "norm_out*", "proj_out")
    """Patterns (``fnmatch``) of the denoiser's linears that ``--quantization`` leaves as they are:
    those that few parameters and the whole picture depend on."""
    boundary_ratio: float | None = None
    """With two denoisers: the share of the training steps from which on, upwards, the first one
    denoises, and ``transformer_2`` below it."""
    output_area: PictureArea | None = None
    """Where height or width is left out: about so many pixels, in the shape of the last input
    image. None: they must be given."""
    max_input_aspect: ClassVar[float | None] = None
    """An input image's longer side over the shorter one, as the model sees it (`seen_sizes`), is
    less than this; None for any."""
    max_pixels: int = 4096 * 4096
    max_video_pixels: int = 2**28
    """The most that frames x height x width of one clip may be."""

    def seen_sizes(self, width: int, height: int) -> tuple[tuple[int, int], ...]:
        """Width and height of an input image at each reader that ``max_input_aspect`` is of."""
        return ((width, height),)

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """A copy with an operator's settings.

        Raises:
            InvalidArgument: a name is unknown; the nearest one is offered.
        """
        known = [f.name for f in fields(self)]
        for name, value in settings.items():
            if name not in known:
                raise InvalidArgument(
                    f"pipeline_config.{name}",
                    value,
                    f"no such field.{did_you_mean(name, known)} It takes: {', '.join(known)}",
                )
        return replace(self, **{name: self._setting(name, v) for name, v in settings.items()})

    def _setting(self, name: str, value: Any) -> Any:
        """One operator's setting as its field stores it, or an `InvalidArgument`."""
        field_name, current = f"pipeline_config.{name}", getattr(self, name)
        if name == "task_type":
            try:
                task = ModelTaskType.parse(value)
            except ValueError as error:
                raise InvalidArgument(field_name, value, str(error)) from None
            served = self.get_supported_task_types()
            if task not in served:
                names = ", ".join(t.name for t in served)
                raise InvalidArgument(field_name, value, f"this pipeline serves {names}")
            return task
        if isinstance(current, ModelConfig) and isinstance(value, Mapping):
            return current.with_settings(value, label=field_name)
        if name == "boundary_ratio":
            if not _is_share(value):
                raise InvalidArgument(field_name, value, "must be a number in 0..1")
            return float(value)
        if isinstance(current, tuple) and isinstance(value, list):
            value = tuple(value)
        allowed = (int, float) if type(current) is float else type(current)
        if not isinstance(value, allowed) or (
            isinstance(value, bool) and type(current) is not bool
        ):
            raise InvalidArgument(field_name, value, f"must be of type {type(current).__name__}")
        if name.endswith(("precision", "precisions")):
            several = isinstance(value, tuple)
            value = tuple(map(_lowered, value)) if several else _lowered(value)
            for precision in value if isinstance(value, tuple) else (value,):
                if precision not in PRECISIONS:
                    raise InvalidArgument(field_name, value, f"use {', '.join(PRECISIONS)}")
        texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        if name == "quantization_ignored_layers" and not texts:
            raise InvalidArgument(field_name, value, "must be a list of texts")
        if name in ("max_pixels", "max_video_pixels") and not (
            isinstance(value, int) and value >= 1
        ):
            raise InvalidArgument(field_name, value, "must be at least 1")
        return value

    def seal(self) -> Self:
        """Make this config and its component configs read-only."""
        for value in vars(self).values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, ModelConfig):
                    part.seal()
        return super().seal()

    def with_checkpoint(
        self,
        component_configs: Mapping[str, Mapping[str, Any]],
        index: Mapping[str, Any] | None = None,
    ) -> Self:
        """A copy that knows the facts of a checkpoint.

        ``component_configs`` are component name -> its ``config.json``; ``index`` is the
        ``model_index.json``, of which `index_settings` are taken.

        Raises:
            CheckpointError: a setting of the index makes no sense.
        """
        settings = {}
        for f in fields(self):
            value = (index or {}).get(f.name) if f.name in self.index_settings else None
            if value is None or getattr(self, f.name) != f.default:
                continue
            if not (isinstance(value, bool) if isinstance(f.default, bool) else _is_share(value)):
                raise CheckpointError(f"model_index.json: {f.name}={value!r} makes no sense")
            settings[f.name] = value
        return replace(
            self,
            **settings,
            dit_config=self.dit_config.with_checkpoint(component_configs.get("transformer", {})),
            vae_config=self.vae_config.with_checkpoint(component_configs.get("vae", {})),
        )

    def get_supported_task_types(self) -> tuple[ModelTaskType, ...]:
        """The tasks this pipeline serves; the default alone unless the class declares more.

        Raises:
            PipelineDefinitionError: the declaration is empty, repeats itself or lacks the default.
        """
        declared = self.supported_task_types
        return _sound(self, (self.task_type,) if declared is None else declared)

    @property
    def declares_task_types(self) -> bool:
        """Whether this class says which tasks it serves, and not only its default task."""
        overridden = type(self).get_supported_task_types
        return (
            self.supported_task_types is not None
            or overridden is not PipelineConfig.get_supported_task_types
        )

    def resolve_task_type(
        self,
        requested: ModelTaskType | str | None = None,
        *,
        data_type: DataType | None = None,
        has_image: bool = False,
        has_video: bool = False,
    ) -> ModelTaskType:
        """The task of a request, from what it asks for and what it brings.

        Without ``requested``: the default if it fits output and inputs, else the only one that
        does; where no ``data_type`` is asked for, those with the default's output go first.

        Raises:
            InvalidRequest: the task is not served, does not fit the inputs, or must be named.
            PipelineDefinitionError: the tasks this pipeline declares are no sound declaration.
        """
        supported = _sound(self, self.get_supported_task_types())
        names = ", ".join(t.name for t in supported)
        if requested is not None:
            try:
                task = ModelTaskType.parse(requested)
            except ValueError as error:
                raise InvalidRequest("task_type", requested, str(error)) from None
            if task not in supported:
                raise InvalidRequest("task_type", task.name, f"this pipeline serves {names}")
            if data_type not in (None, task.data_type()):
                problem = f"makes {task.data_type().name}, and {data_type.name} is asked for here"
                raise InvalidRequest("task_type", task.name, problem)
            self._check_task_inputs(task, has_image, has_video)
            return task
        candidates = [t for t in supported if data_type in (None, t.data_type())]
        if not candidates and data_type is not None:
            problem = f"{data_type.name} is asked for here, and this pipeline serves {names}"
            raise InvalidRequest("task_type", None, problem)
        if has_image and len(candidates) > 1 and not any(t.accepts_image_input for t in candidates):
            what = "" if data_type is None else f" that makes {data_type.name}"
            problem = f"no task{what} takes an input image here; this pipeline serves {names}"
            raise InvalidRequest("image_path", "given", problem)
        if len(candidates) > 1:
            candidates = [t for t in candidates if _fits(t, has_image, has_video)]
            same_output = [t for t in candidates if t.data_type() is self.task_type.data_type()]
            if self.task_type in candidates:
                candidates = [self.task_type]
            elif data_type is None and same_output:
                candidates = same_output
        if len(candidates) != 1:
            fitting = ", ".join(t.name for t in candidates) or "none"
            problem = f"name the task of this request; it fits {fitting} of {names}"
            raise InvalidRequest("task_type", None, problem)
        self._check_task_inputs(candidates[0], has_image, has_video)
        return candidates[0]

    def _check_task_inputs(self, task: ModelTaskType, has_image: bool, has_video: bool) -> None:
        """Refuse inputs that a task lacks or does not take.

        A pipeline that declares no tasks may take a video in its own way (the porters' contract),
        so there a surplus video is the pipeline's to refuse.
        """
        if task.requires_image_input and not has_image:
            raise InvalidRequest("image_path", None, f"task {task.name} needs an input image")
        if has_image and not task.accepts_image_input:
            raise InvalidRequest("image_path", "given", f"task {task.name} takes no input image")
        if task.requires_video_input and not has_video:
            raise InvalidRequest("video_path", None, f"task {task.name} needs an input video")
        if has_video and not task.accepts_video_input and self.declares_task_types:
            raise InvalidRequest("video_path", "given", f"task {task.name} takes no input video")

    # Hooks. At most ten: a reader must be able to hold them.

    def check_request(self, params: SamplingParams) -> None:
        """Refuse (`InvalidRequest`) what only this pipeline cannot do; admission asks first."""

    def prepare_model_state(self, batch: Req, transformer: Any) -> object | None:
        """What the denoiser needs on every step and that no step changes; kept on the request."""
        return None

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The denoiser's ``forward`` arguments for the prompt; called on each step.

        ``latent_model_input`` is the scaled latents, ``t`` [B] float32 the scheduler's timestep.
        """
        raise PipelineDefinitionError(
            f"{type(self).__name__} must define prepare_pos_cond_kwargs: the arguments of the "
            "denoising network's forward() for one step"
        )

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt; called only under classifier-free guidance."""
        raise PipelineDefinitionError(
            f"{type(self).__name__} must define prepare_neg_cond_kwargs to be used with "
            "classifier-free guidance"
        )

    def prepare_latent_shape(self, batch: Req, batch_size: int, num_frames: int) -> tuple[int, ...]:
        """Shape of the initial noise, before packing; with frames if the family makes videos."""
        ratio = self.vae_config.spatial_compression_ratio
        channels = self.vae_config.latent_channels
        frames = ((num_frames - 1) // self.frame_multiple + 1,) if self.makes_videos else ()
        return (batch_size, channels, *frames, batch.height // ratio, batch.width // ratio)

    def maybe_pack_latents(self, latents: Tensor, batch_size: int, batch: Req) -> Tensor:
        """Latents as the denoiser takes them."""
        return latents

    def prepare_sigmas(
        self, sigmas: list[float] | None, num_inference_steps: int
    ) -> list[float] | None:
        """The sigmas to hand to the scheduler; None lets the scheduler choose."""
        return sigmas

    def prepare_extra_set_timesteps_kwargs(
        self, batch: Req, scheduler_config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Further arguments of the scheduler's ``set_timesteps`` (e.g. ``mu``)."""
        return {}

    def post_denoising_loop(self, latents: Tensor, batch: Req) -> Tensor:
        """Latents as the VAE takes them: undoes `maybe_pack_latents`."""
        return latents

    def get_decode_scale_and_shift(
        self, device: torch.device, dtype: torch.dtype, vae: nn.Module
    ) -> tuple[float | Tensor, float | Tensor]:
        """``(scale, shift)``: the VAE decodes ``latents / scale + shift``."""
        shift = self.vae_config.shift_factor
        return self.vae_config.scaling_factor, 0.0 if shift is None else shift

    # Facts derived from data.

    @property
    def size_multiple(self) -> int:
        """Edges of an image must be multiples of this many pixels."""
        return self.vae_config.spatial_compression_ratio

    @property
    def frame_multiple(self) -> int:
        """A clip has a multiple of this many frames, and one more."""
        return self.vae_config.temporal_compression_ratio

    @property
    def encodes_images_alone(self) -> bool:
        """Whether a clip's given first frame is encoded by itself; else in a clip of zeros."""
        return False

    @property
    def makes_videos(self) -> bool:
        """Whether any task of this family makes videos: its latents have frames, then."""
        return any(task.is_video_gen for task in self.get_supported_task_types())

    def nearest_num_frames(self, frames: float) -> int:
        """The count of frames, among those the model can make, that is nearest to ``frames``.

        The smaller of two that are equally near.
        """
        multiple = self.frame_multiple
        return max(0, math.ceil((frames - 1) / multiple - 0.5)) * multiple + 1


@dataclass
class ImagePipelineConfig(PipelineConfig):
    """An image model whose latents are packed into tokens of 2x2 latent pixels, as FLUX does."""

    task_type: ModelTaskType = ModelTaskType.T2I

    @property
    def size_multiple(self) -> int:
        """A token covers two latent pixels along an edge."""
        return 2 * self.vae_config.spatial_compression_ratio

    def maybe_pack_latents(self, latents: Tensor, batch_size: int, batch: Req) -> Tensor:
        """[B, C, h, w] -> [B, h/2 * w/2, 4C]; channel of a token = 4c + 2dy + dx."""
        _, channels, height, width = latents.shape
        grid = latents.view(batch_size, channels, height // 2, 2, width // 2, 2)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch_size, -1, 4 * channels)

    def post_denoising_loop(self, latents: Tensor, batch: Req) -> Tensor:
        """[B, h/2 * w/2, 4C] -> [B, C, h, w], by the request's ``raw_latent_shape``."""
        shape = tuple(batch.raw_latent_shape)
        if tuple(latents.shape) == shape:
            return latents  # a custom stage that did not pack
        if len(shape) != 4:
            raise PipelineDefinitionError(
                f"raw_latent_shape={shape} must be the latents' shape before packing, [B, C, h, w]"
            )
        batch_size, channels, height, width = shape
        grid = latents.view(batch_size, height // 2, width // 2, channels, 2, 2)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(batch_size, channels, height, width)

    def prepare_sigmas(
        self, sigmas: list[float] | None, num_inference_steps: int
    ) -> list[float] | None:
        """Flow matching: N sigmas from 1 down to 1/N in equal steps, unless given."""
        if sigmas is not None:
            return sigmas
        return np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()


def resolution_shift(tokens: int, scheduler_config: Mapping[str, Any]) -> float:
    """``mu``: the time shift that grows with the number of image tokens, along a line.

    The line goes through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift) of the
    scheduler's config, and is not clamped. Stable Diffusion 3 paper (Esser et al. 2024), 5.3.2.
    """
    x0 = scheduler_config.get("base_image_seq_len", 256)
    x1 = scheduler_config.get("max_image_seq_len", 4096)
    y0 = scheduler_config.get("base_shift", 0.5)
    y1 = scheduler_config.get("max_shift", 1.15)
    slope = (y1 - y0) / (x1 - x0)
    return tokens * slope + (y0 - slope * x0)


def get_request_task_type(batch: Req, pipeline_config: PipelineConfig) -> ModelTaskType:
    """The admitted task of a request; the pipeline's default for callers that resolved none."""
    return pipeline_config.task_type if batch.task_type is None else batch.task_type


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _lowered(precision: Any) -> Any:
    return precision.lower() if isinstance(precision, str) else precision


def _fits(task: ModelTaskType, has_image: bool, has_video: bool) -> bool:
    image = task.accepts_image_input if has_image else not task.requires_image_input
    return image and (task.accepts_video_input if has_video else not task.requires_video_input)


def _sound(config: PipelineConfig, tasks: tuple[ModelTaskType, ...]) -> tuple[ModelTaskType, ...]:
    """The tasks that a pipeline declares, if the declaration keeps its rules."""
    default = config.task_type
    given = [default, *tasks] if isinstance(tasks, (tuple, list)) else [tasks]
    for task in given:
        if not isinstance(task, ModelTaskType):
            raise PipelineDefinitionError(
                f"{type(config).__name__}: task_type and supported_task_types must be members of "
                f"ModelTaskType, not {task!r}"
            )
    if not tasks or len(set(tasks)) < len(tasks) or config.task_type not in tasks:
        raise PipelineDefinitionError(
            f"{type(config).__name__}.supported_task_types must be nonempty, unique, and include "
            f"the default task_type {default.name}"
        )
    return tasks
