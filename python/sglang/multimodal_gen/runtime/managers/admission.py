"""Where requests come in: every mistake of a caller ends here, with a message."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_SEED,
    RANDOM_SEED,
    SamplingParams,
    is_blank,
)
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest


def admit(
    params: SamplingParams,
    config: PipelineConfig,
    *,
    batching_max_size: int,
    control: RequestControl | None = None,
) -> list[Req]:
    """Turn settings into batches that the pipeline can run.

    The images of a request are its prompts in order, ``num_outputs_per_prompt`` of each; image k of
    the request has seed ``seed + k``. They are cut into batches of at most ``batching_max_size``.
    ``params`` is sealed.

    Raises:
        InvalidRequest: a setting does not fit the model; names field, value and remedy.
    """
    params.check()
    prompts = _prompts(params)
    task_type = _task_type(params, config)
    height, width = _size(params, config)
    _check_text_length(params, config)
    seeds = _seeds(params, len(prompts))
    params = replace(params, seed=seeds, task_type=task_type, height=height, width=width).seal()
    guided, warnings = _guidance(params, config)
    request_id = uuid.uuid4().hex
    control = RequestControl() if control is None else control
    return [
        Req(
            request=params,
            request_id=request_id,
            prompt=prompts[start : start + batching_max_size],
            negative_prompt=_negatives(params, len(prompts[start : start + batching_max_size])),
            seeds=seeds[start : start + batching_max_size],
            height=height,
            width=width,
            num_inference_steps=params.num_inference_steps,
            guidance_scale=float(params.guidance_scale),
            true_cfg_scale=float(1.0 if params.true_cfg_scale is None else params.true_cfg_scale),
            do_classifier_free_guidance=guided,
            max_sequence_length=params.max_sequence_length,
            image_path=_image_paths(params),
            task_type=task_type,
            data_type=task_type.data_type(),
            control=control,
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
    return [prompt for prompt in prompts for _ in range(params.num_outputs_per_prompt)]


def _negatives(params: SamplingParams, count: int) -> list[str] | None:
    return None if params.negative_prompt is None else [params.negative_prompt] * count


def _image_paths(params: SamplingParams) -> list[str]:
    paths = getattr(params, "image_path", None)
    if paths is None:
        return []
    return [paths] if isinstance(paths, str) else list(paths)


def _task_type(params: SamplingParams, config: PipelineConfig) -> ModelTaskType:
    return config.resolve_task_type(params.task_type, has_image=bool(_image_paths(params)))


def _size(params: SamplingParams, config: PipelineConfig) -> tuple[int, int]:
    """Height and width, checked before any tensor is made."""
    multiple = config.size_multiple
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
    height, width = params.height, params.width
    assert height is not None
    assert width is not None
    if height * width > config.max_pixels:
        raise InvalidRequest(
            "height*width",
            f"{height}x{width}",
            f"is more than this model's max_pixels={config.max_pixels}; ask for less, or raise "
            "pipeline_config.max_pixels",
        )
    return height, width


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
        return [_draw_seed() if seed == RANDOM_SEED else seed for seed in params.seed]
    first = _draw_seed() if params.seed in (None, RANDOM_SEED) else params.seed
    if first + images - 1 > MAX_SEED:
        raise InvalidRequest(
            "seed", first, f"leaves no room for {images} images below {MAX_SEED}; use a smaller one"
        )
    return [first + index for index in range(images)]


def _draw_seed() -> int:
    """A seed that people can copy by hand: 32 bits."""
    return secrets.randbits(32)


def _guidance(params: SamplingParams, config: PipelineConfig) -> tuple[bool, list[str]]:
    """Whether a second forward is needed, and what the caller should know about it."""
    scale = params.true_cfg_scale
    above_one = scale is not None and scale > 1.0 + 1e-6
    guided = above_one and params.negative_prompt is not None
    warnings = []
    if above_one and not guided:
        warnings.append(
            f"true_cfg_scale={scale} has no effect without a negative_prompt (which may be empty)"
        )
    if params.negative_prompt and not guided:
        warnings.append("negative_prompt has no effect unless true_cfg_scale is above 1")
    return guided, warnings
