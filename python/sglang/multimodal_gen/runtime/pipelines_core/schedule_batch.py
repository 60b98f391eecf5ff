"""The state of one request on its way through the stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import CallbackFailed, Cancelled
from sglang.multimodal_gen.runtime.utils.progress import (
    Phase,
    Preview,
    PreviewListener,
    ProgressEvent,
    ProgressListener,
)

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
    from sglang.multimodal_gen.runtime.pipelines_core.loop_state import CheckpointSink, LoopState
    from sglang.multimodal_gen.runtime.utils.video_file import InputVideo


@dataclass(frozen=True, slots=True)
class RequestControl:
    """The caller's end of a running request: hears progress, sees previews, and can stop it.

    Setting ``cancelled`` ends the request within one denoising step, with `Cancelled`.
    """

    listener: ProgressListener | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    preview_listener: PreviewListener | None = None
    checkpoints: CheckpointSink | None = None
    """Who keeps the denoising loop's states, where somebody does."""

    def report(self, phase: Phase, done: int, total: int, label: str) -> None:
        """Tell the caller how far a phase has come; stop here if asked to.

        With several ranks, all of a replica call this at the same places: they stop together.
        """
        if self.cancelled.is_set():
            raise Cancelled(f"stopped by the caller in {label}, {done} of {total}")
        if self.listener is None:
            return
        try:
            self.listener(ProgressEvent(phase, done, total, label))
        except Exception as error:  # the boundary to the caller's code: not to be taken for ours
            raise CallbackFailed(error) from error

    @property
    def wants_previews(self) -> bool:
        """Whether anybody looks; of the ranks of a replica, its first shows them."""
        return self.preview_listener is not None

    def show(self, preview: Preview) -> None:
        """Give the caller a look at an unfinished image."""
        if self.preview_listener is None:
            return
        try:
            self.preview_listener(preview)
        except Exception as error:  # the same boundary
            raise CallbackFailed(error) from error


def _by_a_stage() -> Any:
    """A field without a value until a stage writes it; reading it before is an error."""
    return field(init=False, repr=False)


def _by_some_stage(default_factory: Callable[[], Any]) -> Any:
    """A field that some pipelines' stages write, with a value for those that do not."""
    return field(default_factory=default_factory, repr=False, metadata={"stage": True})


def _nothing() -> None:
    return None


@dataclass(slots=True, kw_only=True)
class Req:
    """One batch of B images that run together; lists of the request have one entry an image.

    Fields with a default, and those that admission fills, can always be read. The others have no
    value until a stage writes them: reading one too early raises an AttributeError that says so,
    and the pipeline refuses at build to run a chain in which that could happen.
    """

    # Request: filled by admission; `request` is the sealed record the rest was taken from. Numbers
    # that an opaque pipeline is left to choose are 0 here.
    request: SamplingParams
    request_id: str
    prompt: list[str]
    negative_prompt: list[str] | None
    seeds: list[int]
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float
    do_classifier_free_guidance: bool
    num_frames: int = 1
    fps: int | None = None
    """Frames a second of clips; None for images."""
    max_sequence_length: int | None = None
    image_path: list[str] = field(default_factory=list)
    video_path: list[str] = field(default_factory=list)
    task_type: ModelTaskType | None = None
    data_type: DataType = DataType.IMAGE
    control: RequestControl = field(default_factory=RequestControl)
    previews: list[int] = field(default_factory=list)
    """How many previews of each image the caller wants; empty is none."""
    resume_from: LoopState | None = field(default=None, repr=False)
    """Where the denoising loop was when it was interrupted. Such a batch runs alone."""

    # Input images.
    generator: list[torch.Generator] = _by_a_stage()
    condition_image: list[Image.Image] = _by_a_stage()
    condition_video: list[InputVideo] = _by_some_stage(list)
    image_latent: Tensor | None = _by_some_stage(_nothing)
    image_embeds: Tensor | None = _by_some_stage(_nothing)
    """What an image encoder sees in the input images, [images, tokens, D]."""
    video_latent: Tensor | None = _by_some_stage(_nothing)
    image_latent_shapes: list[tuple[int, ...]] = _by_some_stage(list)
    """Of each input image's latents before packing, where a stage encodes them by themselves."""

    # Text: lists with one entry an encoder, each [B, T, D] or pooled [B, P].
    prompt_embeds: list[Tensor] = _by_a_stage()
    negative_prompt_embeds: list[Tensor] = _by_some_stage(list)
    pooled_embeds: list[Tensor] = _by_some_stage(list)
    neg_pooled_embeds: list[Tensor] = _by_some_stage(list)
    prompt_attention_mask: list[Tensor] = _by_some_stage(list)
    negative_attention_mask: list[Tensor] = _by_some_stage(list)
    picture_spans: list[tuple[int, int]] = _by_some_stage(list)
    """First token and count of each input image among a prompt's embeddings, alike in all."""

    # Latents: packed as the denoiser takes them; the shape before packing is kept.
    latents: Tensor = _by_a_stage()
    raw_latent_shape: tuple[int, ...] = _by_a_stage()
    model_state: Any = _by_some_stage(_nothing)

    # Schedule: the scheduler is this request's own copy; sigmas are as it uses them (shifted), one
    # a step.
    scheduler: Any = _by_some_stage(_nothing)
    timesteps: Tensor = _by_a_stage()
    sigmas: list[float] | None = _by_some_stage(_nothing)

    # Result, on the CPU: images are float32 [B, C, H, W] in 0..1, clips uint8 [B, F, H, W, 3].
    output: Tensor = _by_a_stage()
    warnings: list[str] = field(default_factory=list)
    warned_images: dict[str, list[int]] = field(default_factory=dict)
    """The images that a warning is about, for those that are not about all of the batch."""
    timings: dict[str, float] = field(default_factory=dict)
    step_cache: StepCacheUse | None = None
    """What a step cache saved; None without one."""

    @property
    def batch_size(self) -> int:
        """Images in this batch (B)."""
        return len(self.seeds)

    def warn(self, text: str, images: Iterable[int]) -> None:
        """Add a warning that concerns some images alone: only their callers will read it."""
        about = self.warned_images.setdefault(text, [])
        about += [image for image in images if image not in about]
        if text not in self.warnings:
            self.warnings.append(text)

    def release(self, name: str) -> None:
        """Let go of what a stage wrote into a field: it reads as if no stage had."""
        if name in _STAGE_DEFAULTS:
            setattr(self, name, _STAGE_DEFAULTS[name]())
        elif hasattr(self, name):
            delattr(self, name)

    def __getattr__(self, name: str) -> NoReturn:
        # Only reached when the slot holds nothing, or when there is no such slot.
        if name in REQ_FIELDS:
            raise AttributeError(
                f"Req.{name} was read before any stage wrote it, or after its last declared "
                "reader: declare it in the stage's `reads`"
            )
        raise AttributeError(f"Req has no field {name!r}")


REQ_FIELDS = frozenset(f.name for f in fields(Req))

_STAGE_DEFAULTS = {
    f.name: f.default_factory
    for f in fields(Req)
    if f.metadata.get("stage") and f.default_factory is not MISSING
}

WRITTEN_BY_STAGES = frozenset(f.name for f in fields(Req) if not f.init) | set(_STAGE_DEFAULTS)
"""What only stages write."""

READABLE_FROM_START = frozenset(
    f.name
    for f in fields(Req)
    if f.init or f.default is not MISSING or f.default_factory is not MISSING
)
"""What a first stage may read: all that admission fills, and all that has a default."""


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """What a pipeline returns for one `Req`.

    ``output`` is on the CPU: images are float32 [B, C, H, W] in 0..1, clips uint8 [B, F, H, W, 3],
    to be shown at ``fps``. ``timings`` are seconds by stage, in running order; ``peak_memory_mb``
    is the device's (CPU: the process's) peak in MiB; ``warned_images`` are the images that a
    warning is about, where it is not about all.
    """

    request_id: str
    output: Tensor
    prompt: list[str]
    seeds: list[int]
    timings: dict[str, float]
    peak_memory_mb: float
    warnings: list[str]
    warned_images: dict[str, list[int]] = field(default_factory=dict)
    fps: int | None = None
    step_cache: StepCacheUse | None = None
