"""Where pictures go: decided and checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.multimodal_gen.runtime.entrypoints.result_files import names_a_file
from sglang.multimodal_gen.runtime.utils.atomic_file import (
    MAX_NAME_BYTES,
    check_output_folder,
    replace_file,
    write_new_file,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.image_file import (
    FORMATS,
    ImageMetadata,
    encode_image,
    image_format,
)

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import GenerateArgs
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import GenerationResult

# Suffixes of pictures that are not written here: a name with one is a mistake, not a folder.
_OTHER_IMAGES = frozenset(
    {".avif", ".bmp", ".gif", ".heic", ".jp2", ".jxl", ".ppm", ".svg", ".tif", ".tiff"}
)
_NUMBER_BYTES = 8  # room for "-2" and its sisters


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """A folder that can be written, and the file name that the user chose, if any."""

    folder: Path
    name: str | None
    overwrite: bool

    def write(self, result: GenerationResult, *, metadata: bool) -> Iterator[Path]:
        """Write the pictures; yields the path of each when its file is complete.

        Several pictures of one name are numbered: ``name.png``, ``name-2.png``, ...

        Raises:
            OutputError: a file could not be written; those before it are complete.
        """
        if self.name is None:
            yield from result.save(self.folder, metadata=metadata)
            return
        path = self.folder / self.name
        for index, image in enumerate(result.images):
            about = ImageMetadata(image.prompt, image.seed, result.model, result.parameters)
            data = encode_image(
                image.array, image_format(path), metadata=about if metadata else None
            )
            if not self.overwrite:
                yield write_new_file(path, data)
            elif index == 0:
                yield replace_file(path, data)
            else:
                yield replace_file(path.with_stem(f"{path.stem}-{index + 1}"), data)


def output_target(args: GenerateArgs, image_count: int) -> OutputTarget:
    """The place that the arguments name, made and tried.

    Raises:
        InvalidArgument: the path or name makes no sense for so many pictures.
        OutputError: the folder cannot be written, or the suffix names no known format.
    """
    path, name = Path(args.output_path), args.output_file_name
    if names_a_file(path) or path.suffix.lower() in _OTHER_IMAGES:
        if name is not None:
            problem = "names a file, and --output-file-name another. Give one of them."
            raise InvalidArgument("output_path", args.output_path, problem)
        if image_count != 1:
            problem = f"names one file, but {image_count} pictures are asked for. Give a folder."
            raise InvalidArgument("output_path", args.output_path, problem)
        path, name = path.parent, path.name
    if name is not None:
        name = _checked_name(name)
    return OutputTarget(check_output_folder(path), name, args.overwrite)


def _checked_name(name: str) -> str:
    """A bare file name with a suffix that can be written; ``.png`` is added where none is."""
    if not name.strip(" .") or name != Path(name).name or "\0" in name:
        problem = "must be a bare file name. Choose its folder with --output-path."
        raise InvalidArgument("output_file_name", name, problem)
    if Path(name).suffix.lower() not in (*FORMATS, *_OTHER_IMAGES):
        name += ".png"
    image_format(Path(name))
    if len(name.encode(errors="surrogateescape")) > MAX_NAME_BYTES - _NUMBER_BYTES:
        problem = f"is too long. Use at most {MAX_NAME_BYTES - _NUMBER_BYTES} bytes."
        raise InvalidArgument("output_file_name", name, problem)
    return name
