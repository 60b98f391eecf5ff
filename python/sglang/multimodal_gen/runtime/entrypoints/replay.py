"""A picture made again from the settings that it carries, and how near the two are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, JpegImagePlugin

from sglang.multimodal_gen.configs.step_cache_choice import OFF
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import UserError
from sglang.multimodal_gen.runtime.utils.image_file import (
    DEFAULT_QUALITY,
    ImageMetadata,
    encode_image,
    over_white,
    read_metadata,
)

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
_INPUTS = ("image_path", "mask_path", "video_path")
_FEW = 8


class CannotReplay(UserError):
    """A file that cannot be made again from what it says, and why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a file says of its making: ``settings`` are a request's, for one output."""

    file: Path
    model: str
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path, inputs: Sequence[str] = ()) -> Recipe:
        """The recipe in a file; ``inputs`` are the pictures that it was made from, if any.

        Raises:
            InvalidRequest: the file is no readable picture.
            CannotReplay: it carries no settings, or they were cut, or its inputs are not given.
        """
        about = _read_video(file) if is_video(file) else read_metadata(file)
        if about is None:
            raise CannotReplay(
                f"{file} carries no settings: it was made elsewhere or without them, or a program "
                "that it went through has removed them"
            )
        settings = {k: v for k, v in about.parameters.items() if k not in _INPUTS}
        _refuse_cut(file, about)
        settings.setdefault("step_cache", OFF)  # told only where it was on
        settings |= {"prompt": about.prompt, "seed": about.seed, "num_outputs_per_prompt": 1}
        if inputs:
            settings["image_path"] = list(inputs)
        elif _needs_inputs(about):
            raise CannotReplay(
                f"{file} was made from other pictures, which it does not hold: give them with "
                "--image-path, in their order"
            )
        if not about.prompt:
            del settings["prompt"]
        return cls(file, about.model, settings)

    @property
    def adapters(self) -> list[str]:
        """The adapters that it was made with, by name or file."""
        chosen = self.settings.get("lora") or []
        return [c["name"] if isinstance(c, dict) else str(c).partition("=")[0] for c in chosen]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two pictures are apart, of 255."""

    largest: int
    mean: float
    lossy: bool

    @property
    def identical(self) -> bool:
        """Whether every pixel is equal."""
        return self.largest == 0

    def summary(self) -> str:
        """In words."""
        way = ", compressed as the file is" if self.lossy else ""
        if self.identical:
            return f"identical: every pixel is equal{way}"
        return f"different: by at most {self.largest} of 255, {self.mean:.4f} on average{way}"


def is_video(file: Path) -> bool:
    """Whether a file is a video by its name."""
    return file.suffix.lower() in VIDEO_SUFFIXES


def compare(file: Path, made: np.ndarray) -> Comparison:
    """A picture's file beside uint8 [H, W, 3] that were made from its settings; or [H, W, 4], with
    transparency, where the model makes it.

    Formats that lose something are compared after the same loss: with a JPEG's own tables, or with
    the WebP quality that comes nearest.

    Raises:
        CannotReplay: the sizes differ.
    """
    with Image.open(file) as image:
        image.load()
        # A JPEG of a model that makes transparency was laid over white.
        if image.format == "JPEG" and made.shape[2] == 4:
            made = np.asarray(over_white(Image.fromarray(made)))
        theirs = np.asarray(image.convert(_mode(made)))
        if theirs.shape != made.shape:
            height, width = made.shape[:2]
            raise CannotReplay(
                f"{file} has {image.width}x{image.height} pixels, and its settings make "
                f"{width}x{height}: it was scaled or cut after it was made"
            )
        lossy = image.format in ("JPEG", "WEBP")
        ours = min(
            (_apart(theirs, candidate) for candidate in _as_compressed(image, file, made)),
            key=lambda apart: (apart[0], apart[1]),
        )
    return Comparison(*ours, lossy=lossy)


def _apart(one: np.ndarray, other: np.ndarray) -> tuple[int, float]:
    apart = np.abs(one.astype(np.int16) - other.astype(np.int16))
    return int(apart.max()), float(apart.mean())


def _as_compressed(image: Image.Image, file: Path, made: np.ndarray) -> Iterator[np.ndarray]:
    if image.format == "JPEG":
        assert isinstance(image, JpegImagePlugin.JpegImageFile)
        buffer = io.BytesIO()
        sampling = JpegImagePlugin.get_sampling(image)
        Image.fromarray(made).save(
            buffer, "JPEG", qtables=image.quantization, subsampling=max(0, sampling)
        )
        yield _decoded(buffer.getvalue(), made)
    elif image.format == "WEBP":
        yield made  # a lossless one
        for quality in _near_qualities(made, _pixel_bytes(file.read_bytes())):
            yield _decoded(encode_image(made, "WEBP", quality=quality), made)
    else:
        yield made


def _near_qualities(made: np.ndarray, size: int) -> Iterator[int]:
    """The usual quality, then those at which the pixels take about as many bytes as they do."""
    yield DEFAULT_QUALITY
    low, high = 1, 100
    while low < high:
        middle = (low + high) // 2
        if _pixel_bytes(encode_image(made, "WEBP", quality=middle)) < size:
            low = middle + 1
        else:
            high = middle
    yield from range(max(1, low - _FEW), min(100, low + _FEW) + 1)


def _pixel_bytes(webp: bytes) -> int:
    """The size of a WebP file's pixels, without what is said about them."""
    at = 12  # after RIFF, its size, and WEBP
    while at + 8 <= len(webp):
        size = int.from_bytes(webp[at + 4 : at + 8], "little")
        if webp[at : at + 4] == b"VP8 ":
            return size
        at += 8 + size + size % 2
    return len(webp)


def _decoded(data: bytes, like: np.ndarray) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert(_mode(like)))


def _mode(array: np.ndarray) -> str:
    return "RGBA" if array.shape[2] == 4 else "RGB"


def _needs_inputs(about: ImageMetadata) -> bool:
    """Whether it was made from pictures: the settings name them, or the task cannot do without.

    A task that takes pictures at will (TI2I, TI2V) was asked for without, if none are named.
    """
    if any(about.parameters.get(name) for name in _INPUTS):
        return True
    try:
        task = ModelTaskType.parse(str(about.parameters.get("task_type")))
    except ValueError:
        return False
    return task.requires_image_input or task.requires_video_input


def _refuse_cut(file: Path, about: ImageMetadata) -> None:
    """JPEG and WebP hold little text; what did not fit says so."""
    texts = [about.prompt, *map(str, about.parameters.values())]
    if "cut" in about.parameters or any("... [cut: " in text for text in texts):
        raise CannotReplay(f"{file} holds its settings only in part: they were too long for it")


def _read_video(file: Path, opener: Callable[..., Any] | None = None) -> ImageMetadata | None:
    """What a video's container says of its making, as JSON in its comment."""
    if opener is None:
        try:
            import av
        except ImportError as error:
            raise CannotReplay(
                f"{file} is a video, which needs PyAV: pip install 'sglang-diffusion[video]'"
            ) from error
        opener = av.open
    try:
        with opener(str(file)) as container:
            found = json.loads(container.metadata.get("comment", ""))
    except ValueError:
        return None
    except OSError as error:
        raise CannotReplay(f"{file} cannot be read as a video ({error.strerror})") from error
    known = isinstance(found, dict) and isinstance(found.get("prompt"), str)
    if not known or not isinstance(found.get("model"), str):
        return None
    parameters = found.get("parameters")
    try:
        seed = int(found["seed"])
    except (KeyError, TypeError, ValueError):
        return None
    parameters = parameters if isinstance(parameters, dict) else {}
    return ImageMetadata(found["prompt"], seed, found["model"], parameters)


def frames_of(file: Path) -> np.ndarray:
    """All frames of a video: uint8 [T, H, W, 3]."""
    import av

    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames)


def compare_frames(file: Path, made: np.ndarray) -> Comparison:
    """A video's file beside uint8 [T, H, W, 3]: its codec loses something, which is told.

    Raises:
        CannotReplay: the sizes differ.
    """
    theirs = frames_of(file)
    if theirs.shape != made.shape:
        raise CannotReplay(
            f"{file} has frames of {theirs.shape}, and its settings make {made.shape}: it was "
            "scaled or cut after it was made"
        )
    return Comparison(*_apart(theirs, made), lossy=False)
