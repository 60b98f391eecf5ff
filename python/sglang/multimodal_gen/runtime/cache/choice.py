"""Whether a denoiser's GPU work is recorded: decided once, when its pipeline is built."""

from __future__ import annotations

from torch import nn

from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA
from sglang.multimodal_gen.runtime.memory.plan import (
    ACTIVATION_RESERVE,
    GIB,
    Residency,
    ResidencyPlan,
)
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

HEADROOM = 2 * ACTIVATION_RESERVE
"""Device memory beside the weights from which recording is chosen: a recording keeps activations,
and the VAE needs room for its own beside them."""
ON = (
    "CUDA graphs: on; each size and text length is recorded at its second step "
    "(--enable-cuda-graph false turns them off; requests with a step cache run without)"
)


def wants_graphs(
    wish: bool | None,
    denoiser: nn.Module,
    name: str,
    plan: ResidencyPlan,
    memory: MemoryFacts,
    *,
    device: str,
    check_stages: bool = False,
    attention: AttentionBackend = SDPA,
) -> tuple[bool, str | None]:
    """Whether to record, and the sentence about it where that was chosen for the user.

    All ranks must decide alike, so nothing is asked here that may differ between them: not what is
    free, but what the device has and the weights take.

    Args:
        wish: the user's; None leaves it open. Then it is on for classes that say
            ``graph_safe = True``: their forward neither waits for the GPU nor picks by values.
        name: the denoiser's, among the components of ``plan``.
        attention: what computes its attention.

    Raises:
        InvalidArgument: it is wished and cannot be.
    """
    if wish is False:
        return False, None
    problem = _obstacle(name, plan, device, check_stages, attention)
    if wish:
        if problem is not None:
            raise InvalidArgument("enable_cuda_graph", True, f"{problem}. Leave it out")
        return True, None
    if device == "cpu":
        return False, None
    if problem is None and not getattr(type(denoiser), "graph_safe", False):
        problem = f"{type(denoiser).__name__} does not say that it is graph_safe"
    total = memory.device_total
    if problem is None and total is not None and total - plan.device_bytes < HEADROOM:
        problem = f"less than {HEADROOM // GIB} GiB of the GPU are left beside the weights"
    return problem is None, ON if problem is None else f"CUDA graphs: off; {problem}"


def _obstacle(
    name: str, plan: ResidencyPlan, device: str, check_stages: bool, attention: AttentionBackend
) -> str | None:
    """Why it cannot be, if so."""
    if device != "cuda":
        return f"CUDA graphs need a CUDA GPU, and the device is {device}"
    if name in plan.sharded:
        return f"the weights of {name} are spread over ranks and gathered block by block"
    if plan[name].mode is not Residency.RESIDENT:
        return f"the weights of {name} move ({plan[name].mode.value}), and a graph needs them still"
    if not attention.graph_safe:
        return f"attention_backend={attention.name} goes by the values of masks, which graphs keep"
    if check_stages:
        return "stages are checked (check_stages), which is for porters, step by step"
    return None
