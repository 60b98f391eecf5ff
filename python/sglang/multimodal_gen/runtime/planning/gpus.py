"""GPUs by name: how much memory they have, and how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

GIB = 1 << 30

# Shares of the data sheet's numbers that were reached on an H200 (torch 2.11, cuDNN attention,
# docs of this project's benchmarks): 769 of 989 TFLOP/s in products, 555 in attention at FLUX's
# size; 4.0 of 4.8 TB/s in elementwise kernels. Taken to hold for its kin.
_PRODUCTS, _ATTENTION, _BANDWIDTH = 0.777, 0.56, 0.83
_BYTE_PRODUCTS = 0.70
"""In e4m3: 1,326 to 1,471 of 1,979 TFLOP/s."""
_LAUNCH = 2e-6
"""Seconds that the smallest kernel takes."""
_CONTEXT = GIB // 2
"""What CUDA and its libraries keep for themselves."""


_WORKSPACE, _LARGE_WORKSPACE = (2 * 4096 + 8 * 16) << 10, 32 << 20
"""What torch asks for on cuBLAS's behalf; the second on Hopper and Blackwell's data-center GPUs."""


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU by its data sheet: compute capability, GiB, dense TFLOP/s in 16 bits and (TF32 off) in
    32, TB/s of memory, GB/s of copies from pinned host memory, TFLOP/s in e4m3, 0 where it has no
    such products, and what cuBLAS takes through torch's allocator from the first product on."""

    name: str
    capability: tuple[int, int]
    gib: float
    half_tflops: float
    single_tflops: float
    terabytes: float
    link_gigabytes: float
    byte_tflops: float = 0.0
    workspace_bytes: int = _WORKSPACE

    @property
    def memory_bytes(self) -> int:
        """All of its memory."""
        return int(self.gib * GIB)

    @property
    def usable_bytes(self) -> int:
        """What is left for tensors."""
        return self.memory_bytes - _CONTEXT

    def seconds(self, kind: str, flops: float, nbytes: int, bits: int) -> float:
        """How long one kernel takes: bound by its arithmetic or by its memory traffic (roofline,
        Williams et al. 2009)."""
        share = _ATTENTION if kind == "attention" else _PRODUCTS
        peak = self.half_tflops if bits <= 16 else self.single_tflops
        if bits == 8 and kind == "product" and self.byte_tflops:
            peak, share = self.byte_tflops, _BYTE_PRODUCTS
        arithmetic = flops / (peak * share * 1e12)
        traffic = nbytes / (self.terabytes * _BANDWIDTH * 1e12)
        return max(arithmetic, traffic, _LAUNCH)

    def copy_seconds(self, nbytes: int) -> float:
        """How long weights take from pinned host memory."""
        return nbytes / (self.link_gigabytes * 1e9)


_TABLE = (
    GPU("h200", (9, 0), 139.8, 989, 67, 4.8, 55, 1979, _LARGE_WORKSPACE),
    GPU("h100", (9, 0), 79.1, 989, 67, 3.35, 55, 1979, _LARGE_WORKSPACE),
    GPU("h20", (9, 0), 95.0, 148, 44, 4.0, 55, 296, _LARGE_WORKSPACE),
    GPU("b200", (10, 0), 178.0, 2250, 80, 8.0, 55, 4500, _LARGE_WORKSPACE),
    GPU("a100-80g", (8, 0), 79.1, 312, 19.5, 2.0, 25),
    GPU("a100-40g", (8, 0), 39.4, 312, 19.5, 1.55, 25),
    GPU("l40s", (8, 9), 44.4, 362, 91, 0.864, 25, 733),
    GPU("l4", (8, 9), 22.0, 121, 30, 0.3, 25, 242),
    GPU("rtx-5090", (12, 0), 31.4, 210, 105, 1.79, 50, 419),
    GPU("rtx-4090", (8, 9), 23.5, 165, 82, 1.01, 25, 330),
    GPU("rtx-3090", (8, 6), 23.6, 71, 35, 0.936, 25),
)
GPUS: Mapping[str, GPU] = {gpu.name: gpu for gpu in _TABLE}
"""Name -> its numbers."""


def gpu_named(name: str) -> GPU:
    """The GPU of a name, in any case and with blanks or hyphens.

    Raises:
        InvalidArgument: it is not in the table; the nearest names are offered.
    """
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    key = key.removeprefix("nvidia-")
    if key not in GPUS:
        hint = did_you_mean(key, GPUS)
        raise InvalidArgument("gpu", name, f"is not known.{hint} Known: {', '.join(GPUS)}")
    return GPUS[key]
