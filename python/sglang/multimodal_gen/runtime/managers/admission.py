"""Where requests come in: every mistake of a caller ends here, with a message."""

from __future__ import annotations

import os
import secrets
import uuid
from dataclasses import fields, replace

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_SEED,
    RANDOM_SEED,
    SamplingParams,
    is_blank,
)
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import input_image_size

MAX_IMAGES = 10_000


def admit(
    params: SamplingParams,
    config: PipelineConfig,
    *,
    batching_max_size: int,
    control: RequestControl | None = None,
    data_type: DataType | None = None,
    previews: int = 0,
) -> list[Req]:
    """Turn settings into batches that the pipeline can run.

    The images of a request are its prompts in order, ``num_outputs_per_prompt`` of each; image k of
    the request has seed ``seed + k``. They are cut into batches of at most ``batching_max_size``.
    ``params`` is sealed. ``data_type`` is what the door that the request came through makes;
    ``previews`` is how many looks at each unfinished image the caller wants.

    Raises:
        InvalidRequest: a setting does not fit the model; names field, value and remedy.
    """
    params.check()
    config.check_request(params)
    prompts = _prompts(params)
    task_type = _task(params, config, data_type)
    _check_images(params, config)
    params = _shaped_like_its_image(params, config)
    height, width = _size(params, config)
    frames, frame_warnings = _frames(params, config, task_type)
    _check_text_length(params, config)
    seeds = _seeds(params, len(prompts))
    params = replace(
        params,
        prompt=tuple(params.prompts),
        seed=tuple(seeds),
        task_type=task_type,
        height=height,
        width=width,
        **({"num_frames": frames} if hasattr(params, "num_frames") else {}),
    ).seal()
    scale, warnings = _guidance(params, config)
    warnings += frame_warnings
    fps = getattr(params, "fps", None) if task_type.is_video_gen else None
    request_id = uuid.uuid4().hex
    control = RequestControl() if control is None else control
    return [
        Req(
            request=params,
            request_id=request_id,
            prompt=prompts[start : start + batching_max_size],
            negative_prompt=_negatives(params, len(prompts[start : start + batching_max_size])),
            seeds=seeds[start : start + batching_max_size],
            height=int(_open_as_zero(height)),
            width=int(_open_as_zero(width)),
            num_inference_steps=int(_open_as_zero(params.num_inference_steps)),
            guidance_scale=float(_open_as_zero(params.guidance_scale)),
            true_cfg_scale=1.0 if scale is None else scale,
            do_classifier_free_guidance=scale is not None,
            num_frames=frames,
            fps=fps,
            max_sequence_length=params.max_sequence_length,
            video_path=[os.fspath(path) for path in params.video_paths],
            image_path=[os.fspath(path) for path in params.image_paths],
            task_type=task_type,
            data_type=task_type.data_type(),
            control=control,
            previews=[previews] * len(seeds[start : start + batching_max_size]) if previews else [],
            warnings=list(warnings),
        )
        for start in range(0, len(seeds), batching_max_size)
    ]


def _prompts(params: SamplingParams) -> list[str]:
    """One prompt an image."""
    prompts = params.prompts
    if not prompts and not params.prompt_optional:
        raise InvalidRequest("prompt", params.prompt, "is missing; say what to make")
    for prompt in prompts:
        if is_blank(prompt) and not params.prompt_optional:
            raise InvalidRequest("prompt", prompt, "is empty; say what to make")
    prompts = prompts or [""]
    if len(prompts) * params.num_outputs_per_prompt > MAX_IMAGES:
        raise InvalidRequest(
            "num_outputs_per_prompt",
            params.num_outputs_per_prompt,
            f"makes {len(prompts) * params.num_outputs_per_prompt} images of {len(prompts)} "
            f"prompts; at most {MAX_IMAGES} a request",
        )
    return [prompt for prompt in prompts for _ in range(params.num_outputs_per_prompt)]


def _negatives(params: SamplingParams, count: int) -> list[str] | None:
    return None if params.negative_prompt is None else [params.negative_prompt] * count


def _open_as_zero(value: float | None) -> float:
    """Zero in the batch where an opaque pipeline chooses; it reads ``batch.request`` instead."""
    return 0 if value is None else value


def _task(
    params: SamplingParams, config: PipelineConfig, data_type: DataType | None
) -> ModelTaskType:
    """What is asked for; a refusal shows the inputs themselves, which the config is not given."""
    try:
        return config.resolve_task_type(
            params.task_type,
            data_type=data_type,
            has_image=bool(params.image_paths),
            has_video=bool(params.video_paths),
        )
    except InvalidRequest as error:
        inputs = {"image_path": params.image_paths, "video_path": params.video_paths}
        if error.value is None or not inputs.get(error.field):
            raise
        raise InvalidRequest(error.field, inputs[error.field], error.problem) from None


def _check_images(params: SamplingParams, config: PipelineConfig) -> None:
    """Refuse an input image that is thinner than the model's reader takes."""
    if config.max_input_aspect is None:
        return
    for path in params.image_paths:
        width, height = input_image_size(path)
        for wide, high in config.seen_sizes(width, height):
            if max(wide, high) >= config.max_input_aspect * min(wide, high):
                problem = (
                    f"is {width}x{height}, which this model would look at as {wide}x{high}; the "
                    f"longer side must be less than {config.max_input_aspect:g} times the shorter "
                    "one there. Crop or pad it"
                )
                raise InvalidRequest("image_path", os.fspath(path), problem)


def _shaped_like_its_image(params: SamplingParams, config: PipelineConfig) -> SamplingParams:
    """The same with the size that a model for input images chooses where none is given."""
    area, images = config.output_area, params.image_paths
    if area is None or None not in (params.height, params.width):
        return params
    shape = input_image_size(images[-1]) if images else (1, 1)
    width, height = area.size_for(*shape)
    return replace(
        params,
        height=height if params.height is None else params.height,
        width=width if params.width is None else params.width,
    )


def _size(params: SamplingParams, config: PipelineConfig) -> tuple[int | None, int | None]:
    """Height and width, checked before any tensor is made; None is an opaque pipeline's choice."""
    if not config.opaque:
        _check_grid(params, config.size_multiple)
    height, width = params.height, params.width
    if height is not None and width is not None and height * width > config.max_pixels:
        raise InvalidRequest(
            "height*width",
            f"{height}x{width}",
            f"is more than this model's max_pixels={config.max_pixels}; ask for less, or raise "
            "pipeline_config.max_pixels",
        )
    return (None if height is None else int(height), None if width is None else int(width))


def _check_grid(params: SamplingParams, multiple: int) -> None:
    """Refuse a size that is left out, or off the grid of the model's latents."""
    for name in ("height", "width"):
        value = getattr(params, name)
        if value is None:
            raise InvalidRequest(name, None, f"give a multiple of {multiple} pixels")
        if value % multiple or value < multiple:
            below = max(value // multiple * multiple, multiple)
            above = (value // multiple + 1) * multiple
            nearest = below if below == above else f"{below} or {above}"
            raise InvalidRequest(
                name, value, f"must be a multiple of {multiple} for this model; try {nearest}"
            )


def _frames(
    params: SamplingParams, config: PipelineConfig, task: ModelTaskType
) -> tuple[int, list[str]]:
    """Frames of each output, checked against the model; and what the caller should know.

    A count that the model cannot make is refused, with those nearest to it; or, where the caller
    says so, rounded down with a warning.
    """
    asked = getattr(params, "num_frames", 1)
    if not task.is_video_gen:
        ignored = asked != 1 and _was_set(params, "num_frames")
        warning = f"num_frames={asked} has no effect: task {task.name} makes one picture"
        return 1, [warning] if ignored else []
    frames, warnings, multiple = int(asked), [], config.frame_multiple
    below = (frames - 1) // multiple * multiple + 1
    if frames != below:
        if not getattr(params, "num_frames_round_down", False):
            raise InvalidRequest(
                "num_frames",
                asked,
                f"must be a multiple of {multiple} and one more for this model; try {below} or "
                f"{below + multiple}, or num_frames_round_down",
            )
        warnings = [f"num_frames={asked} was rounded down to {below}, which the model can make"]
        frames = below
    height, width = params.height or 0, params.width or 0
    if frames * height * width > config.max_video_pixels:
        most = config.max_video_pixels // (height * width)
        raise InvalidRequest(
            "num_frames*height*width",
            f"{frames}x{height}x{width}",
            f"is more than this model's max_video_pixels={config.max_video_pixels}; at this size "
            f"that is {most} frames. Ask for less, or raise pipeline_config.max_video_pixels",
        )
    return frames, warnings


def _check_text_length(params: SamplingParams, config: PipelineConfig) -> None:
    length = params.max_sequence_length
    limits = [
        c.max_length_limit for c in config.text_encoder_configs if c.max_length_limit is not None
    ]
    if length is not None and limits and length > min(limits):
        raise InvalidRequest(
            "max_sequence_length", length, f"this model's text encoder takes at most {min(limits)}"
        )


def _seeds(params: SamplingParams, images: int) -> list[int]:
    """One seed an image. A list must have one for each; a single one counts up from the first."""
    if isinstance(params.seed, (list, tuple)):
        if len(params.seed) != images:
            raise InvalidRequest(
                "seed",
                params.seed,
                f"has {len(params.seed)} seeds for {images} images; give one seed, or one an image",
            )
        return [_draw_seed() if seed == RANDOM_SEED else int(seed) for seed in params.seed]
    first = _draw_seed() if params.seed in (None, RANDOM_SEED) else int(params.seed)
    if first + images - 1 > MAX_SEED:
        raise InvalidRequest(
            "seed", first, f"leaves no room for {images} images below {MAX_SEED}; use a smaller one"
        )
    return [first + index for index in range(images)]


def _draw_seed() -> int:
    """A seed that people can copy by hand: 32 bits."""
    return secrets.randbits(32)


def _guidance(params: SamplingParams, config: PipelineConfig) -> tuple[float | None, list[str]]:
    """The scale of classifier-free guidance, None where it is off; and what the caller should know.

    It is off at 1 (within rounding), where the second forward would be paid for nothing.
    """
    if config.opaque:
        return None, []
    name = "true_cfg_scale"
    if params.true_cfg_scale is None and config.should_use_guidance:
        name = "guidance_scale"
    value = getattr(params, name)
    on = value is not None and value > 1.0 + 1e-6
    warnings = []
    if on and params.negative_prompt is None and name == "true_cfg_scale":
        warnings.append(
            f"{name}={value} has no effect without a negative_prompt (which may be empty)"
        )
    if not on and value is not None and value < 1.0 - 1e-6 and name == "true_cfg_scale":
        warnings.append(f"{name}={value} has no effect: it must be above 1")
    if params.negative_prompt and not on and _was_set(params, "negative_prompt"):
        warnings.append(f"negative_prompt has no effect unless {name} is above 1")
    embedded = config.dit_config.guidance_embeds
    if not (embedded or config.should_use_guidance) and _was_set(params, "guidance_scale"):
        guides = (
            f"true_cfg_scale={value} is what guides it"
            if on and params.negative_prompt is not None
            else "use true_cfg_scale with a negative_prompt"
        )
        warnings.append(
            f"guidance_scale={params.guidance_scale} has no effect: this checkpoint takes no "
            f"guidance; {guides}"
        )
    guided = on and params.negative_prompt is not None
    return (float(value) if guided and value is not None else None), warnings


def _was_set(params: SamplingParams, name: str) -> bool:
    """Whether a value differs from the family's default."""
    default = next(f.default for f in fields(params) if f.name == name)
    return getattr(params, name) != default
