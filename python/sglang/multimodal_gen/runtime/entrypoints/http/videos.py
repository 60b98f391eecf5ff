"""``/v1/videos``: OpenAI's video routes. A request makes a job; its file is fetched later."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context, context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import (
    ApiError,
    invalid,
    not_found,
    of_validation,
)
from sglang.multimodal_gen.runtime.entrypoints.http.image_upload import (
    FormShape,
    Upload,
    read_named,
    read_upload,
)
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.entrypoints.http.ranges import ranged_response
from sglang.multimodal_gen.runtime.entrypoints.http.request_headers import (
    PARAMETERS,
    idempotency_key,
)
from sglang.multimodal_gen.runtime.entrypoints.http.video_schemas import (
    EXAMPLE,
    KIND,
    VideoDeleted,
    VideoList,
    VideoObject,
    VideoSettings,
    video_object,
)
from sglang.multimodal_gen.runtime.entrypoints.http.video_work import VideoWork
from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey, JobRecord
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.managers.visit import current_visit, may_see
from sglang.multimodal_gen.runtime.utils.errors import Unavailable

router = APIRouter(prefix="/v1/videos", tags=["videos"])

FORM = FormShape(
    VideoSettings,
    images=(
        "input_reference",
        "input_reference[]",
        "input_reference[image_url]",
        "input_reference[file_id]",
        "image",
        "image[]",
    ),
    videos=("video", "video_reference"),
)

_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {"description": "The part of it that the Range header asks for."},
    416: {"description": "The Range header asks for what is not there."},
}


def _create_body() -> dict[str, Any]:
    """The body's schema, as JSON and as a form with files."""
    schema = VideoSettings.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    reference = {"type": "string", "format": "binary"}
    properties = dict(schema["properties"])
    properties["input_reference"] = {**reference, "description": "A first picture."}
    properties["video"] = {**reference, "description": "An input video."}
    plain = {k: v for k, v in schema["properties"].items() if k != "input_reference"}
    plain["input_reference"] = {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"image_url": {"type": "string"}}},
            {"type": "null"},
        ]
    }
    content = {
        "application/json": {"schema": {**schema, "properties": plain}},
        "multipart/form-data": {
            "schema": {**schema, "title": "VideoForm", "properties": properties}
        },
    }
    return {"requestBody": {"required": True, "content": content}}


@router.post(
    "",
    response_model=VideoObject,
    responses=example_reply({**EXAMPLE, "status": "queued", "progress": 0})
    | error_replies(400, 404, 413, 415, 422, 429, 503, 507),
    openapi_extra=_create_body() | {"parameters": PARAMETERS},
)
async def create_video(request: Request) -> VideoObject:
    """Begin to make a video; the reply comes at once, with the id to ask for it."""
    context = context_of(request)
    context.service_for(None, DataType.VIDEO)  # nothing is stored for one that cannot be served
    upload = await _read(request, context)
    assert isinstance(upload.settings, VideoSettings)
    work = VideoWork(context, upload.settings, upload.images, upload.videos)
    work.cleanup = upload.close
    try:
        work.key = await run_in_threadpool(_key, request, upload)
        job = await run_in_threadpool(work.submit)
    finally:
        if work.cleanup is not None:  # no job took it over
            upload.close()
    return _shown(job.record)


@router.get(
    "",
    responses=example_reply(
        {
            "object": "list",
            "data": [EXAMPLE],
            "first_id": EXAMPLE["id"],
            "last_id": EXAMPLE["id"],
            "has_more": False,
        }
    )
    | error_replies(400, 404, 503),
)
async def list_videos(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="Videos on a page.")] = 20,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By age.")] = "desc",
) -> VideoList:
    """The videos of this server, newest first unless asked otherwise."""
    service = _service(context_of(request))
    if after is not None:
        await run_in_threadpool(_record, service, after, param="after")
    visit = current_visit()
    client = None if visit is None or visit.sees_all else visit.client
    records = await run_in_threadpool(
        service.jobs.list,
        kind=KIND,
        limit=limit + 1,
        newest_first=order == "desc",
        after=after,
        client=client,
    )
    page = [_shown(record) for record in records[:limit]]
    return VideoList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(records) > limit,
    )


@router.get("/{video_id}", responses=example_reply(EXAMPLE) | error_replies(404, 503))
async def get_video(request: Request, video_id: str) -> VideoObject:
    """The state of a video."""
    return _shown(await run_in_threadpool(_record, _service(context_of(request)), video_id))


@router.delete(
    "/{video_id}",
    responses=example_reply({"id": EXAMPLE["id"], "object": "video.deleted", "deleted": True})
    | error_replies(404, 503),
)
async def delete_video(request: Request, video_id: str) -> VideoDeleted:
    """Stop it if it is not done, and forget it and its files."""
    service = _service(context_of(request))
    await run_in_threadpool(_record, service, video_id)
    await run_in_threadpool(service.delete, video_id)
    return VideoDeleted(id=video_id)


@router.get(
    "/{video_id}/content",
    response_class=Response,
    responses=_FILE | error_replies(400, 404, 503),
)
async def get_content(
    request: Request,
    video_id: str,
    variant: Annotated[
        Literal["video", "thumbnail", "spritesheet"],
        Query(description="The video, or a small picture of its first frame."),
    ] = "video",
    index: Annotated[int, Query(ge=0, le=1000, description="Which, where n is above 1.")] = 0,
) -> Response:
    """The file of a completed video, until it expires."""
    context = context_of(request)
    record = await run_in_threadpool(_record, _service(context), video_id)
    result = _finished_result(record, index)
    if variant == "spritesheet":
        raise invalid("variant", "variant: this server makes no spritesheets; it has thumbnails")
    file_id = result["thumbnail_id" if variant == "thumbnail" else "file_id"]
    store = context.files
    known = None if store is None else await run_in_threadpool(store.get, file_id)
    data = None if store is None else await run_in_threadpool(store.read, file_id)
    if known is None or data is None:
        raise not_found("the video's file has expired", code="video_expired")
    left = max(0, int(known.expires_at - time.time()))
    suffix = known.media_type.partition("/")[2]
    headers = {
        "cache-control": f"private, max-age={left}",
        "content-disposition": f'inline; filename="{record.id}-{index}.{suffix}"',
        "x-content-type-options": "nosniff",
    }
    return ranged_response(request, data, known.media_type, file_id, headers)


def _key(request: Request, upload: Upload) -> IdempotencyKey | None:
    """What the client calls this request, and what it asks for under that name."""
    asked = upload.settings.model_dump(exclude_none=True)
    files = (path.read_bytes() for path in (*upload.images, *upload.videos))
    return idempotency_key(request, asked, files)


async def _read(request: Request, context: Context) -> Upload:
    """The body, in either of its forms; the caller closes it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    limits = context.args.limits
    if kind == "multipart/form-data":
        return await read_upload(request, limits, context.args.fetch, FORM)
    if kind not in ("application/json", ""):
        raise invalid(None, "send application/json or multipart/form-data")
    try:
        settings = VideoSettings.model_validate_json(await request.body())
    except ValidationError as error:
        raise ApiError(of_validation(error.errors()[0])) from error  # type: ignore[arg-type]
    address = settings.reference_address
    addresses = [] if address is None else [address]
    return await read_named(settings, addresses, limits, context.args.fetch, FORM)


def _service(context: Context) -> GenerationService:
    service = context.lifecycle.opened
    if service is None:
        raise Unavailable("the model is loading")
    return service


def _record(service: GenerationService, video_id: str, param: str | None = None) -> JobRecord:
    record = service.jobs.get(video_id)
    if record is None or record.kind != KIND or not may_see(record.client):
        raise not_found("there is no such video on this server, or it has expired", param=param)
    return record


def _finished_result(record: JobRecord, index: int) -> dict[str, Any]:
    """What is known about a video that can be fetched."""
    status = _shown(record).status
    if status in ("queued", "in_progress"):
        raise not_found(f"the video is {status}; ask again later", code="video_not_ready")
    if status != "completed":
        raise not_found(f"the video has no file: it is {status}", code=f"video_{status}")
    if index >= len(record.results):
        made = len(record.results)
        raise not_found(f"index={index}: the request made {made} video(s)", param="index")
    return dict(record.results[index])


def _shown(record: JobRecord) -> VideoObject:
    return video_object(record, time.time())
