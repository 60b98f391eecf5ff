"""Where results go on disk: names, metadata, and never a half-written or overwritten file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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


class _Picture(Protocol):
    @property
    def array(self) -> np.ndarray: ...
    @property
    def prompt(self) -> str: ...
    @property
    def seed(self) -> int: ...


def names_a_file(path: Path) -> bool:
    """Whether a path means one picture: it has an image's suffix and is no folder."""
    return path.suffix.lower() in FORMATS and not path.is_dir()


def check_destination(path: Path, images: int) -> None:
    """Refuse, before any work, a place that could not take the results.

    Raises:
        OutputError: several images for one file, or a folder that cannot be written.
    """
    if not names_a_file(path):
        check_output_folder(path)
        return
    if images > 1:
        raise OutputError(
            f"output path {str(path)!r} names one file, but {images} images will be made; "
            "give a folder"
        )
    check_output_folder(path.parent)


def save_images(
    images: Sequence[_Picture],
    path: Path,
    *,
    model: str,
    parameters: Mapping[str, Any],
    metadata: bool,
) -> list[Path]:
    """Write pictures to ``path``: a file for a single one, else a folder.

    A file that the caller names is replaced. In a folder, names are made of time and seed and
    avoid every existing file. With ``metadata`` each picture holds what made it.

    Raises:
        OutputError: the place cannot be written.
    """
    check_destination(path, len(images))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    written = []
    for image in images:
        named = names_a_file(path)
        target = path if named else path / f"{stamp}-{image.seed}.png"
        about = ImageMetadata(image.prompt, image.seed, model, parameters) if metadata else None
        data = encode_image(image.array, image_format(target), metadata=about)
        written.append((replace_file if named else write_new_file)(target, data))
    return written
