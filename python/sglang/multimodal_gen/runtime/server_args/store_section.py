"""Flags on what survives the server: the job store, states of running work, webhooks."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreArgs:
    """What survives the server."""

    state_dir: str | None = flag(
        None,
        help="Folder for what outlives the server: its job store, files, and states of running "
        "work; by default the user's state folder (XDG_STATE_HOME), sglang-diffusion in it.",
    )
    job_store: str | None = flag(
        None,
        help="Where job records are: an address such as postgresql://USER@HOST/NAME or "
        "sqlite:///FILE; by default an SQLite file in --state-dir. 'memory' keeps nothing.",
    )
    job_lease: float = flag(
        15.0,
        help="Seconds after which another server on the same job store takes over the work of one "
        "that has gone silent.",
    )
    checkpoint_steps: int = flag(
        0, help="Keep the state of running work every so many denoising steps; 0: by time alone."
    )
    checkpoint_seconds: float = flag(
        10.0, help="Keep the state of running work every so many seconds; 0: by steps alone."
    )
    webhook_secret: str | None = flag(
        None,
        help="What webhooks are signed with (HMAC-SHA256), any text or whsec_ and base64; without "
        "one, here or in SGLANG_WEBHOOK_SECRET, requests may name no webhook. The environment is "
        "safer: other users of the machine can read flags.",
    )
    webhook_allow_private: bool = flag(
        False, help="Let webhooks go to private, loopback and link-local addresses."
    )
    webhook_attempts: int = flag(8, help="How often a webhook is tried, with growing pauses.")

    def __post_init__(self) -> None:
        check_fields(self)
        ranges = {
            "job_lease": (0.5, 3600.0),
            "checkpoint_steps": (0, 1000),
            "checkpoint_seconds": (0.0, 86400.0),
            "webhook_attempts": (1, 50),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                problem = f"must lie in {low:g}..{high:g}."
                raise InvalidArgument(name, getattr(self, name), problem)
        for name in ("state_dir", "job_store", "webhook_secret"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise InvalidArgument(name, value, "is blank. Leave it out for the default.")
