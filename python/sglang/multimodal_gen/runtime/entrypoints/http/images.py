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
from sglang.multimodal_gen.runtime.entrypoints.http.jobs import JobReply
from sglang.multimodal_gen.runtime.entrypoints.http.json_edit import json_edit_schema
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies
from sglang.multimodal_gen.runtime.entrypoints.http.request_headers import PARAMETERS

router = APIRouter(prefix="/v1/images", tags=["images"])

FORM = FormShape(
    ImageSettings, images=("image", "image[]", "url", "url[]"), required=True, mask="mask"
)

_ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "With `Prefer: respond-async`: the job.", "model": JobReply}
}
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
                },
                "application/json": {"schema": json_edit_schema()},
            },
        }
    }


@router.post(
    "/generations",
    response_model=ImageReply,
    response_model_exclude_none=True,
    responses=_STREAM | _ACCEPTED | error_replies(400, 404, 409, 413, 422, 429, 500, 503, 504, 507),
    openapi_extra={"parameters": PARAMETERS},
)
async def generate(request: Request, body: ImageGeneration) -> Any:
    """Make pictures from a text."""
    return await ImageWork(context_of(request), request, body, "image_generation").answer()


@router.post(
    "/edits",
    response_model=ImageReply,
    response_model_exclude_none=True,
    responses=_STREAM
    | _ACCEPTED
    | error_replies(400, 404, 409, 413, 415, 422, 429, 500, 503, 504, 507),
    openapi_extra=_edit_body() | {"parameters": PARAMETERS},
)
async def edit(request: Request) -> Any:
    """Make pictures from a text and pictures, for models that take them."""
    context = context_of(request)
    context.service_for(None, DataType.IMAGE)  # nothing is stored for one that cannot be served
    upload = await read_upload(request, context.args.limits, context.args.fetch, FORM)
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
