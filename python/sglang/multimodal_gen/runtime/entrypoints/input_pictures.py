"""Input pictures that a Python caller holds in memory, as the files that a request names."""

from __future__ import annotations

import base64
import binascii
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image, ImageOps

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

FIELD = "image_path"
_AS_PNG = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_SHOWN = 40


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
        """Sampling values in which pictures, bytes and ``data:`` URLs became paths.

        Raises:
            InvalidRequest: a URL holds no base64.
        """
        given = values.get(FIELD)
        if isinstance(given, (list, tuple)):
            return {**values, FIELD: [self._path(one) for one in given]}
        return dict(values) if given is None else {**values, FIELD: self._path(given)}

    def _path(self, given: Any) -> Any:
        if isinstance(given, Image.Image):
            path = self._new(".png")
            upright = ImageOps.exif_transpose(given)
            (upright if upright.mode in _AS_PNG else upright.convert("RGB")).save(path)
            return str(path)
        if isinstance(given, str) and given.startswith("data:"):
            given = _decoded(given)
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
    except binascii.Error:
        data = b""
    if not data or not head.endswith(";base64"):
        problem = "is no picture in base64. Write data:image/png;base64,..."
        raise InvalidRequest(FIELD, url[:_SHOWN], problem)
    return data
