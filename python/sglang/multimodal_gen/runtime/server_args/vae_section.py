"""The section of the server arguments about the VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

VAEMode = Literal["plain", "tiled", "spatial_shard"]
"""The ways a VAE works on one picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEArgs:
    """How pictures become latents and latents become pictures."""

    vae_mode: Literal["auto", "plain", "tiled", "spatial_shard"] = flag(
        "auto",
        aliases=("--vae-decode-mode", "--vae-config.parallel-decode-mode"),
        help="How the VAE encodes and decodes one picture: 'plain' at once, by one rank; 'tiled' "
        "in overlapping tiles, each by one rank, with less memory and nearly the same pixels; "
        "'spatial_shard' with a band of rows on each rank, and the same pixels. 'auto' is that "
        "with several ranks, if the VAE can, else 'plain'.",
    )
    vae_tile_size: int | None = flag(
        None,
        help="Edge of a tile in pixels; needs --vae-mode tiled. Left out, it is the size that the "
        "VAE was trained on; tiles much smaller than that may differ in colour.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vae_tile_size is not None and self.vae_mode != "tiled":
            problem = f"needs vae_mode='tiled', and that is {self.vae_mode!r}."
            raise InvalidArgument("vae_tile_size", self.vae_tile_size, problem)
