"""Where ``sglang generate`` puts pictures: decided and tried before the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang.multimodal_gen.runtime.entrypoints.result_files import (
    OTHER_FORMATS,
    Destination,
    local_path,
    names_a_file,
)
from sglang.multimodal_gen.runtime.utils.atomic_file import MAX_NAME_BYTES, check_output_folder
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.image_file import FORMATS, image_format

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import GenerateArgs

_NUMBER_BYTES = 8  # room for "-2" and its sisters


def destination(args: GenerateArgs, image_count: int) -> Destination:
    """The place that the arguments name, made and tried.

    Raises:
        InvalidArgument: the path or name makes no sense for so many pictures.
        OutputError: the folder cannot be written, or the suffix names no known format.
    """
    path, name = local_path(args.output_path), args.output_file_name
    if names_a_file(path):
        if name is not None:
            problem = "names a file, and --output-file-name another. Give one of them."
            raise InvalidArgument("output_path", args.output_path, problem)
        if image_count != 1:
            problem = f"names one file, but {image_count} pictures are asked for. Give a folder."
            raise InvalidArgument("output_path", args.output_path, problem)
        path, name = path.parent, path.name
    if name is not None:
        name = _checked_name(name)
    return Destination(check_output_folder(path), name, args.overwrite)


def _checked_name(name: str) -> str:
    """A bare file name with a suffix that can be written; ``.png`` is added where none is."""
    if not name.strip(" .") or name != Path(name).name or "\0" in name:
        problem = "must be a bare file name. Choose its folder with --output-path."
        raise InvalidArgument("output_file_name", name, problem)
    if Path(name).suffix.lower() not in (*FORMATS, *OTHER_FORMATS):
        name += ".png"
    image_format(Path(name))
    if len(name.encode(errors="surrogateescape")) > MAX_NAME_BYTES - _NUMBER_BYTES:
        problem = f"is too long. Use at most {MAX_NAME_BYTES - _NUMBER_BYTES} bytes."
        raise InvalidArgument("output_file_name", name, problem)
    return name
