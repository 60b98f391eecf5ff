"""``/v1/models``: what is served here, in OpenAI's words and with this runtime's facts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found
from sglang.multimodal_gen.runtime.entrypoints.http.model_settings import (
    ModelLimits,
    SettingCard,
    TaskCard,
    limits_of,
    settings_of,
    tasks_of,
)
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.server_args.serving import LimitArgs

router = APIRouter(prefix="/v1/models", tags=["models"])


class ModelCard(BaseModel):
    """A model: OpenAI's four fields, and what it can be asked for."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "sglang"
    task_type: str
    supported_task_types: list[str]
    accepts_images: bool
    pipeline_name: str
    backend: str
    precision: str
    size: str | None
    size_multiple: int | None
    max_pixels: int
    parameters: list[str]
    settings: list[SettingCard]
    tasks: list[TaskCard]
    accepts_mask: bool
    limits: ModelLimits


class ModelList(BaseModel):
    """All models of this server: one."""

    object: str = "list"
    data: list[ModelCard]


_EXAMPLE = {
    "id": "demo",
    "object": "model",
    "created": 1760000000,
    "owned_by": "sglang",
    "task_type": "T2I",
    "supported_task_types": ["T2I"],
    "accepts_images": False,
    "pipeline_name": "FamilyPipeline",
    "backend": "sglang",
    "precision": "fp32",
    "size": "128x128",
    "size_multiple": 16,
    "max_pixels": 16777216,
    "parameters": ["prompt", "negative_prompt", "seed"],
    "settings": [
        {
            "name": "num_inference_steps",
            "kind": "integer",
            "default": 20,
            "help": "Denoising steps.",
            "choices": [],
        }
    ],
    "tasks": [{"name": "T2I", "makes": "image", "image": "no", "video": "no"}],
    "accepts_mask": False,
    "limits": {
        "images": 10,
        "steps": 1000,
        "prompt_characters": 8000,
        "input_images": 16,
        "input_pixels": 67108864,
        "body_bytes": 67108864,
    },
}


@router.get(
    "", responses=example_reply({"object": "list", "data": [_EXAMPLE]}) | error_replies(503)
)
async def list_models(request: Request) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[_card(request)])


@router.get("/{name:path}", responses=example_reply(_EXAMPLE) | error_replies(404, 503))
async def get_model(request: Request, name: str) -> ModelCard:
    """One model."""
    card = _card(request)
    if name != card.id:
        message = f"the model {name[:100]!r} is not served here; this server has {card.id!r}"
        raise not_found(message, param="model", code="model_not_found")
    return card


def _card(request: Request) -> ModelCard:
    context = context_of(request)
    limits = context.args.limits
    return card_of(context.lifecycle.service, int(context.lifecycle.started_at), limits)


def card_of(service: GenerationService, created: int, limits: LimitArgs) -> ModelCard:
    """What is known about the served model."""
    model, config = service.model, service.model.config
    tasks = config.get_supported_task_types()
    defaults = model.info.sampling_param_cls.from_values(model.sampling_defaults)
    sized = defaults.width is not None and defaults.height is not None
    fields = model.info.sampling_param_cls.field_names()
    return ModelCard(
        id=service.served_name,
        created=created,
        task_type=config.task_type.name,
        supported_task_types=[task.name for task in tasks],
        accepts_images=any(task.accepts_image_input for task in tasks),
        pipeline_name=model.info.pipeline_cls.pipeline_name,
        backend=model.info.backend,
        precision=model.server_args.model.precision,
        size=f"{defaults.width}x{defaults.height}" if sized else None,
        size_multiple=None if config.opaque else config.size_multiple,
        max_pixels=config.max_pixels,
        parameters=[name for name in fields if name not in PATH_SETTINGS],
        settings=settings_of(defaults),
        tasks=tasks_of(tasks),
        accepts_mask="mask_path" in fields,
        limits=limits_of(limits),
    )
