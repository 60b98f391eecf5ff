"""The section of the server arguments about ways to the same picture in less time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.configs.step_cache_choice import (
    OFF,
    StepCacheChoice,
    StepCacheWish,
    chosen,
    threshold_problem,
)
from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

AttentionChoice = Literal[
    "auto",
    "torch_sdpa",
    "torch_cudnn_sdpa",
    "cudnn_sdpa",
    "torch_flash_sdpa",
    "fa",
    "fa2",
    "fa3",
    "fa3_fp8",
    "fa4",
    "sage_attn",
    "flex",
]


TorchCompileMode = Literal["default", "max-autotune-no-cudagraphs"]


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

    enable_torch_compile: bool = flag(
        False,
        help="Let torch compile the denoiser's repeated blocks, at the first picture and at the "
        "first of a second size. What it made is kept on disk (TORCHINDUCTOR_CACHE_DIR).",
    )
    torch_compile_mode: TorchCompileMode = flag(
        "default",
        help="How long the compiler searches: 'max-autotune-no-cudagraphs' also times several "
        "kernels for each product, for minutes.",
    )

    attention_backend: AttentionChoice = flag(
        "auto",
        help="What computes attention: 'torch_sdpa', torch's own choice of kernel; its "
        "'torch_cudnn_sdpa' (or 'cudnn_sdpa') or 'torch_flash_sdpa' alone; FlashAttention 'fa2', "
        "'fa3', 'fa4', or 'fa' for the newest that is installed; 'fa3_fp8', with 8-bit queries, "
        "keys and values; 'sage_attn'; 'flex', whose masks leave out whole blocks. Those that know "
        "no masks leave masked calls to torch. 'auto' goes by what was measured on the GPU.",
    )

    default_step_cache: StepCacheWish = flag(
        "off",
        help="Leave out the denoiser's blocks at steps that change little, for requests that do "
        "not say otherwise: 'first-block' goes by what its first block contributes, 'teacache' by "
        "that block's input. Changes pictures slightly.",
    )
    default_step_cache_threshold: float | None = flag(
        None,
        help="Relative change from which blocks are computed again; more skips more. Left out, "
        "the method's own.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        mode = self.torch_compile_mode
        if mode != "default" and not self.enable_torch_compile:
            problem = "has no effect without --enable-torch-compile; give that, or leave it out"
            raise InvalidArgument("torch_compile_mode", mode, problem)
        threshold = self.default_step_cache_threshold
        if threshold is None:
            return
        if (problem := threshold_problem(threshold)) is not None:
            raise InvalidArgument("default_step_cache_threshold", threshold, problem)
        if self.default_step_cache == OFF:
            problem = "has no effect without --default-step-cache; choose a method, or leave it out"
            raise InvalidArgument("default_step_cache_threshold", threshold, problem)

    @property
    def step_cache_choice(self) -> StepCacheChoice | None:
        """What requests get that do not choose; None is off."""
        return chosen(self.default_step_cache, self.default_step_cache_threshold, None)
