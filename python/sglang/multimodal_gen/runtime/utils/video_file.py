"""Clips in files: encoding results with the settings that made them, and reading them back.

MP4 is what browsers play: H.264, 4:2:0, BT.709 in limited range, the index before the pictures. It
is written in memory; nothing rests on a disk until a caller puts it there. Animated GIF and WebP
are Pillow's. What a clip was made from travels inside it, as JSON in the comment (WebP: EXIF).

PyAV is the extra ``video``; it is imported when a clip is read or written.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sglang.multimodal_gen.runtime.utils.errors import (
    InternalError,
    InvalidRequest,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.image_file import (
    ImageMetadata,
    encode_image,
    exif_of,
    format_named,
    metadata_of_json,
    read_metadata,
)

if TYPE_CHECKING:
    from av.container import InputContainer

EXTRA = "video"
VIDEO_FORMATS: Mapping[str, str] = {".mp4": "MP4", ".gif": "GIF", ".webp": "WEBP"}
"""Suffixes of the files that can be written, and the names of their formats."""
MEDIA_TYPES: Mapping[str, str] = {"MP4": "video/mp4", "GIF": "image/gif", "WEBP": "image/webp"}

_ENCODERS = ("libx264", "libopenh264")  # wheels bring one or the other
_CRF = "16"  # x264's constant quality: over 40 dB on smooth frames, no visible artefact at 1:1
_OPENH264_BITS_PER_PIXEL = 0.4  # it has no constant quality; as large as x264's files at _CRF
_BT709, _LIMITED = 1, 1  # FFmpeg's AVCOL_SPC_, AVCOL_PRI_ and AVCOL_TRC_BT709; AVCOL_RANGE_MPEG
_MOST_THREADS = 8
# The index goes before the pictures, into room that is reserved first: so many bytes, and for each
# frame its size, times and place. What is left over stays as padding.
_INDEX_BYTES, _INDEX_BYTES_PER_FRAME = 8192, 64
_MOST_GIF_FPS = 50  # browsers slow down what asks for less than two hundredths of a second a frame
_FIELD = "video_path"
# Containers without references to other files or addresses: a playlist could name any.
_INPUT_FORMATS = "mov,mp4,matroska,webm,avi,gif"
MAX_INPUT_VIDEO_PIXELS = 2**30
"""The most that frames x height x width of an input video may be: 3 GiB of RGB."""


@dataclass(frozen=True, slots=True, eq=False)
class InputVideo:
    """A video that a user brought: uint8 [F, H, W, 3], and its frames a second."""

    frames: np.ndarray
    fps: float


def require_video_codec() -> None:
    """Make sure that MP4 files can be read and written here; to be called before long work.

    Raises:
        UserError: PyAV is not installed, or has no encoder for H.264.
    """
    if importlib.util.find_spec("av") is None:
        raise UserError(
            f"MP4 files need the package av (PyAV): pip install 'sglang-diffusion[{EXTRA}]'"
        )
    _encoder()


def check_video_format(format: str, fps: int) -> None:
    """Refuse, before the work, a format that cannot be written here or cannot play at a rate.

    Raises:
        UserError: MP4, and PyAV is missing.
        InvalidRequest: GIF, and ``fps`` is above what it can do.
    """
    if format == "MP4":
        require_video_codec()
    if format == "GIF" and fps > _MOST_GIF_FPS:
        problem = f"a GIF plays at most {_MOST_GIF_FPS} frames a second; use mp4 or webp"
        raise InvalidRequest("fps", fps, problem)


def video_format(path: Path) -> str:
    """The format of a clip's file name.

    Raises:
        OutputError: the suffix names no format that can be written; lists those that can.
    """
    return format_named(path, VIDEO_FORMATS, "video")


def encode_video(
    frames: np.ndarray, fps: int, format: str = "MP4", *, metadata: ImageMetadata | None = None
) -> bytes:
    """The bytes of a video file that plays all ``frames`` at ``fps``.

    MP4 has even edges: an odd one gets a copy of its last row or column. GIF and WebP may join
    frames that are equal; the time is the same.

    Args:
        frames: uint8 [F, H, W, 3], RGB.
        fps: whole frames a second.
        format: a value of `VIDEO_FORMATS`.
        metadata: stored in the file; None stores nothing.

    Raises:
        UserError: PyAV is missing.
    """
    assert frames.dtype == np.uint8, f"expected uint8 pixels, got {frames.dtype}"
    assert frames.ndim == 4, f"expected [F, H, W, 3], got {frames.shape}"
    assert frames.shape[3] == 3, f"expected RGB, got {frames.shape}"
    if format == "MP4":
        return _mp4(frames, fps, None if metadata is None else _json(metadata))
    return _animation(frames, fps, format, metadata)


def encode_frames(frames: np.ndarray, *, metadata: ImageMetadata | None = None) -> dict[str, bytes]:
    """Each frame as a PNG file, under names that sort in order: ``00000.png``, ..."""
    return {
        f"{index:05}.png": encode_image(frame, metadata=metadata)
        for index, frame in enumerate(frames)
    }


def read_video_metadata(path: Path | str) -> ImageMetadata | None:
    """What a clip of ours says about its making; None where it says nothing.

    Raises:
        InvalidRequest: the file is no readable clip.
        UserError: PyAV is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".webp":
        return read_metadata(path)
    if suffix == ".gif":
        with Image.open(path) as image:
            return metadata_of_json(image.info.get("comment"))
    with _opened(path) as container:
        return metadata_of_json(container.metadata.get("comment"))


def load_input_video(path: Path | str, *, max_pixels: int = MAX_INPUT_VIDEO_PIXELS) -> InputVideo:
    """The video at ``path`` as 8-bit RGB, upright; the sound is left out.

    Raises:
        InvalidRequest: missing, no video, damaged, or larger than ``max_pixels`` in all (judged by
            each frame before it is kept, so that a header cannot lie).
        UserError: PyAV is missing.
    """
    require_video_codec()
    from av.error import FFmpegError

    frames: list[np.ndarray] = []
    room = max_pixels
    with _opened(path) as container:
        if not container.streams.video:
            raise InvalidRequest(_FIELD, str(path), "has no pictures. Give a video file.")
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        try:
            for frame in container.decode(stream):
                room -= frame.width * frame.height
                if room < 0:
                    problem = f"has more than {max_pixels} pixels in all its frames. Cut it."
                    raise InvalidRequest(_FIELD, str(path), problem)
                turned = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                frames.append(np.ascontiguousarray(turned))
        except FFmpegError as error:
            raise _damaged(path, error) from error
    if not frames or len({frame.shape for frame in frames}) > 1:
        problem = "has no frames" if not frames else "changes its size midway"
        raise InvalidRequest(_FIELD, str(path), f"{problem}. Export it again.")
    return InputVideo(np.stack(frames), float(rate) if rate else 24.0)


# MP4.


def _encoder() -> str:
    """The H.264 encoder that this build of PyAV has."""
    import av

    for name in _ENCODERS:
        if name in av.codecs_available:
            return name
    raise UserError(
        f"this build of PyAV has no H.264 encoder ({' or '.join(_ENCODERS)}). Install the wheel: "
        "pip install --force-reinstall av"
    )


def _mp4(frames: np.ndarray, fps: int, comment: str | None) -> bytes:
    require_video_codec()
    import av

    count, height, width, _ = frames.shape
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    room = _INDEX_BYTES + _INDEX_BYTES_PER_FRAME * count + len(comment or "")
    buffer = io.BytesIO()
    # In the file's own clock, by default of milliseconds, most clips would end a little early.
    options = {"moov_size": str(room), "movie_timescale": str(100 * fps)}
    with av.open(buffer, "w", format="mp4", options=options) as container:
        if comment is not None:
            container.metadata["comment"] = comment
        stream: Any = container.add_stream(_encoder(), rate=fps)
        _set_up(stream, width + width % 2, height + height % 2, fps)
        for index, frame in enumerate(frames):
            padded = np.pad(frame, padding, mode="edge") if padding[:2] != _EVEN else frame
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(padded), format="rgb24")
            picture = picture.reformat(
                format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG"
            )
            picture.pts = index
            for packet in stream.encode(picture):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    data = buffer.getvalue()
    if data.find(b"moov", 0, 4096) < 0:
        raise InternalError("the MP4's index is not at its beginning")
    return data


_EVEN = ((0, 0), (0, 0))


def _set_up(stream: Any, width: int, height: int, fps: int) -> None:
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    codec = stream.codec_context
    codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
    codec.color_range = _LIMITED
    codec.gop_size = 2 * fps  # a player can jump to every other second
    codec.thread_count = min(_MOST_THREADS, os.cpu_count() or 1)
    if codec.name == "libx264":
        codec.options = {"crf": _CRF, "preset": "medium"}
    else:
        codec.bit_rate = int(width * height * fps * _OPENH264_BITS_PER_PIXEL)


# Animations.


def _animation(frames: np.ndarray, fps: int, format: str, metadata: ImageMetadata | None) -> bytes:
    unit = 10 if format == "GIF" else 1  # milliseconds that a duration is a multiple of
    ends = [round(1000 * (index + 1) / fps / unit) * unit for index in range(len(frames))]
    durations = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    options: dict[str, Any] = {"duration": durations, "loop": 0}
    if format == "GIF" and metadata is not None:
        options["comment"] = _json(metadata).encode("ascii")
    if format == "WEBP":
        options |= {"quality": 90, "method": 4}
        if metadata is not None:
            options["exif"] = exif_of(metadata)
    first, *others = map(Image.fromarray, frames)
    buffer = io.BytesIO()
    first.save(buffer, format, save_all=True, append_images=others, **options)
    return buffer.getvalue()


def _json(metadata: ImageMetadata) -> str:
    """ASCII: halves of surrogate pairs are escaped, and length in bytes is that in characters."""
    about = {
        "prompt": metadata.prompt,
        "seed": metadata.seed,
        "model": metadata.model,
        "parameters": dict(metadata.parameters),
    }
    return json.dumps(about, default=str)


# Reading.


def _opened(path: Path | str) -> InputContainer:
    require_video_codec()
    import av
    from av.error import FFmpegError

    try:
        usable = Path(path).is_file()
    except (OSError, ValueError):  # a name that no file system takes
        usable = False
    if not usable:
        raise InvalidRequest(_FIELD, str(path), "there is no such file. Check the path.")
    # The file alone: a container that names others must not have them opened.
    options = {"format_whitelist": _INPUT_FORMATS, "protocol_whitelist": "file"}
    try:
        return av.open(str(Path(path).absolute()), options=options)
    except (FFmpegError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path | str, error: BaseException) -> InvalidRequest:
    said = getattr(error, "strerror", None) or str(error)
    problem = f"is no video that can be read, or is damaged ({said}). Give an MP4 file."
    return InvalidRequest(_FIELD, str(path), problem)
