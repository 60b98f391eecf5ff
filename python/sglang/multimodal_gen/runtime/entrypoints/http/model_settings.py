"""What a model can be asked for, as a form needs it: settings, tasks, limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, Field

from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_INFERENCE_STEPS,
    SamplingParams,
)
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.server_args.flags import Flag, flags_of
from sglang.multimodal_gen.runtime.server_args.serving import LimitArgs

Kind = Literal["integer", "number", "boolean", "text", "choice", "json"]
Need = Literal["no", "may", "must"]
_KINDS: dict[Any, Kind] = {int: "integer", float: "number", bool: "boolean", str: "text"}


class SettingCard(BaseModel):
    """One sampling setting of the model; ``default`` is the checkpoint's, or else the family's."""

    name: str = Field(description="As in a request; `num_outputs_per_prompt` is `n` there.")
    kind: Kind
    default: Any = None
    help: str
    choices: list[str]


class TaskCard(BaseModel):
    """A task that the model serves: what comes out, and what goes in beside the text."""

    name: str
    makes: str
    image: Need
    video: Need


class ModelLimits(BaseModel):
    """The most that one request to this server may ask for or send."""

    images: int
    steps: int = MAX_INFERENCE_STEPS
    prompt_characters: int
    input_images: int
    input_pixels: int
    body_bytes: int


def settings_of(defaults: SamplingParams) -> list[SettingCard]:
    """The settings that a client may send, in the family's order."""
    return [
        SettingCard(
            name=spec.name,
            kind=_kind(spec),
            default=_writable(getattr(defaults, spec.name)),
            help=spec.help,
            choices=[str(getattr(choice, "name", choice)) for choice in spec.value.choices],
        )
        for spec in flags_of(type(defaults))
        if spec.name not in PATH_SETTINGS
    ]


def tasks_of(tasks: Iterable[ModelTaskType]) -> list[TaskCard]:
    """The tasks in the model's own order."""
    return [
        TaskCard(
            name=task.name,
            makes=task.data_type().name.lower(),
            image=_need(task.requires_image_input, task.accepts_image_input),
            video=_need(task.requires_video_input, task.accepts_video_input),
        )
        for task in tasks
    ]


def limits_of(limits: LimitArgs) -> ModelLimits:
    """The server's limits, as far as they concern a form."""
    return ModelLimits(
        images=limits.max_images_per_request,
        prompt_characters=limits.max_prompt_characters,
        input_images=limits.max_input_images,
        input_pixels=limits.max_input_pixels,
        body_bytes=int(limits.max_body_mb * 2**20),
    )


def _kind(spec: Flag) -> Kind:
    if spec.value.choices:
        return "choice"
    if spec.value.arity in ("many", "mapping"):
        return "json"
    return _KINDS.get(spec.value.item, "json")


def _need(required: bool, accepted: bool) -> Need:
    return "must" if required else "may" if accepted else "no"


def _writable(value: Any) -> Any:
    """A default as JSON has it: enum members by name, tuples as lists."""
    if isinstance(value, (DataType, ModelTaskType)):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_writable(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, dict)) else None
