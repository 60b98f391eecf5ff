"""Where results go on disk: names, metadata, and never a half-written file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sglang.multimodal_gen.runtime.utils.atomic_file import (
    check_output_folder,
    replace_file,
    write_new_file,
)
from sglang.multimodal_gen.runtime.utils.errors import OutputError
from sglang.multimodal_gen.runtime.utils.image_file import (
    FORMATS,
    ImageMetadata,
    encode_image,
    image_format,
)

# Suffixes of pictures that are not written here: a path with one is a mistake, not a folder.
OTHER_FORMATS = frozenset(
    {".avif", ".bmp", ".gif", ".heic", ".jp2", ".jxl", ".ppm", ".svg", ".tif", ".tiff"}
)


class Picture(Protocol):
    """What is written: pixels, and what made them."""

    @property
    def array(self) -> np.ndarray: ...  # noqa: D102
    @property
    def prompt(self) -> str: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder that can be written, and the file name that the caller chose, if any.

    Without a name, files are called by time and seed and never overwrite another.
    """

    folder: Path
    name: str | None = None
    overwrite: bool = False

    @classmethod
    def of_path(cls, path: Path, images: int, *, overwrite: bool) -> Destination:
        """What a path means: a file for a single image if it has an image's suffix, else a folder.

        Raises:
            OutputError: several images for one file, a format that is not written, or a place that
                cannot be written.
        """
        if not names_a_file(path):
            return cls(check_output_folder(path))
        image_format(path)
        if images != 1:
            raise OutputError(
                f"output path {str(path)!r} names one file, but {images} images will be made; "
                "give a folder"
            )
        return cls(check_output_folder(path.parent), path.name, overwrite)

    def write(
        self,
        images: Sequence[Picture],
        *,
        model: str,
        parameters: Mapping[str, Any],
        metadata: bool,
        first: int = 0,
    ) -> Iterator[Path]:
        """Write pictures one by one; yields each path when its file is complete.

        With ``metadata`` each holds what made it. Several of one name are numbered ``name-2.png``;
        ``first`` is how many were written before these.

        Raises:
            OutputError: a file could not be written; those before it are complete.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for index, image in enumerate(images, start=first):
            path = self.folder / (self.name or f"{stamp}-{image.seed}.png")
            about = ImageMetadata(image.prompt, image.seed, model, parameters) if metadata else None
            data = encode_image(image.array, image_format(path), metadata=about)
            if not (self.name and self.overwrite):
                yield write_new_file(path, data)
            elif index == 0:
                yield replace_file(path, data)
            else:
                yield replace_file(path.with_stem(f"{path.stem}-{index + 1}"), data)


def names_a_file(path: Path) -> bool:
    """Whether a path means one picture: it has an image's suffix and is no folder."""
    if path.suffix.lower() not in (*FORMATS, *OTHER_FORMATS):
        return False
    try:
        return not path.is_dir()
    except OSError:  # a name that no file system takes: told when it is tried
        return True


def local_path(text: str | os.PathLike[str]) -> Path:
    """A path as a user writes it, ``~`` expanded.

    Raises:
        OutputError: it is blank, a URL, or no path.
    """
    if not isinstance(text, (str, os.PathLike)):
        raise OutputError(f"output path {text!r} is no path; give text or a pathlib.Path")
    shown = os.fspath(text)
    if not shown.strip():
        raise OutputError(f"output path {shown!r} is blank; '.' is this folder")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", shown):
        raise OutputError(f"output path {shown!r} is a URL; only local paths are written")
    try:
        return Path(shown).expanduser()
    except RuntimeError as error:
        raise OutputError(f"output path {shown!r}: {error}") from error
