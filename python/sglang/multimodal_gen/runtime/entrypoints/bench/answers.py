"""What came back: outcomes, and pictures compared with those made alone."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

TOLERANCE = 2
"""The most that a channel of a picture may differ from the one made alone, of 255."""

Kind = Literal["ok", "cancelled", "rejected", "error", "lost"]
Pictures = Sequence[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended.

    ``ok`` has pictures; ``cancelled`` is what the client wanted; ``rejected`` is 429; ``error`` any
    other refusal or failure that was told; ``lost`` never got an answer. Times are in seconds:
    ``at`` when it should have been sent, ``late`` by how much it was sent later than that.
    """

    entry: str
    kind: Kind
    at: float
    late: float
    seconds: float
    code: str | None = None
    status: int | None = None
    images: int = 0
    queue_seconds: float | None = None
    first_preview: float | None = None
    wrong: bool | None = None
    distance: int | None = None


def key_of(body: Mapping[str, Any]) -> str:
    """What decides a picture: the body without how it is sent."""
    wire = {"stream", "partial_images", "priority", "timeout", "user", "response_format"}
    return json.dumps({k: v for k, v in body.items() if k not in wire}, sort_keys=True)


def pictures_of(texts: Sequence[str]) -> list[np.ndarray]:
    """Pictures from base64: uint8 [H, W, 3]."""
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")) for text in texts
    ]


def distance(pictures: Pictures, alone: Pictures) -> int:
    """The largest difference of a channel; 255 where number or size differ."""
    if len(pictures) != len(alone):
        return 255
    largest = 0
    for one, other in zip(pictures, alone, strict=True):
        if one.shape != other.shape:
            return 255
        largest = max(largest, int(np.abs(one.astype(int) - other.astype(int)).max()))
    return largest
