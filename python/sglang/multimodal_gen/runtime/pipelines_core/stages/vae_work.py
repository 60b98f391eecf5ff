"""How a VAE works for the stages that use it: on one rank or on all of a replica."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.first_tensor import first_tensor
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import RowsNotSeparable
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import ParallelTiledVAE
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs, VAEMode
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


class VAEWork:
    """The way chosen for one VAE and one decode group, once, when the stages are built.

    Args:
        vae: any autoencoder with ``encode`` and ``decode``; a `ParallelTiledVAE` can do more.
        group: the ranks that work on one request.
        args: what the operator asked for.

    Attributes:
        mode: how it works.
        reason: one sentence that says why.

    Raises:
        InvalidArgument: what was asked for cannot be done with this VAE.
    """

    def __init__(self, vae: Any, group: Group, args: VAEArgs) -> None:
        self.vae = vae
        self.group = group
        self.mode: VAEMode
        self.mode, self.reason = _choose(vae, group, args)

    def mode_for(self, latents: Tensor) -> VAEMode:
        """The way for these latents: too few rows for all ranks are decoded by one."""
        if self.mode == "spatial_shard" and not self.vae.can_shard_rows(latents.shape[-2]):
            return "plain"
        return self.mode

    def needs_this_rank(self, latents: Tensor) -> bool:
        """Whether this rank takes part in decoding."""
        return self.group.is_first or self.mode_for(latents) != "plain"

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [1, C, h, w] to pixels [1, 3, H, W] in -1..1, on the first rank.

        Ranks that only help get an empty tensor. Every rank that `needs_this_rank` calls this.
        """
        mode = self.mode_for(latents)
        if mode == "spatial_shard":
            return self.vae.spatial_shard_decode(latents)
        if mode == "tiled" and self.group.size > 1:
            return self.vae.parallel_tiled_decode(latents, self.group)
        decoded = self.vae.decode(latents, return_dict=False)
        return first_tensor(decoded)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [1, 3, H, W] in -1..1 to the mode of their latents, on every rank.

        Every rank calls this with the same pixels.
        """
        if self.mode == "plain" or self.group.size == 1:
            return self.vae.encode(pixels).latent_dist.mode()
        if self.mode == "tiled":
            moments = self.vae.parallel_tiled_encode(pixels, self.group)
        elif self.vae.can_shard_rows(pixels.shape[-2] // self.vae.spatial_compression_ratio):
            moments = self.vae.spatial_shard_encode(pixels)
        else:
            return self.vae.encode(pixels).latent_dist.mode()
        return self.vae.posterior(moments).latent_dist.mode()


def _choose(vae: Any, group: Group, args: VAEArgs) -> tuple[VAEMode, str]:
    wish, name, ranks = args.vae_mode, type(vae).__name__, group.size
    capable = isinstance(vae, ParallelTiledVAE)
    if wish in ("tiled", "spatial_shard") and not capable:
        problem = f"{name} is the library's own class, which works at once on one rank. Use 'plain'"
        raise InvalidArgument("vae_mode", wish, problem)
    if wish == "tiled":
        vae.enable_tiling(args.vae_tile_size, args.vae_tile_size)
        return "tiled", f"tiles of {vae.tiling.height}x{vae.tiling.width} pixels, as asked for"
    if wish == "plain" or (wish == "auto" and ranks == 1):
        return "plain", "as asked for" if wish == "plain" else "there is one rank"
    if not capable:
        return "plain", f"on one of {ranks} ranks: {name} is the library's own class"
    if ranks == 1:
        problem = "needs several ranks. Use 'tiled' to save memory on one"
        raise InvalidArgument("vae_mode", wish, problem)
    try:
        vae.enable_spatial_shard(group)
    except RowsNotSeparable as error:
        if wish == "spatial_shard":
            raise InvalidArgument("vae_mode", wish, f"{name}: {error}. Use 'tiled'") from error
        return "plain", f"on one of {ranks} ranks: {name}'s {error}"
    return "spatial_shard", f"each of {ranks} ranks holds a band of rows"
