"""What clients send to and get from the image routes, and send to others too, as OpenAI names it.

These classes say the shape alone: names, JSON types, and what belongs to the wire (formats,
streaming). Whether a value suits the model is for `SamplingParams` and admission, as for every
other door.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_INFERENCE_STEPS,
    MAX_OUTPUTS,
)
from sglang.multimodal_gen.runtime.entrypoints.http.errors import invalid
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.waiting_line import MAX_PRIORITY
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

OutputFormat = Literal["png", "jpeg", "webp"]
_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})", re.ASCII)

FIELD_OF = {"n": "num_outputs_per_prompt"}
"""API name -> sampling field, where they differ; ``size`` stands for two."""


class LoRAWeight(BaseModel):
    """One adapter of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(description="An adapter that the server has loaded.")
    weight: float = Field(1.0, description="Its weight; 0 leaves it out.")


class GenerationSettings(BaseModel):
    """What requests for pictures and for videos share. ``null`` is as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)
    not_sampling: ClassVar[frozenset[str]] = frozenset({"model", "size", "priority", "timeout", "user"})
    """Fields that are the wire's own, not sampling settings."""

    prompt: str | None = Field(None, description="What to make.")
    model: str | None = Field(None, description="The served model's name, see /v1/models.")
    n: int | None = Field(
        None,
        description="Outputs to make; output k has seed + k.",
        json_schema_extra={"minimum": 1, "maximum": MAX_OUTPUTS},
    )
    size: str | None = Field(
        None, description="WIDTHxHEIGHT in pixels, or 'auto' for the model's default."
    )
    width: int | None = Field(None, description="In place of size, with height.")
    height: int | None = Field(None, description="In place of size, with width.")
    seed: int | list[int] | None = Field(
        None, description="One seed, or one for each picture; left out or -1: random, and told."
    )
    negative_prompt: str | None = Field(None, description="What to keep away from.")
    num_inference_steps: int | None = Field(
        None,
        description="Denoising steps.",
        json_schema_extra={"minimum": 1, "maximum": MAX_INFERENCE_STEPS},
    )
    guidance_scale: float | None = Field(None, description="As the model was trained to take it.")
    true_cfg_scale: float | None = Field(None, description="Classifier-free guidance, above 1.")
    max_sequence_length: int | None = Field(None, description="Text tokens.")
    task_type: str | None = Field(None, description="For models that serve several, e.g. T2I.")
    lora: str | list[str | LoRAWeight] | None = Field(
        None, description="Loaded adapters for this request alone: NAME, NAME=WEIGHT, or objects."
    )
    priority: int | None = Field(
        None,
        description="0 is usual; each point counts as 10 seconds of waiting.",
        json_schema_extra={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    )
    timeout: float | None = Field(
        None, description="Seconds after which to give up with 504.", gt=0, le=7 * 86400
    )
    user: str | None = Field(None, description="Taken for compatibility; not used.")

    def sampling(self, family_fields: Collection[str]) -> dict[str, Any]:
        """The sampling settings by field, as far as they were sent.

        Raises:
            ApiError: a name that neither the API nor the model's family knows, or a size that is
                none.
        """
        values: dict[str, Any] = {}
        own = type(self).model_fields
        for name, value in self:
            if value is None or name in self.not_sampling:
                continue
            if name not in own and (name not in family_fields or name in _REFUSED):
                known = [*own, *(set(family_fields) - _REFUSED)]
                hint = did_you_mean(name, known)
                raise invalid(name, f"unknown parameter {name!r}.{hint}", code="unknown_parameter")
            if name == "lora":
                value = _adapters(value)
            values[FIELD_OF.get(name, name)] = value
        values |= self._size()
        return values

    def _size(self) -> dict[str, int]:
        if self.size is None or self.size == "auto":
            return {}
        match = _SIZE.fullmatch(self.size)
        if match is None:
            shown = self.size[:40]
            raise invalid("size", f"size={shown!r}: must be WIDTHxHEIGHT, such as 128x128, or auto")
        if self.width is not None or self.height is not None:
            raise invalid("size", "size: give either size, or width and height")
        return {"width": int(match[1]), "height": int(match[2])}


_REFUSED = PATH_SETTINGS | {"num_outputs_per_prompt"}


class ImageSettings(GenerationSettings):
    """What generations and edits share."""

    not_sampling: ClassVar[frozenset[str]] = GenerationSettings.not_sampling | {
        "response_format", "output_format", "output_compression", "background", "stream",
        "partial_images", "quality", "style", "moderation",
    }  # fmt: skip

    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="b64_json (the default) or url, a link that works for a while."
    )
    output_format: OutputFormat | None = Field(None, description="png (the default), jpeg, webp.")
    output_compression: int | None = Field(
        None, description="Quality of jpeg and webp, 0 to 100; 95 by default.", ge=0, le=100
    )
    background: Literal["auto", "opaque", "transparent"] | None = Field(
        None, description="auto or opaque; no model here makes transparent pictures."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    partial_images: int | None = Field(
        None, description="With stream: previews of each picture on its way.", ge=0, le=3
    )
    quality: str | None = Field(None, description="Taken for compatibility; a warning says so.")
    style: str | None = Field(None, description="Taken for compatibility; a warning says so.")
    moderation: str | None = Field(None, description="Taken for compatibility; a warning says so.")

    def warnings(self) -> list[str]:
        """What was sent and has no effect."""
        texts = [
            f"{name}={getattr(self, name)!r} has no effect on this server"
            for name in ("quality", "style", "moderation")
            if getattr(self, name) not in (None, "auto")
        ]
        if self.output_compression is not None and self.output_format in (None, "png"):
            texts.append("output_compression has no effect on png, which loses nothing")
        return texts

    def check_wire(self) -> None:
        """Refuse what the wire cannot do, whatever the model.

        Raises:
            ApiError: names the field.
        """
        if self.background == "transparent":
            raise invalid("background", "background: the model makes opaque pictures; use 'opaque'")
        if self.partial_images and not self.stream:
            raise invalid("partial_images", "partial_images: needs stream=true")
        if self.stream and self.response_format == "url":
            raise invalid("response_format", "response_format: a stream carries b64_json alone")


class ImageGeneration(ImageSettings):
    """``POST /v1/images/generations``."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [
                {"prompt": "a red circle on a white background", "seed": 7},
                {
                    "prompt": "a blue square",
                    "n": 2,
                    "size": "128x128",
                    "output_format": "webp",
                    "response_format": "url",
                },
                {"prompt": "a yellow star", "stream": True, "partial_images": 2},
            ]
        },
    )


class ImageData(BaseModel):
    """One picture: exactly one of ``b64_json`` and ``url``."""

    b64_json: str | None = None
    url: str | None = None
    seed: int = Field(description="Send it with n=1 to get this picture again.")


class ImageReply(BaseModel):
    """What the image routes answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "5c3f0c9f7a5b4e0f8f0d7d4c8e1b2a3d",
                    "created": 1760000000,
                    "model": "demo",
                    "data": [{"b64_json": "iVBORw0KGgo...", "seed": 7}],
                    "size": "128x128",
                    "output_format": "png",
                    "background": "opaque",
                    "warnings": [],
                    "seconds": {"queue": 0.0, "run": 1.9},
                }
            ]
        }
    )

    id: str = Field(description="The job, see /v1/jobs/{id}.")
    created: int
    model: str
    data: list[ImageData]
    size: str = Field(description="The pictures' true size.")
    output_format: OutputFormat
    background: Literal["opaque"] = "opaque"
    warnings: list[str]
    seconds: dict[str, float]


def as_client_named(field: str, sent: Mapping[str, Any]) -> str:
    """The name by which the client knows a sampling field that was refused."""
    if field in ("width", "height", "height*width") and sent.get("size") is not None:
        return "size"
    if field in ("num_frames", "num_frames*height*width"):
        return "num_frames" if sent.get("seconds") is None else "seconds"
    for name, sampling_name in FIELD_OF.items():
        if field == sampling_name:
            return name
    return field.split(".")[0]


def _adapters(value: str | list[str | LoRAWeight]) -> list[Any]:
    entries = [value] if isinstance(value, str) else value
    return [entry if isinstance(entry, str) else entry.model_dump() for entry in entries]
