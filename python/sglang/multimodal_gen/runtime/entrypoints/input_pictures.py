"""Input pictures that a caller holds in memory or names by URL, as the files of a request."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import eight_bit

FIELD = "image_path"
_SHOWN = 40
_SCHEME = re.compile(r"(data:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


class InputPictures:
    """A folder of files for as long as the context is open; none is made where none is needed."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def __enter__(self) -> InputPictures:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.cleanup()

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling values in which pictures, bytes and URLs became paths.

        ``http`` and ``https`` are fetched by the rules of a server as it is by default: public
        addresses, a picture by its content type, 20 MiB, 10 s.

        Raises:
            InvalidRequest: a picture cannot be decoded, a ``data:`` URL holds no base64, or a URL
                may not be fetched or does not give a picture.
        """
        given = values.get(FIELD)
        if isinstance(given, (list, tuple)):
            return {**values, FIELD: [self._path(one) for one in given]}
        return dict(values) if given is None else {**values, FIELD: self._path(given)}

    def _path(self, given: Any) -> Any:
        if isinstance(given, Image.Image):
            path = self._new(".png")
            eight_bit(given, f"a {given.mode} picture", keep_alpha=True).save(path)
            return str(path)
        scheme = _SCHEME.match(given) if isinstance(given, str) else None
        if scheme is not None and scheme[1].lower() == "data:":
            given = _decoded(given)
        elif scheme is not None:
            path = self._new("")
            _fetch(given, path)
            return str(path)
        if isinstance(given, bytes):
            path = self._new("")
            path.write_bytes(given)
            return str(path)
        return given

    def _new(self, suffix: str) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sglang-pictures-")
        self._count += 1
        return Path(os.path.join(self._folder.name, f"{self._count}{suffix}"))


def _decoded(url: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        data = base64.b64decode(body, validate=True)
    except ValueError:  # binascii.Error is one; letters outside ASCII are another
        data = b""
    if not data or not head.lower().endswith(";base64"):
        problem = "is no picture in base64. Write data:image/png;base64,..."
        raise InvalidRequest(FIELD, url[:_SHOWN], problem)
    return data


def _fetch(url: str, place: Path) -> None:
    # A server's modules are read where a URL is given, not by every picture that is made.
    from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError
    from sglang.multimodal_gen.runtime.entrypoints.http.image_fetch import ImageFetcher
    from sglang.multimodal_gen.runtime.server_args.guard_section import FetchArgs

    fetcher = ImageFetcher(FetchArgs())
    # A thread of its own: the caller may have an event loop running (a notebook has).
    with ThreadPoolExecutor(1) as thread:
        fetched = thread.submit(lambda: asyncio.run(fetcher.fetch(url, place, FIELD)))
        try:
            fetched.result()
        except ApiError as error:
            problem = str(error).removeprefix(f"{FIELD}: ")
            raise InvalidRequest(FIELD, url[:_SHOWN], f"{problem}.") from error
