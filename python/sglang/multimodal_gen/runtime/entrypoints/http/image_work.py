"""One image request on its way: from settings to a job, from a job to a reply or a stream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from anyio import CancelScope
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.connection import (
    KEEP_ALIVE_SECONDS,
    disconnected,
)
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.errors import (
    invalid,
    not_found,
    of_diffusion_error,
)
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import (
    ImageData,
    ImageReply,
    ImageSettings,
)
from sglang.multimodal_gen.runtime.entrypoints.http.jobs import accepted
from sglang.multimodal_gen.runtime.entrypoints.http.request_checks import (
    check_limits,
    in_the_clients_words,
)
from sglang.multimodal_gen.runtime.entrypoints.http.request_headers import (
    idempotency_key,
    wants_no_wait,
)
from sglang.multimodal_gen.runtime.managers.finished import FinishedImage
from sglang.multimodal_gen.runtime.managers.job_progress import FinishedJob
from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey
from sglang.multimodal_gen.runtime.managers.service import GenerationService, Job
from sglang.multimodal_gen.runtime.managers.work_order import WorkOrder
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, DiffusionError, InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import (
    DEFAULT_QUALITY,
    FORMATS,
    ImageMetadata,
    encode_image,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview


@dataclass(eq=False)
class ImageWork:
    """A request for pictures. ``kind`` begins the names of its events, as OpenAI has them."""

    context: Context
    request: Request
    settings: ImageSettings
    kind: str
    images: list[Path] = field(default_factory=list)
    mask: Path | None = None
    cleanup: Callable[[], None] | None = None
    key: IdempotencyKey | None = None

    async def answer(self) -> ImageReply | Response:
        """Check, run, and answer; whoever goes away before the end stops the work.

        A client that named its request, or prefers not to wait, can come back: its work goes on.

        Raises:
            ApiError, DiffusionError: before anything was sent.
        """
        if self.settings.stream:
            return await self._stream()
        await run_in_threadpool(self._find_key)
        job = await run_in_threadpool(self._submit, None)
        if wants_no_wait(self.request):
            return await run_in_threadpool(accepted, self._service, job.id)
        finished = await result_or_gone(job, self.request, stops=self.key is None)
        return await run_in_threadpool(self._reply, finished)

    def _find_key(self) -> None:
        """What the client calls this request, and what it asks for under that name."""
        if "idempotency-key" not in self.request.headers:
            return
        asked = self.settings.model_dump(exclude_none=True)
        places = [*self.images, *([] if self.mask is None else [self.mask])]
        files = (place.read_bytes() for place in places)
        self.key = idempotency_key(self.request, asked, files)

    def _submit(self, on_preview: Callable[[Preview], None] | None) -> Job:
        settings = self.settings
        service = self.context.service_for(settings.model, DataType.IMAGE)
        settings.check_wire()
        durable = self.key is not None or (wants_no_wait(self.request) and not settings.stream)
        kept = durable or settings.response_format == "url"
        if kept:
            self.context.file_store()
        try:
            check_limits(settings, self.context.args.limits)
            order = WorkOrder(
                kind=self.kind,
                settings=self._sampling(service),
                data_type=DataType.IMAGE,
                priority=0 if settings.priority is None else settings.priority,
                timeout=settings.timeout,
                previews=settings.partial_images or 0,
                keep=self._format if kept else None,
                keep_quality=settings.output_compression,
                durable=durable,
                webhook=self.context.webhook(settings.webhook_url),
                key=self.key,
                warnings=settings.warnings(),
            )
            job = service.submit(order, on_preview=on_preview)
        except InvalidRequest as error:
            raise in_the_clients_words(error, settings) from error
        if self.cleanup is not None:
            cleanup, self.cleanup = self.cleanup, None
            job.result.add_done_callback(lambda _: cleanup())
        return job

    def _sampling(self, service: GenerationService) -> dict[str, Any]:
        fields = service.model.info.sampling_param_cls.field_names()
        values = self.settings.sampling(fields)
        if self.images:
            if "image_path" not in fields:
                raise InvalidRequest("image_path", None, "the model takes no pictures")
            values["image_path"] = [str(path) for path in self.images]
        if self.mask is not None:
            if "mask_path" not in fields:
                raise InvalidRequest("mask_path", None, "the model takes no mask")
            values["mask_path"] = str(self.mask)
        return values

    # Pictures as files.

    @property
    def _format(self) -> str:
        return self.settings.output_format or "png"

    def _encode(self, array: np.ndarray, about: ImageMetadata | None) -> bytes:
        quality = self.settings.output_compression
        return encode_image(
            array,
            FORMATS[f".{self._format}"],
            quality=DEFAULT_QUALITY if quality is None else max(1, quality),
            metadata=about,
        )

    def _encode_one(self, finished: FinishedJob, image: FinishedImage) -> bytes:
        name = self.context.lifecycle.opened.served_name  # type: ignore[union-attr]
        about = ImageMetadata(image.prompt, image.seed, name, finished.settings)
        return self._encode(image.array, about)

    # A whole reply.

    def _reply(self, finished: FinishedJob) -> ImageReply:
        if self.key is None and self.settings.response_format != "url":
            arrays = [image.array for image in finished.images]
            files = [self._encode_one(finished, image) for image in finished.images]
            data = [
                ImageData(seed=image.seed, b64_json=_base64(file))
                for image, file in zip(finished.images, files, strict=True)
            ]
            size = _size(arrays[0])
        else:
            data = [self._kept(result) for result in finished.results]
            first = finished.results[0]
            size = f"{first['width']}x{first['height']}"
        return ImageReply(
            id=finished.id,
            created=int(time.time()),
            model=self._service.served_name,
            data=data,
            size=size,
            output_format=self._format,  # type: ignore[arg-type]
            warnings=list(finished.warnings),
            seconds={
                "queue": round(finished.queue_seconds, 4),
                "run": round(finished.run_seconds, 4),
            },
        )

    def _kept(self, result: Mapping[str, Any]) -> ImageData:
        """A picture of the file store: a link to it, or itself."""
        file_id = result["file_id"]
        store = self.context.file_store()
        if self.settings.response_format == "url":
            file = store.get(file_id)
            if file is None or file.expires_at <= time.time():
                raise not_found("the picture of this request is not stored any more")
            url = f"{self.context.base_url(self.request)}/v1/files/{file_id}"
            return ImageData(seed=result["seed"], url=url)
        data = store.read(file_id)
        if data is None:
            raise not_found("the picture of this request is not stored any more")
        return ImageData(seed=result["seed"], b64_json=_base64(data))

    @property
    def _service(self) -> GenerationService:
        service = self.context.lifecycle.opened
        assert service is not None
        return service

    # A stream.

    async def _stream(self) -> StreamingResponse:
        if "idempotency-key" in self.request.headers:
            message = "Idempotency-Key: a stream cannot be sent twice; leave out one of them"
            raise invalid("Idempotency-Key", message)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Preview | None] = asyncio.Queue()

        def tell(event: Preview | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = await run_in_threadpool(self._submit, tell)
        job.result.add_done_callback(lambda _: tell(None))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-job-id": job.id}
        body = self._events(job, events)
        return StreamingResponse(body, media_type="text/event-stream", headers=headers)

    async def _events(self, job: Job, queue: asyncio.Queue[Preview | None]) -> AsyncIterator[str]:
        gone = asyncio.ensure_future(disconnected(self.request))
        shown: Counter[int] = Counter()
        try:
            while True:
                waiting = asyncio.ensure_future(queue.get())
                await asyncio.wait(
                    {waiting, gone},
                    timeout=KEEP_ALIVE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    waiting.cancel()
                    return
                if not waiting.done():
                    waiting.cancel()
                    yield ": still at work\n\n"
                    continue
                preview = waiting.result()
                if preview is None:
                    break
                yield await self._partial(job, preview, shown)
            async for text in self._last_events(job.result):
                yield text
        finally:
            gone.cancel()
            with CancelScope(shield=True):  # the client may be gone, and this task cancelled
                await run_in_threadpool(job.cancel)  # does nothing to a job that ended

    async def _partial(self, job: Job, preview: Preview, shown: Counter[int]) -> str:
        file = await run_in_threadpool(self._encode, preview.pixels, None)
        index, shown[preview.image] = shown[preview.image], shown[preview.image] + 1
        return self._event(
            "partial_image",
            preview.pixels,
            file,
            partial_image_index=index,
            image_index=preview.image,
            step=preview.step,
            id=job.id,
        )

    async def _last_events(self, result: Future[FinishedJob]) -> AsyncIterator[str]:
        try:
            finished = result.result()
        except DiffusionError as error:
            told = of_diffusion_error(error)
            yield f"event: error\ndata: {json.dumps({'error': told.as_object()})}\n\n"
            return
        for index, image in enumerate(finished.images):
            file = await run_in_threadpool(self._encode_one, finished, image)
            yield self._event(
                "completed",
                image.array,
                file,
                image_index=index,
                seed=image.seed,
                warnings=list(finished.warnings),
                id=finished.id,
            )

    def _event(self, name: str, array: np.ndarray, file: bytes, **more: Any) -> str:
        kind = f"{self.kind}.{name}"
        data = {
            "type": kind,
            "b64_json": _base64(file),
            "created_at": int(time.time()),
            "size": _size(array),
            "background": "opaque",
            "output_format": self._format,
            **more,
        }
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


async def result_or_gone(job: Job, request: Request, *, stops: bool = True) -> FinishedJob:
    """What a job made. If the client goes away, or this task is cancelled, the job is stopped,
    unless ``stops`` is False.

    Raises:
        DiffusionError: the job failed or was stopped.
    """
    done: asyncio.Future[FinishedJob] = asyncio.wrap_future(job.result)
    done.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, if too late
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if stops:
            await run_in_threadpool(job.cancel)  # does nothing to a job that ended
    if not done.done():
        raise Cancelled("the client has gone")
    return await done


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


def _size(array: np.ndarray) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"
