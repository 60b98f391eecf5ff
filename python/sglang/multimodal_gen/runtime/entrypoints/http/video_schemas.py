"""What clients send to and get from the video routes, as OpenAI names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang.multimodal_gen.configs.sample.sampling_params import MAX_FPS, MAX_FRAMES
from sglang.multimodal_gen.runtime.entrypoints.http.errors import invalid
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import GenerationSettings
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.keeping import VideoFormat

KIND = "video_generation"
"""What the records of these jobs are called."""
MAX_SECONDS = 86_400


class InputReference(BaseModel):
    """A picture that is named, not uploaded."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image_url: str | None = None
    file_id: str | None = None


class VideoSettings(GenerationSettings):
    """``POST /v1/videos``."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [
                {"prompt": "a red ball rolls to the right", "seed": 7},
                {"prompt": "snow", "seconds": "4", "size": "832x480"},
                {"prompt": "snow", "num_frames": 17, "fps": 8, "n": 2, "output_format": "webp"},
            ]
        },
    )
    not_sampling: ClassVar[frozenset[str]] = GenerationSettings.not_sampling | {
        "seconds", "input_reference", "output_format", "quality",
    }  # fmt: skip

    seconds: str | float | None = Field(
        None,
        description="Length, in place of num_frames: the nearest count of frames that the model "
        "can make is made.",
    )
    num_frames: int | None = Field(
        None,
        description="Frames of each video.",
        json_schema_extra={"minimum": 1, "maximum": MAX_FRAMES},
    )
    fps: int | None = Field(
        None,
        description="Frames a second at which it plays.",
        json_schema_extra={"minimum": 1, "maximum": MAX_FPS},
    )
    input_reference: str | InputReference | None = Field(
        None, description="A first picture, for models that take one. Better uploaded, in a form."
    )
    output_format: VideoFormat | None = Field(None, description="mp4 (the default), gif, webp.")
    quality: str | None = Field(None, description="Taken for compatibility; a warning says so.")

    @property
    def reference_address(self) -> str | None:
        """The picture's address, where one is named.

        Raises:
            ApiError: it is named in a way that leads nowhere here.
        """
        reference = self.input_reference
        if reference is None or isinstance(reference, str):
            return reference
        if reference.file_id is not None:
            message = "input_reference: file_id leads nowhere here; upload the picture"
            raise invalid("input_reference", message)
        if reference.image_url is None:
            raise invalid("input_reference", "input_reference: is empty; upload a picture")
        return reference.image_url

    @property
    def seconds_asked(self) -> float | None:
        """``seconds`` as a number.

        Raises:
            ApiError: it is none, or out of reason; or ``num_frames`` is given too.
        """
        if self.seconds is None:
            return None
        if self.num_frames is not None:
            raise invalid("seconds", "seconds: give either seconds or num_frames")
        try:
            seconds = float(self.seconds)
        except ValueError:
            seconds = float("nan")
        if not 0 < seconds <= MAX_SECONDS:
            shown = str(self.seconds)[:40]
            message = f"seconds={shown!r}: must be a number above 0, at most {MAX_SECONDS}"
            raise invalid("seconds", message)
        return seconds


class VideoObject(BaseModel):
    """A video, as OpenAI's API says it, and what this runtime knows besides.

    Times are seconds since 1970. ``seconds`` is whole where that is right within a frame.
    """

    id: str = Field(description="Also the job's, see /v1/jobs/{id}.")
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    progress: int = Field(description="Percent; 100 only when it can be fetched.")
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = Field(None, description="When its file goes.")
    seconds: str
    size: str
    prompt: str | None = None
    error: dict[str, Any] | None = None
    remixed_from_video_id: None = None
    num_frames: int
    fps: int
    n: int = Field(description="Videos of this request; fetch the others with ?index=1, ...")
    seeds: list[int] = Field(description="One for each video, once they are made.")
    warnings: list[str]


class VideoList(BaseModel):
    """A page of videos."""

    object: Literal["list"] = "list"
    data: list[VideoObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    """What is answered to ``DELETE``."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


EXAMPLE = {
    "id": "5c3f0c9f7a5b4e0f8f0d7d4c8e1b2a3d",
    "object": "video",
    "model": "demo-video",
    "status": "in_progress",
    "progress": 40,
    "created_at": 1760000000,
    "completed_at": None,
    "expires_at": None,
    "seconds": "4",
    "size": "832x480",
    "prompt": "snow",
    "error": None,
    "remixed_from_video_id": None,
    "num_frames": 97,
    "fps": 24,
    "n": 1,
    "seeds": [],
    "warnings": [],
}


def video_object(record: JobRecord, now: float) -> VideoObject:
    """A job's record as a video."""
    asked = record.settings
    made = record.results[0] if record.results else {}
    expires = made.get("expires_at")
    status: Any = record.status
    if expires is not None and expires <= now:
        status = "expired"
    frames, fps = made.get("num_frames", asked["num_frames"]), asked["fps"]
    prompt = asked.get("prompt")
    return VideoObject(
        id=record.id,
        model=record.model,
        status=status,
        progress=record.progress,
        created_at=int(record.created_at),
        completed_at=None if record.completed_at is None else int(record.completed_at),
        expires_at=None if expires is None else int(expires),
        seconds=shown_seconds(frames, fps),
        size=f"{asked['width']}x{asked['height']}",
        prompt=prompt if isinstance(prompt, str) else None,
        error=None if record.error is None else dict(record.error),
        num_frames=frames,
        fps=fps,
        n=asked.get("num_outputs_per_prompt", 1),
        seeds=[result["seed"] for result in record.results],
        warnings=list(record.warnings),
    )


def shown_seconds(frames: int, fps: int) -> str:
    """A clip's length in seconds: whole where that is right within a frame, else to milliseconds.

    Models make 4k + 1 frames, so that "4 seconds" are 97 frames of a 24th.
    """
    seconds = frames / fps
    whole = round(seconds)
    if whole >= 1 and abs(frames - whole * fps) <= 1:
        return str(whole)
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def effective(values: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Sampling values with those that a video object shows filled in from a family's params."""
    shown = ("width", "height", "num_frames", "fps")
    return {**values, **{name: getattr(defaults, name) for name in shown}}
