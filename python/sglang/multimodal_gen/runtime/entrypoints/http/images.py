"""``/v1/images``: OpenAI's image routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import (
    ImageGeneration,
    ImageReply,
    ImageSettings,
)
from sglang.multimodal_gen.runtime.entrypoints.http.image_upload import FormShape, read_upload
from sglang.multimodal_gen.runtime.entrypoints.http.image_work import ImageWork
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies

router = APIRouter(prefix="/v1/images", tags=["images"])

FORM = FormShape(
    ImageSettings, images=("image", "image[]", "url", "url[]"), required=True, mask="mask"
)

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The pictures; with `stream`, server-sent events instead: "
        "`*.partial_image`, `*.completed`, and `error`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def _edit_body() -> dict[str, Any]:
    """The multipart body's schema: the settings, and the files."""
    schema = ImageSettings.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    picture = {"type": "string", "format": "binary"}
    schema["properties"] |= {
        "image": {
            "type": "array",
            "items": picture,
            "description": "Picture(s) to edit, in order.",
        },
        "image[]": {"type": "array", "items": picture, "description": "The same."},
        "mask": {**picture, "description": "For models that take one: of the first image's size."},
    }
    schema["title"] = "ImageEdit"
    return {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": schema,
                    "examples": {
                        "one picture": {
                            "value": {"image": "(binary)", "prompt": "the same at night", "n": 1}
                        }
                    },
                }
            },
        }
    }


@router.post(
    "/generations",
    response_model=ImageReply,
    response_model_exclude_none=True,
    responses=_STREAM | error_replies(400, 404, 409, 413, 429, 500, 503, 504, 507),
)
async def generate(request: Request, body: ImageGeneration) -> Any:
    """Make pictures from a text."""
    return await ImageWork(context_of(request), request, body, "image_generation").answer()


@router.post(
    "/edits",
    response_model=ImageReply,
    response_model_exclude_none=True,
    responses=_STREAM | error_replies(400, 404, 409, 413, 415, 429, 500, 503, 504, 507),
    openapi_extra=_edit_body(),
)
async def edit(request: Request) -> Any:
    """Make pictures from a text and pictures, for models that take them."""
    context = context_of(request)
    context.service_for(None, DataType.IMAGE)  # nothing is stored for one that cannot be served
    upload = await read_upload(request, context.args.limits, FORM)
    assert isinstance(upload.settings, ImageSettings)
    work = ImageWork(
        context,
        request,
        upload.settings,
        "image_edit",
        images=upload.images,
        mask=upload.mask,
        cleanup=upload.close,
    )
    try:
        return await work.answer()
    finally:
        if work.cleanup is not None:  # no job took it over
            upload.close()
