"""One image request on its way: from settings to a job, from a job to a reply or a stream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.errors import of_diffusion_error
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import (
    ImageData,
    ImageReply,
    ImageSettings,
)
from sglang.multimodal_gen.runtime.entrypoints.http.request_checks import (
    check_limits,
    in_the_clients_words,
)
from sglang.multimodal_gen.runtime.managers.finished import FinishedImage
from sglang.multimodal_gen.runtime.managers.service import (
    FinishedJob,
    GenerationService,
    Job,
    WorkOrder,
)
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError, InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import (
    DEFAULT_QUALITY,
    FORMATS,
    ImageMetadata,
    encode_image,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview

KEEP_ALIVE_SECONDS = 15.0


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

    async def answer(self) -> ImageReply | StreamingResponse:
        """Check, run, and answer; whoever goes away before the end stops the work.

        Raises:
            ApiError, DiffusionError: before anything was sent.
        """
        if self.settings.stream:
            return self._stream()
        job = self._submit(None)
        finished = await result_or_gone(job, self.request)
        files = await run_in_threadpool(self._encode_all, finished)
        return self._reply(finished, files)

    def _submit(self, on_preview: Callable[[Preview], None] | None) -> Job:
        settings = self.settings
        service = self.context.service_for(settings.model, DataType.IMAGE)
        settings.check_wire()
        if settings.response_format == "url":
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

    def _encode_all(self, finished: FinishedJob) -> list[bytes]:
        return [self._encode_one(finished, image) for image in finished.images]

    def _encode_one(self, finished: FinishedJob, image: FinishedImage) -> bytes:
        name = self.context.lifecycle.opened.served_name  # type: ignore[union-attr]
        about = ImageMetadata(image.prompt, image.seed, name, finished.settings)
        return self._encode(image.array, about)

    # A whole reply.

    def _reply(self, finished: FinishedJob, files: list[bytes]) -> ImageReply:
        data = [
            ImageData(seed=image.seed, **self._carried(finished.id, index, file))
            for index, (image, file) in enumerate(zip(finished.images, files, strict=True))
        ]
        service = self.context.lifecycle.opened
        assert service is not None
        return ImageReply(
            id=finished.id,
            created=int(time.time()),
            model=service.served_name,
            data=data,
            size=_size(finished.images[0].array),
            output_format=self._format,  # type: ignore[arg-type]
            warnings=[*self.settings.warnings(), *finished.warnings],
            seconds={
                "queue": round(finished.queue_seconds, 4),
                "run": round(finished.run_seconds, 4),
            },
        )

    def _carried(self, job_id: str, index: int, file: bytes) -> dict[str, str]:
        """The file itself, or a link to it."""
        if self.settings.response_format != "url":
            return {"b64_json": base64.b64encode(file).decode("ascii")}
        store = self.context.file_store()
        expires = time.time() + self.context.args.keep.file_ttl
        kept = store.put(file, f"image/{self._format}", f".{self._format}", expires)
        return {"url": f"{self.context.base_url(self.request)}/v1/files/{kept.id}"}

    # A stream.

    def _stream(self) -> StreamingResponse:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Preview | None] = asyncio.Queue()

        def tell(event: Preview | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = self._submit(tell)
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
            job.cancel()  # does nothing to a job that ended

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
        warnings = [*self.settings.warnings(), *finished.warnings]
        for index, image in enumerate(finished.images):
            file = await run_in_threadpool(self._encode_one, finished, image)
            yield self._event(
                "completed",
                image.array,
                file,
                image_index=index,
                seed=image.seed,
                warnings=warnings,
                id=finished.id,
            )

    def _event(self, name: str, array: np.ndarray, file: bytes, **more: Any) -> str:
        kind = f"{self.kind}.{name}"
        data = {
            "type": kind,
            "b64_json": base64.b64encode(file).decode("ascii"),
            "created_at": int(time.time()),
            "size": _size(array),
            "background": "opaque",
            "output_format": self._format,
            **more,
        }
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


async def result_or_gone(job: Job, request: Request) -> FinishedJob:
    """What a job made. If the client goes away, or this task is cancelled, the job is stopped.

    Raises:
        DiffusionError: the job failed or was stopped.
    """
    done: Awaitable[FinishedJob] = asyncio.wrap_future(job.result)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        job.cancel()  # does nothing to a job that ended
    return await done


async def disconnected(request: Request) -> None:
    """Return when the client has gone; for requests whose body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _size(array: np.ndarray) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"
