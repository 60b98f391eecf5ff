"""What ``sglang serve`` decides besides the model: where to listen, how much to take, what to keep.

Sections as in `sections`; they are the command's own, since no other door can honour them.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

WarmupMode = Literal["server", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpArgs:
    """Where the server listens, and how it stops."""

    host: str = flag("127.0.0.1", help="Address to listen on; 0.0.0.0 is every IPv4 address.")
    port: int = flag(30000, help="Port to listen on; 0 lets the system choose one.")
    public_url: str | None = flag(
        None,
        help="What clients put before /v1 to reach this server, for the links in replies; by "
        "default what the request itself used.",
    )
    served_model_name: str | None = flag(
        None, help="The model's name in the API; by default its bundled name, hub id or folder."
    )
    http_graceful_shutdown_timeout: float = flag(
        30.0, help="Seconds that running work may take to finish after SIGTERM or Ctrl-C."
    )
    warmup_mode: WarmupMode = flag(
        "server", help="'server' makes a picture before the server says that it is ready."
    )
    warmup_steps: int = flag(1, help="Denoising steps of the warm-up.")

    def __post_init__(self) -> None:
        check_fields(self)
        _check_range("port", self.port, 0, 65535)
        _check_range("warmup_steps", self.warmup_steps, 1, 1000)
        _check_range("http_graceful_shutdown_timeout", self.http_graceful_shutdown_timeout, 0, 3600)
        if not self.host.strip() or not _is_host(self.host):
            raise InvalidArgument("host", self.host, "is no host name or address.")
        if self.public_url is not None and not re.fullmatch(r"https?://[^\s?#]+", self.public_url):
            raise InvalidArgument("public_url", self.public_url, "must be an http(s) URL.")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise InvalidArgument("served_model_name", self.served_model_name, "is blank.")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueArgs:
    """How requests wait and are put together."""

    max_queued_requests: int = flag(
        128, help="Requests that may wait; one more is answered 429 with a time to retry."
    )
    batching_delay_ms: float = flag(
        0.0, help="Milliseconds that a batch with room waits for requests to share it."
    )
    request_timeout: float | None = flag(
        None, help="Seconds after which a request ends with 504, where it sets no limit itself."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_range("max_queued_requests", self.max_queued_requests, 1, 100_000)
        _check_range("batching_delay_ms", self.batching_delay_ms, 0, 60_000)
        if self.request_timeout is not None:
            _check_range("request_timeout", self.request_timeout, 0.001, 7 * 86400)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitArgs:
    """The most that one request may ask for or send."""

    max_images_per_request: int = flag(10, help="Images of one request (n).")
    max_prompt_characters: int = flag(8_000, help="Characters of a prompt.")
    max_image_pixels: int | None = flag(
        None, help="Pixels of a picture to make; by default what the model's config allows."
    )
    max_video_pixels: int | None = flag(
        None,
        help="Pixels of all frames of a request's videos together (n x frames x height x width); "
        "by default what the model's config allows for one.",
    )
    max_input_pixels: int = flag(
        64 * 2**20, help="Pixels of an uploaded picture, judged by its header."
    )
    max_input_video_pixels: int = flag(
        2**28, help="Pixels of an uploaded video, in all its frames together."
    )
    max_input_images: int = flag(16, help="Uploaded pictures of one request.")
    max_body_mb: float = flag(64.0, help="MiB of a request's body.")

    def __post_init__(self) -> None:
        check_fields(self)
        _check_range("max_images_per_request", self.max_images_per_request, 1, 1000)
        _check_range("max_prompt_characters", self.max_prompt_characters, 1, 100_000)
        _check_range("max_input_pixels", self.max_input_pixels, 1, 2**28)
        _check_range("max_input_video_pixels", self.max_input_video_pixels, 1, 2**32)
        _check_range("max_input_images", self.max_input_images, 1, 1000)
        _check_range("max_body_mb", self.max_body_mb, 0.001, 16_384)
        if self.max_image_pixels is not None:
            _check_range("max_image_pixels", self.max_image_pixels, 1, 2**28)
        if self.max_video_pixels is not None:
            _check_range("max_video_pixels", self.max_video_pixels, 1, 2**36)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepArgs:
    """What outlives a request, and for how long."""

    file_store: str | None = flag(
        None,
        help="Folder for the pictures that replies link to; by default one that is removed when "
        "the server stops. 'off' keeps none: replies then carry their pictures.",
    )
    file_ttl: float = flag(3600.0, help="Seconds that such a picture is kept.")
    job_ttl: float = flag(3600.0, help="Seconds that a finished job's record is kept.")
    lora_root: str | tuple[str, ...] = flag(
        default_factory=tuple,
        help="Folder(s) from which clients may load LoRA files, by name; without one they may not.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_range("file_ttl", self.file_ttl, 1, 366 * 86400)
        _check_range("job_ttl", self.job_ttl, 1, 366 * 86400)

    @property
    def lora_roots(self) -> tuple[str, ...]:
        """The folders as a tuple."""
        return (self.lora_root,) if isinstance(self.lora_root, str) else tuple(self.lora_root)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingArgs:
    """Everything of ``sglang serve`` that is not the model's."""

    http: HttpArgs
    queue: QueueArgs
    limits: LimitArgs
    keep: KeepArgs

    @classmethod
    def from_flat(cls, **values: object) -> ServingArgs:
        """From flat names, as the flags spell them; unknown names are a TypeError."""
        from sglang.multimodal_gen.runtime.server_args.flags import flags_of

        parts = {}
        for name, section in SECTIONS.items():
            own = {spec.name: spec for spec in flags_of(section)}
            mine = {key: own[key].accept(values.pop(key)) for key in list(values) if key in own}
            parts[name] = section(**mine)
        if values:
            raise TypeError(f"no such serving arguments: {', '.join(values)}")
        return cls(**parts)


SECTIONS = {"http": HttpArgs, "queue": QueueArgs, "limits": LimitArgs, "keep": KeepArgs}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(name, value, f"must lie in {low:g}..{high:g}.")


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", text) is not None
    return True
