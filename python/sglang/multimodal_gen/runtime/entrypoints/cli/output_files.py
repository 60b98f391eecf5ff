"""Where ``sglang generate`` puts its outputs: decided and tried before the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.result_files import (
    DEFAULT_SUFFIX,
    OTHER_FORMATS,
    Destination,
    Kind,
    check_suffix,
    local_path,
    names_a_file,
)
from sglang.multimodal_gen.runtime.utils.atomic_file import MAX_NAME_BYTES, check_output_folder
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.image_file import FORMATS
from sglang.multimodal_gen.runtime.utils.video_file import VIDEO_FORMATS, check_video_format

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import GenerateArgs

_NUMBER_BYTES = 8  # room for "-2" and its sisters


def destination(
    args: GenerateArgs, count: int, makes: DataType = DataType.IMAGE, fps: int | None = None
) -> Destination:
    """The place that the arguments name for ``count`` outputs, made and tried.

    Raises:
        InvalidArgument: the path or name makes no sense for so many outputs, or of their kind.
        InvalidRequest: the format cannot play at ``fps``.
        OutputError: the folder cannot be written, or the suffix names no known format.
        UserError: the format needs a package that is not installed.
    """
    kind = _kind(args, makes)
    path, name = local_path(args.output_path), args.output_file_name
    if names_a_file(path):
        if name is not None:
            problem = "names a file, and --output-file-name another. Give one of them."
            raise InvalidArgument("output_path", args.output_path, problem)
        if kind == "frames":
            problem = "names a file, but --frames makes folders. Give a folder."
            raise InvalidArgument("output_path", args.output_path, problem)
        if count != 1:
            what = "pictures" if kind == "image" else "videos"
            problem = f"names one file, but {count} {what} are asked for. Give a folder."
            raise InvalidArgument("output_path", args.output_path, problem)
        path, name = path.parent, path.name
    if name is not None:
        name = _checked_name(name, kind)
    if kind == "video":
        assert fps is not None, "admission gives clips a rate"
        check_video_format("MP4" if name is None else check_suffix(Path(name), kind), fps)
    return Destination(check_output_folder(path), name, args.overwrite, kind)


def _kind(args: GenerateArgs, makes: DataType) -> Kind:
    if makes is not DataType.VIDEO:
        if args.frames:
            raise InvalidArgument("frames", True, "is for videos, and pictures are asked for.")
        return "image"
    return "frames" if args.frames else "video"


def _checked_name(name: str, kind: Kind) -> str:
    """A bare file name with a suffix that can be written; the usual is added where none is."""
    if not name.strip(" .") or name != Path(name).name or "\0" in name:
        problem = "must be a bare file name. Choose its folder with --output-path."
        raise InvalidArgument("output_file_name", name, problem)
    if kind != "frames":
        if Path(name).suffix.lower() not in (*FORMATS, *VIDEO_FORMATS, *OTHER_FORMATS):
            name += DEFAULT_SUFFIX[kind]
        check_suffix(Path(name), kind)
    if len(name.encode(errors="surrogateescape")) > MAX_NAME_BYTES - _NUMBER_BYTES:
        problem = f"is too long. Use at most {MAX_NAME_BYTES - _NUMBER_BYTES} bytes."
        raise InvalidArgument("output_file_name", name, problem)
    return name
