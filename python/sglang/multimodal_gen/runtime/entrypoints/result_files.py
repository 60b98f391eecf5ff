"""Where results go on disk: names, metadata, and never a half-written file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang.multimodal_gen.runtime.entrypoints.generated import Generated, GeneratedImage
from sglang.multimodal_gen.runtime.utils.atomic_file import (
    check_output_folder,
    replace_file,
    write_new_file,
    write_new_folder,
)
from sglang.multimodal_gen.runtime.utils.errors import OutputError
from sglang.multimodal_gen.runtime.utils.image_file import (
    FORMATS,
    ImageMetadata,
    encode_image,
    image_format,
)
from sglang.multimodal_gen.runtime.utils.video_file import (
    VIDEO_FORMATS,
    encode_frames,
    encode_video,
    require_video_codec,
    video_format,
)

Kind = Literal["image", "video", "frames"]
"""What is written: pictures, clips as files, or clips as folders of PNG files."""

DEFAULT_SUFFIX = {"image": ".png", "video": ".mp4", "frames": ""}

# Suffixes that are not written here: a path with one is a mistake, not a folder.
OTHER_FORMATS = frozenset(
    {".avif", ".bmp", ".gif", ".heic", ".jp2", ".jxl", ".ppm", ".svg", ".tif", ".tiff"}
    | {".avi", ".m4v", ".mkv", ".mov", ".mpeg", ".mpg", ".webm"}
)


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder that can be written, and the file name that the caller chose, if any.

    Without a name, files are called by time and seed and never overwrite another. Folders of
    frames never do.
    """

    folder: Path
    name: str | None = None
    overwrite: bool = False
    kind: Kind = "image"

    @classmethod
    def of_path(
        cls, path: Path, images: int, *, overwrite: bool, kind: Kind = "image"
    ) -> Destination:
        """What a path means: a file for a single output if it has a file's suffix, else a folder.

        Raises:
            OutputError: several images for one file, a format that is not written, or a place that
                cannot be written.
            UserError: MP4, and the extra ``video`` is not installed.
        """
        if not names_a_file(path):
            if kind == "video":
                require_video_codec()
            return cls(check_output_folder(path), kind=kind)
        if check_suffix(path, kind) == "MP4":
            require_video_codec()
        if images != 1:
            raise OutputError(
                f"output path {str(path)!r} names one file, but {images} {kind}s will be made; "
                "give a folder"
            )
        return cls(check_output_folder(path.parent), path.name, overwrite, kind)

    def write(
        self,
        images: Sequence[Generated],
        *,
        model: str,
        parameters: Mapping[str, Any],
        metadata: bool,
        first: int = 0,
    ) -> Iterator[Path]:
        """Write outputs one by one; yields each path when its file is complete.

        With ``metadata`` each holds what made it. Several of one name are numbered ``name-2.png``;
        ``first`` is how many were written before these.

        Raises:
            OutputError: a file could not be written; those before it are complete.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for index, image in enumerate(images, start=first):
            path = self.folder / (self.name or f"{stamp}-{image.seed}{DEFAULT_SUFFIX[self.kind]}")
            about = ImageMetadata(image.prompt, image.seed, model, parameters) if metadata else None
            if self.kind == "frames":
                assert not isinstance(image, GeneratedImage), "checked by whoever chose the kind"
                yield write_new_folder(path, encode_frames(image.frames, metadata=about))
                continue
            data = _encoded(image, path, about)
            if not (self.name and self.overwrite):
                yield write_new_file(path, data)
            elif index == 0:
                yield replace_file(path, data)
            else:
                yield replace_file(path.with_stem(f"{path.stem}-{index + 1}"), data)


def _encoded(output: Generated, path: Path, about: ImageMetadata | None) -> bytes:
    if isinstance(output, GeneratedImage):
        return encode_image(output.array, image_format(path), metadata=about)
    return encode_video(output.frames, output.fps, video_format(path), metadata=about)


def check_suffix(path: Path, kind: Kind) -> str:
    """The format that a file's name asks for.

    Raises:
        OutputError: it is none that such outputs are written in.
    """
    if kind == "image":
        return image_format(path)
    if kind == "video":
        return video_format(path)
    raise OutputError(f"{str(path)!r} names a file, but frames are written into a folder of theirs")


def names_a_file(path: Path) -> bool:
    """Whether a path means one file: it has an image's or a video's suffix and is no folder."""
    if path.suffix.lower() not in (*FORMATS, *VIDEO_FORMATS, *OTHER_FORMATS):
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
