"""Multipart bodies of image edits: fields checked, pictures stored under names of our own."""

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
from sglang.multimodal_gen.runtime.entrypoints.http.image_fetch import ImageFetcher
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import ImageSettings
from sglang.multimodal_gen.runtime.entrypoints.http.json_edit import read_json_edit
from sglang.multimodal_gen.runtime.managers.client_error import ClientError
from sglang.multimodal_gen.runtime.server_args.guard_section import FetchArgs
from sglang.multimodal_gen.runtime.server_args.serving import LimitArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, OutputError
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image

_IMAGE_FIELDS = ("image", "image[]", "url", "url[]")
_LISTS = {"lora[]": "lora", "seed[]": "seed"}
_MAX_FIELDS = 64
_COPY_BYTES = 2**20


@dataclass(eq=False)
class Upload:
    """The fields and pictures of one body; `close` removes the pictures.

    ``sizes`` are (width, height), in the order of ``images``.
    """

    settings: ImageSettings
    folder: Path
    images: list[Path] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    mask: Path | None = None

    def close(self) -> None:
        """Remove the pictures; any thread may, once nobody reads them."""
        shutil.rmtree(self.folder, ignore_errors=True)


async def read_upload(request: Request, limits: LimitArgs, fetch: FetchArgs) -> Upload:
    """The body of an edit, a form or JSON, checked; the caller closes it.

    Raises:
        ApiError: another content type, a bad field, or a picture that cannot be used.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    fetcher = ImageFetcher(fetch)
    if kind == "application/json":
        settings, sources, masks = read_json_edit(await request.body())
        return await _stored(settings, sources, masks, limits, fetcher)
    if kind != "multipart/form-data":
        message = "send multipart/form-data with the file field 'image', or JSON"
        raise ApiError(ClientError(415, message, code="unsupported_media"))
    most = limits.max_input_images
    async with request.form(
        max_files=most + 2, max_fields=_MAX_FIELDS + most, max_part_size=2**20
    ) as form:
        images = [part for name, part in form.multi_items() if name in _IMAGE_FIELDS and part != ""]
        masks = [part for part in form.getlist("mask") if part != ""]
        return await _stored(_settings(form), images, masks, limits, fetcher)


async def _stored(
    settings: ImageSettings,
    images: Sequence[UploadFile | str],
    masks: Sequence[UploadFile | str],
    limits: LimitArgs,
    fetcher: ImageFetcher,
) -> Upload:
    upload = Upload(settings, await run_in_threadpool(_private_folder))
    try:
        await _store_images(images, masks, upload, limits, fetcher)
    except BaseException:
        upload.close()
        raise
    return upload


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="sglang-upload-"))
    except OSError as error:
        raise OutputError(f"no place for uploads ({error.strerror})") from error


def _settings(form: FormData) -> ImageSettings:
    """The text fields as settings; an empty text is the same as leaving the field out."""
    values: dict[str, Any] = {}
    for name in form:
        if name in (*_IMAGE_FIELDS, "mask"):
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
        if own in ImageSettings.model_fields:
            values[own] = given if name in _LISTS or len(given) > 1 else given[0]
        else:
            values[own] = _json_or_text(given[0])
    try:
        return ImageSettings.model_validate(values, strict=False)
    except ValidationError as error:
        raise ApiError(of_validation(error.errors()[0])) from error  # type: ignore[arg-type]


def _json_or_text(text: str) -> Any:
    """A family's own field: numbers and lists as JSON writes them, all else as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


async def _store_images(
    given: Sequence[UploadFile | str],
    masks: Sequence[UploadFile | str],
    upload: Upload,
    limits: LimitArgs,
    fetcher: ImageFetcher,
) -> None:
    if not given:
        raise invalid("image", "image: is missing; upload one or more pictures")
    if len(given) > limits.max_input_images:
        count = f"{len(given)} pictures"
        raise invalid("image", f"image: {count}; at most {limits.max_input_images} are taken")
    if len(masks) > 1:
        raise invalid("mask", "mask: is given twice")
    for index, part in enumerate(given):
        place = upload.folder / f"image-{index}"
        upload.sizes.append(await _store(part, place, "image", limits, fetcher))
        upload.images.append(place)
    for part in masks:
        place = upload.folder / "mask"
        if await _store(part, place, "mask", limits, fetcher) != upload.sizes[0]:
            raise invalid("mask", "mask: must have the size of the first image")
        upload.mask = place


async def _store(
    part: UploadFile | str, place: Path, param: str, limits: LimitArgs, fetcher: ImageFetcher
) -> tuple[int, int]:
    """Write a picture to ``place``, make sure that it can be used, and return its size."""
    if isinstance(part, str):
        await fetcher.fetch(part, place, param)
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
