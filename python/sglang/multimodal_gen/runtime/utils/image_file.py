"""Pictures in files: encoding results with the settings that made them, and reading them back.

What a picture was made from travels inside it. PNG holds the text chunks ``prompt``, ``seed``,
``model`` and ``parameters`` (JSON), as other tools expect them; JPEG and WebP hold the same four
as one JSON object in the EXIF field UserComment.

Pictures that users bring are opened with suspicion and decoded to plain 8-bit RGB.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, OutputError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

FORMATS: Mapping[str, str] = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Suffixes of the files that can be written, and Pillow's name of their format."""

DEFAULT_QUALITY = 95  # of 100, for JPEG and WebP: no visible artefact at 1:1

_FIELD = "image_path"
MAX_INPUT_PIXELS = 64 * 2**20
"""Larger pictures are refused by their header: 192 MiB of RGB, and no model looks at as much."""

MAX_INPUT_SIDE = 32_768
"""No model looks at a strip; decoders take more memory for each row than its pixels have."""

# Raster formats only: Pillow would run Ghostscript for EPS.
_INPUT_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
# What decoders raise on damaged bytes; Pillow documents OSError alone, its plug-ins know better.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError,
           OverflowError, RuntimeError, struct.error, zlib.error)  # fmt: skip
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")

_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)
_EXIF_IFD = 0x8769
_USER_COMMENT = 0x9286
_ASCII_COMMENT = b"ASCII\0\0\0"
# A JPEG segment holds 65533 bytes; the rest of the EXIF block needs a few dozen.
_MAX_COMMENT_BYTES = 65_000
_CUT_TEXT = 4_000


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """What made a picture: enough to make it again."""

    prompt: str
    seed: int
    model: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


def image_format(path: Path) -> str:
    """Pillow's format name for a file name.

    Raises:
        OutputError: the suffix names no format that can be written; lists those that can.
    """
    return format_named(path, FORMATS, "image")


def format_named(path: Path, formats: Mapping[str, str], kind: str) -> str:
    """The format that a file name's suffix means; ``kind`` is for the message.

    Raises:
        OutputError: the suffix is none of ``formats``; lists them.
    """
    suffix = path.suffix.lower()
    if suffix not in formats:
        known = ", ".join(formats)
        named = f"{suffix!r} is no {kind} format" if suffix else "a suffix is missing"
        raise OutputError(
            f"cannot write {str(path)!r}: {named} that can be written. "
            f"Use one of {known}.{did_you_mean(suffix, formats)}"
        )
    return formats[suffix]


def encode_image(
    array: np.ndarray,
    format: str = "PNG",
    *,
    quality: int = DEFAULT_QUALITY,
    metadata: ImageMetadata | None = None,
) -> bytes:
    """The bytes of an image file.

    Args:
        array: uint8 [H, W, 3], RGB; or [H, W, 4] with transparency, which PNG and WebP keep. JPEG
            has none: the picture is laid over white.
        format: a value of `FORMATS`.
        quality: 1 to 100, for JPEG and WebP; PNG is lossless.
        metadata: stored in the file; None stores nothing.
    """
    assert array.dtype == np.uint8, f"expected uint8 pixels, got {array.dtype}"
    assert array.ndim == 3, f"expected [H, W, C], got {array.shape}"
    assert array.shape[2] in (3, 4), f"expected RGB or RGBA, got {array.shape}"
    options: dict[str, Any] = {}
    if format == "PNG":
        options["pnginfo"] = None if metadata is None else _png_text(metadata)
    else:
        options["quality"] = quality
        if format == "JPEG":
            options["subsampling"] = 0  # full colour resolution: edges of flat colours stay clean
        if metadata is not None:
            options["exif"] = exif_of(metadata)
    buffer = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(array))
    (over_white(picture) if format == "JPEG" else picture).save(buffer, format, **options)
    return buffer.getvalue()


def read_metadata(path: Path | str) -> ImageMetadata | None:
    """What a picture of ours says about its making; None where it says nothing.

    Raises:
        InvalidRequest: the file is no readable image.
    """
    with _opened(path, MAX_INPUT_PIXELS) as image:
        if image.format == "PNG":
            image.load()  # chunks may follow the pixels
            found = {name: image.info.get(name) for name in ("prompt", "seed", "model")}
            parameters = _json_object(image.info.get("parameters"))
        else:
            comment = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT, b"")
            text = comment.removeprefix(_ASCII_COMMENT) if isinstance(comment, bytes) else comment
            return metadata_of_json(text)
    return _metadata(found, parameters)


def metadata_of_json(text: object) -> ImageMetadata | None:
    """What was written as one JSON object with the four fields; None where it is something else."""
    found = _json_object(text)
    return _metadata(found, found.get("parameters", {}))


def _metadata(found: Mapping[str, Any], parameters: object) -> ImageMetadata | None:
    try:
        seed = int(found.get("seed"))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    prompt, model = found.get("prompt"), found.get("model")
    if not isinstance(prompt, str) or not isinstance(model, str):
        return None
    return ImageMetadata(prompt, seed, model, parameters if isinstance(parameters, dict) else {})


def load_input_image(
    path: Path | str, *, max_pixels: int = MAX_INPUT_PIXELS, keep_alpha: bool = False
) -> Image.Image:
    """The picture at ``path`` as 8-bit RGB, upright.

    The EXIF orientation is applied; transparent pixels are laid over white, or with ``keep_alpha``
    stay so, as 8-bit RGBA; 16-bit grey is scaled to 8 bits; of an animation the first frame is
    taken.

    Raises:
        InvalidRequest: missing, no regular file, no image, damaged, or larger than ``max_pixels``
            (judged by the header, before anything is decoded).
    """
    with _opened(path, max_pixels) as image:
        return eight_bit(image, path, keep_alpha=keep_alpha)


def eight_bit(image: Image.Image, name: Path | str, *, keep_alpha: bool = False) -> Image.Image:
    """Any picture of Pillow's as `load_input_image` gives those in files; ``name`` is for messages.

    Raises:
        InvalidRequest: it has no pixels, or they cannot be decoded or are no 8 or 16 bits.
    """
    if 0 in image.size:
        problem = f"has no pixels ({image.width}x{image.height}). Give a picture."
        raise InvalidRequest(_FIELD, str(name), problem)
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except _DAMAGE as error:
        raise _damaged(name, error) from error
    return _rgb(upright, name, keep_alpha)


def input_image_size(path: Path | str, *, max_pixels: int = MAX_INPUT_PIXELS) -> tuple[int, int]:
    """Width and height of the picture at ``path``, upright.

    Most formats say both in their header, and no pixel is decoded; a PNG is read to its end.

    Raises:
        InvalidRequest: as `load_input_image`, as far as it is read.
    """
    with _opened(path, max_pixels) as image:
        try:
            lying = image.getexif().get(_ORIENTATION) in _LYING
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        return (image.height, image.width) if lying else image.size


def _png_text(metadata: ImageMetadata) -> PngInfo:
    """The four text chunks; Pillow chooses tEXt for Latin-1 and iTXt for other text."""
    info = PngInfo()
    info.add_text("prompt", _clean(metadata.prompt))
    info.add_text("seed", str(metadata.seed))
    info.add_text("model", _clean(metadata.model))
    info.add_text("parameters", json.dumps(dict(metadata.parameters), default=str))
    return info


def exif_of(metadata: ImageMetadata) -> bytes:
    """An EXIF block that holds what made a picture, for JPEG and WebP; long texts may be cut."""
    exif = Image.Exif()
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = _ASCII_COMMENT + _fitting_json(metadata)
    return exif.tobytes()


def _fitting_json(metadata: ImageMetadata) -> bytes:
    """The metadata as ASCII JSON. Where a segment cannot hold it, long texts are cut and say so."""
    whole: dict[str, Any] = {
        "prompt": metadata.prompt,
        "seed": metadata.seed,
        "model": metadata.model,
        "parameters": dict(metadata.parameters),
    }
    short = {
        "prompt": _cut(metadata.prompt),
        "seed": metadata.seed,
        "model": _cut(metadata.model),
        "parameters": {name: _cut(value) for name, value in metadata.parameters.items()},
    }
    for candidate in (whole, short, short | {"parameters": {"cut": "too long for this format"}}):
        encoded = json.dumps(candidate, default=str).encode("ascii")
        if len(encoded) <= _MAX_COMMENT_BYTES:
            return encoded
    raise AssertionError("two cut texts fit a segment")


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _CUT_TEXT:
        return value[:_CUT_TEXT] + f"... [cut: {len(value)} characters]"
    return value


def _clean(text: str) -> str:
    """Text that a PNG chunk can hold: no NUL (it ends the text), no half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _json_object(text: object) -> dict[str, Any]:
    if not isinstance(text, str | bytes):
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _opened(path: Path | str, max_pixels: int) -> Iterator[Image.Image]:
    """An image whose header was read and found acceptable; pixels are not decoded yet."""
    file = Path(path)
    _check_file(file)
    try:
        image = Image.open(file, formats=_known_formats())
    except UnidentifiedImageError as error:
        problem = f"is no image that can be read. Give a {_listed()} file."
        raise InvalidRequest(_FIELD, str(path), problem) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(path, str(error), max_pixels) from error
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    with image:
        if max(image.size) > MAX_INPUT_SIDE:
            problem = (
                f"is too large ({image.width}x{image.height}); at most {MAX_INPUT_SIDE} a side."
            )
            raise InvalidRequest(_FIELD, str(path), problem)
        if image.width * image.height > max_pixels:
            raise _too_large(path, f"{image.width}x{image.height} pixels", max_pixels)
        yield image


def _check_file(file: Path) -> None:
    """Refuse what is not a readable regular file: reading a pipe or a device may never end."""
    try:
        if not file.exists():
            problem = "there is no such file. Check the path."
        elif file.is_dir():
            problem = "is a folder. Give one image file."
        elif not file.is_file():
            problem = "is no regular file. Give an image file."
        elif file.stat().st_size == 0:
            problem = "the file is empty. Give an image file."
        else:
            return
    except (OSError, ValueError) as error:
        problem = f"cannot be looked at ({error}). Check the path and its permissions."
    raise InvalidRequest(_FIELD, str(file), problem)


def over_white(image: Image.Image) -> Image.Image:
    """The picture; one with transparency as RGB, laid over white."""
    if image.mode != "RGBA":
        return image
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _rgb(image: Image.Image, path: Path | str, keep_alpha: bool) -> Image.Image:
    if image.mode in _SIXTEEN_BIT:
        return _from_sixteen_bit(image, path)
    if image.mode == "F":
        problem = "holds floating-point pixels. Save it with 8 or 16 bits a channel."
        raise InvalidRequest(_FIELD, str(path), problem)
    if image.has_transparency_data:
        # Pillow takes grey with premultiplied alpha to no other mode.
        colours = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if keep_alpha:
            return colours
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")


def _from_sixteen_bit(image: Image.Image, path: Path | str) -> Image.Image:
    """Grey of 16 bits, scaled: Pillow's own conversion clips everything above 255 to white."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        problem = "holds more than 16 bits a pixel. Save it with 8 or 16 bits a channel."
        raise InvalidRequest(_FIELD, str(path), problem)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def _known_formats() -> list[str]:
    """The formats that this build of Pillow can read, in a fixed order."""
    Image.init()
    return [name for name in _INPUT_FORMATS if name in Image.OPEN]


def _listed() -> str:
    return ", ".join(name for name in _known_formats() if name != "MPO")


def _too_large(path: Path | str, size: str, limit: int) -> InvalidRequest:
    problem = f"is too large ({size}); at most {limit} pixels are taken. Scale it down first."
    return InvalidRequest(_FIELD, str(path), problem)


def _damaged(path: Path | str, error: BaseException) -> InvalidRequest:
    problem = f"is damaged or incomplete ({error}). Export it again."
    return InvalidRequest(_FIELD, str(path), problem)
