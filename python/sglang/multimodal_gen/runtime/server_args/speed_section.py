"""The section of the server arguments about ways to the same picture in less time."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedArgs:
    """What is done for speed alone."""

    enable_cuda_graph: bool | None = flag(
        None,
        aliases=("--enable-breakable-cuda-graph",),
        help="Record the denoiser's GPU work at a size's second step, and replay it: the host no "
        "longer queues each kernel. Takes about the memory of one step's activations. Left out, it "
        "is on where the denoiser is known to allow it and its weights stay on the GPU.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
