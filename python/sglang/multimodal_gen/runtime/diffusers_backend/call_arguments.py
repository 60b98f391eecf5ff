"""From a request to the arguments of a Diffusers call: what was set is passed, nothing else."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams, is_blank
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import OURS, CallSignature
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

PARAMETER_OF: Mapping[str, str] = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "height": "height",
    "width": "width",
    "num_inference_steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "max_sequence_length": "max_sequence_length",
    "image_path": "image",
    "seed": "generator",
}
"""Sampling field -> the parameter that it fills."""

_FIELD_OF = {parameter: name for name, parameter in PARAMETER_OF.items()} | {
    "num_images_per_prompt": "num_outputs_per_prompt"
}
_TEXT = re.compile(r"(negative_)?prompt(_\d+)?")


def check_call(params: SamplingParams, signature: CallSignature) -> None:
    """Refuse settings that the pipeline does not take: none is ever dropped.

    Raises:
        InvalidRequest: names the nearest parameter, and those that there are.
    """
    extra = extra_arguments(params)
    for name, parameter in PARAMETER_OF.items():
        value = getattr(params, name)
        if value is not None and parameter not in signature:
            raise InvalidRequest(name, value, signature.refusal(parameter))
    for name, value in extra.items():
        if name in OURS:
            raise InvalidRequest(f"diffusers_kwargs.{name}", value, "the runtime sets this one")
        if name in _FIELD_OF:
            problem = f"set the sampling field {_FIELD_OF[name]} instead"
            raise InvalidRequest(f"diffusers_kwargs.{name}", value, problem)
        if name not in signature:
            raise InvalidRequest(f"diffusers_kwargs.{name}", value, signature.refusal(name))
    if "prompt" in signature and "prompt_embeds" not in extra:
        _check_prompts(params.prompts)
    for name in signature.required:
        field_name = _FIELD_OF.get(name, f"diffusers_kwargs.{name}")
        given = name in extra or getattr(params, field_name, None) is not None
        if not given and name not in OURS and field_name != "seed":
            raise InvalidRequest(field_name, None, f"{signature.class_name} needs it")


def _check_prompts(prompts: Sequence[str]) -> None:
    if not prompts:
        raise InvalidRequest("prompt", None, "is missing; say what to make")
    for prompt in prompts:
        if is_blank(prompt):
            raise InvalidRequest("prompt", prompt, "is empty; say what to make")


def calls_of(batch: Req, signature: CallSignature) -> list[dict[str, Any]]:
    """The calls that make a batch's images, in order.

    One for all, if the call can tell images apart; one for each where it has input images (which
    pipelines repeat in different ways) or no prompts.
    """
    together = bool(batch.request.prompts) and not batch.condition_image
    counted = "batch_size" in signature and not batch.request.prompts
    if together or counted or batch.batch_size == 1:
        return [_call(batch, signature, range(batch.batch_size))]
    return [_call(batch, signature, range(i, i + 1)) for i in range(batch.batch_size)]


def _call(batch: Req, signature: CallSignature, images: Sequence[int]) -> dict[str, Any]:
    params = batch.request
    arguments: dict[str, Any] = {}
    for name in ("height", "width", "num_inference_steps", "guidance_scale", "true_cfg_scale",
                 "max_sequence_length"):  # fmt: skip
        value = getattr(params, name)
        if value is not None:
            arguments[PARAMETER_OF[name]] = value
    if params.prompts:
        arguments["prompt"] = [batch.prompt[i] for i in images]
    elif "batch_size" in signature:
        arguments["batch_size"] = len(images)
    if params.negative_prompt is not None:
        arguments["negative_prompt"] = params.negative_prompt
    # A copy: what a pipeline does to its arguments must not reach the next call.
    arguments |= copy.deepcopy(extra_arguments(params))
    for name, value in arguments.items():
        if _TEXT.fullmatch(name) and isinstance(value, str) and len(images) > 1:
            arguments[name] = [value] * len(images)
    if "generator" in signature:
        arguments["generator"] = [batch.generator[i] for i in images]
    if batch.condition_image:
        given = batch.condition_image
        arguments["image"] = given[0] if len(given) == 1 else given
    if len(images) == 1:  # as its users call it: some pipelines take no lists
        for name in {"prompt", "generator"} & arguments.keys():
            (arguments[name],) = arguments[name]
    return arguments


def refused_field(message: str, arguments: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The sampling field that a pipeline's own message is about, with its value."""
    for parameter, value in arguments.items():
        if re.search(rf"\b{re.escape(parameter)}\b", message):
            return _FIELD_OF.get(parameter, f"diffusers_kwargs.{parameter}"), value
    return None


def extra_arguments(params: SamplingParams) -> Mapping[str, Any]:
    """The call arguments that a request passes through to the pipeline."""
    return getattr(params, "diffusers_kwargs", None) or {}
