"""What the stages that encode with a VAE have in common."""

from __future__ import annotations

from typing import Any

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs


class VAEEncodingStage(PipelineStage):
    """Base of stages that encode with the VAE; a subclass says what.

    Args:
        vae: the autoencoder.
        parallel: this rank's place; the replica's ranks encode together, and all have the latents.
        args: how they go about it.

    Raises:
        InvalidArgument: the VAE cannot do what ``args`` say.
    """

    uses = ("vae",)

    def __init__(
        self, vae: Any, parallel: ParallelState | None = None, args: VAEArgs | None = None
    ) -> None:
        parallel = ParallelState.single() if parallel is None else parallel
        self.vae = vae
        self.work = VAEWork(vae, parallel.replica, VAEArgs() if args is None else args)
