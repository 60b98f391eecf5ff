"""Multipart bodies: fields checked, pictures and videos stored under names of our own."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from sglang.multimodal_gen.runtime.entrypoints.http.errors import (
    ApiError,
    invalid,
    of_validation,
)
from sglang.multimodal_gen.runtime.entrypoints.http.image_fetch import fetch_image
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import (
    GenerationSettings,
)
from sglang.multimodal_gen.runtime.managers.client_error import ClientError
from sglang.multimodal_gen.runtime.server_args.serving import LimitArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, OutputError
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image
from sglang.multimodal_gen.runtime.utils.video_file import load_input_video

_LISTS = {"lora[]": "lora", "seed[]": "seed"}
_MAX_FIELDS = 64
_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FormShape:
    """What a route's form has: the fields' class, and the names of those that carry files.

    Under the names of ``images`` a video counts as one of ``videos``, where there are any;
    ``required`` is whether a picture must be there.
    """

    settings: type[GenerationSettings]
    images: tuple[str, ...]
    videos: tuple[str, ...] = ()
    mask: str | None = None
    required: bool = False

    @property
    def files(self) -> frozenset[str | None]:
        """All fields that carry files."""
        return frozenset((*self.images, *self.videos, self.mask))


@dataclass(eq=False)
class Upload:
    """The fields and files of one body; `close` removes the files.

    ``sizes`` are (width, height), in the order of ``images``.
    """

    settings: GenerationSettings
    folder: Path
    images: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    mask: Path | None = None

    def close(self) -> None:
        """Remove the files; any thread may, once nobody reads them."""
        shutil.rmtree(self.folder, ignore_errors=True)


async def read_upload(request: Request, limits: LimitArgs, shape: FormShape) -> Upload:
    """A multipart body, checked; the caller closes it.

    Raises:
        ApiError: another content type, a bad field, or a file that cannot be used.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        message = f"send multipart/form-data with the file field {shape.images[0]!r}"
        raise ApiError(ClientError(415, message, code="unsupported_media"))
    most = limits.max_input_images
    async with request.form(
        max_files=most + 2, max_fields=_MAX_FIELDS + most, max_part_size=2**20
    ) as form:
        settings = _settings(form, shape)
        upload = Upload(settings, await run_in_threadpool(_private_folder))
        try:
            given = [part for name, part in form.multi_items() if name in shape.images and part]
            await _store_images(given, upload, limits, shape)
            await _store_videos(form, upload, limits, shape)
            await _store_mask(form, upload, limits, shape)
        except BaseException:
            upload.close()
            raise
        return upload


async def read_named(
    settings: GenerationSettings, addresses: Sequence[str], limits: LimitArgs, shape: FormShape
) -> Upload:
    """A body without files, whose pictures are named by their addresses; the caller closes it.

    Raises:
        ApiError: one may not be fetched, or cannot be used.
    """
    upload = Upload(settings, await run_in_threadpool(_private_folder))
    try:
        await _store_images(list(addresses), upload, limits, shape)
    except BaseException:
        upload.close()
        raise
    return upload


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="sglang-upload-"))
    except OSError as error:
        raise OutputError(f"no place for uploads ({error.strerror})") from error


def _settings(form: FormData, shape: FormShape) -> GenerationSettings:
    """The text fields as settings; an empty text is the same as leaving the field out."""
    values: dict[str, Any] = {}
    for name in form:
        if name in shape.files:
            continue
        texts = form.getlist(name)
        if any(not isinstance(text, str) for text in texts):
            raise invalid(name, f"{name}: takes text, not a file")
        given = [text for text in texts if isinstance(text, str) and text != ""]
        if not given:
            continue
        own = _LISTS.get(name, name)
        if len(given) > 1 and own not in _LISTS.values():
            raise invalid(name, f"{name}: is given {len(given)} times")
        if own in shape.settings.model_fields:
            values[own] = given if name in _LISTS or len(given) > 1 else given[0]
        else:
            values[own] = _json_or_text(given[0])
    try:
        return shape.settings.model_validate(values, strict=False)
    except ValidationError as error:
        raise ApiError(of_validation(error.errors()[0])) from error  # type: ignore[arg-type]


def _json_or_text(text: str) -> Any:
    """A family's own field: numbers and lists as JSON writes them, all else as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


async def _store_images(
    given: Sequence[UploadFile | str], upload: Upload, limits: LimitArgs, shape: FormShape
) -> None:
    name = shape.images[0]
    if not given and shape.required:
        raise invalid(name, f"{name}: is missing; upload one or more pictures")
    if len(given) > limits.max_input_images:
        count = f"{len(given)} pictures"
        raise invalid(name, f"{name}: {count}; at most {limits.max_input_images} are taken")
    for index, part in enumerate(given):
        if shape.videos and _is_video(part):
            upload.videos.append(await _store_video(part, upload, name, limits))
            continue
        place = upload.folder / f"image-{index}"
        upload.sizes.append(await _store(part, place, name, limits))
        upload.images.append(place)


async def _store_videos(
    form: FormData, upload: Upload, limits: LimitArgs, shape: FormShape
) -> None:
    for name, part in form.multi_items():
        if name in shape.videos and part:
            upload.videos.append(await _store_video(part, upload, name, limits))
    if len(upload.videos) > 1:
        raise invalid("video", "video: is given twice")


async def _store_mask(form: FormData, upload: Upload, limits: LimitArgs, shape: FormShape) -> None:
    masks = [] if shape.mask is None else [part for part in form.getlist(shape.mask) if part]
    if len(masks) > 1:
        raise invalid("mask", "mask: is given twice")
    for part in masks:
        place = upload.folder / "mask"
        if await _store(part, place, "mask", limits) != upload.sizes[0]:
            raise invalid("mask", "mask: must have the size of the first image")
        upload.mask = place


def _is_video(part: UploadFile | str) -> bool:
    return isinstance(part, UploadFile) and (part.content_type or "").startswith("video/")


async def _store_video(
    part: UploadFile | str, upload: Upload, param: str, limits: LimitArgs
) -> Path:
    """Write a video to a place of its own, and make sure that it can be used."""
    place = upload.folder / f"video-{len(upload.videos)}"
    if isinstance(part, str):
        await fetch_image(part, place, param)
    else:
        await run_in_threadpool(_copy, part, place)
    most = limits.max_input_video_pixels
    try:
        await run_in_threadpool(load_input_video, place, max_pixels=most)
    except InvalidRequest as error:
        raise invalid(param, f"{param}: {error.problem}", code="invalid_video") from error
    return place


async def _store(
    part: UploadFile | str, place: Path, param: str, limits: LimitArgs
) -> tuple[int, int]:
    """Write a picture to ``place``, make sure that it can be used, and return its size."""
    if isinstance(part, str):
        await fetch_image(part, place, param)
    else:
        await run_in_threadpool(_copy, part, place)
    try:
        return await run_in_threadpool(_size_of, place, limits.max_input_pixels)
    except InvalidRequest as error:
        raise invalid(param, f"{param}: {error.problem}", code="invalid_image") from error


def _copy(part: UploadFile, place: Path) -> None:
    try:
        with place.open("xb") as file:
            part.file.seek(0)
            shutil.copyfileobj(part.file, file, _COPY_BYTES)
    except OSError as error:
        raise OutputError(f"an upload could not be stored ({error.strerror})") from error


def _size_of(place: Path, max_pixels: int) -> tuple[int, int]:
    return load_input_image(place, max_pixels=max_pixels).size
