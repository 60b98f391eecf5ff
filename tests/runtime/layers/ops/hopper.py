"""Compiles each kernel for an H200 on any machine, as its launcher calls it; launches none.

Triton's interpreter, in which the other tests run, takes programs that its compiler refuses.
Prints the kernels' files, one for each compilation.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang.multimodal_gen.runtime.layers.ops.triton import (
    channel_norm_kernel,
    few_rows_kernel,
    group_norm_kernel,
    norm_modulate_kernel,
    qk_norm_rotary_kernel,
    quantize_heads_kernel,
    quantize_rows_kernel,
)


class Hopper:
    """As much of a driver as compiling asks for."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32,
            "max_num_regs": 65_536,
        }
    )  # fmt: skip

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")

    def map_python_to_cpp_type(self, kind):
        return kind


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def main():
    driver.set_active(Hopper())
    compile_and_launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        print(self.fn.__module__.rpartition(".")[2], flush=True)
        return kernel

    JITFunction.run = compile_only
    x, row, rows = empty(1, 64, 3072), empty(1, 1, 3072), empty(64, 3072)
    for gelu in (False, True):
        quantize_rows_kernel.launch(None, rows, gelu)
    quantize_rows_kernel.launch(rows, empty(64, 12288), True)
    for launch in (norm_modulate_kernel.launch, norm_modulate_kernel.launch_rows):
        launch(x, None, None, row, row, 1e-6)
        launch(x, row, x, row.float(), row.float(), 1e-6, True)
        launch(x, None, x, row.float(), row.float(), 1e-6)
    norm_modulate_kernel.launch(x, row, x, None, None, 1e-6)
    quantize_heads_kernel.launch(empty(2, 100, 3, 24, 128)[:, :, 1], 1e-12)
    heads, table = empty(1, 64, 24, 128), empty(64, 64, dtype=torch.float32)
    room = empty(1, 64, 1, 24, 128)
    for weight in (empty(128), empty(3072)):
        weights = (weight, weight)
        qk_norm_rotary_kernel.launch(
            heads, heads, heads, *weights, table, table, 1e-6, room, room, room
        )
    clip = empty(1, 96, 2, 8, 8).to(memory_format=torch.channels_last_3d)
    for silu, maps in ((True, clip), (False, clip.float())):
        channel_norm_kernel.launch(maps, empty(96), torch.empty_like(maps), 1.0, 1e-12, silu)
    picture = empty(1, 128, 16, 16).to(memory_format=torch.channels_last)
    for silu, maps in ((True, picture), (False, picture.float())):
        group_norm_kernel.launch(maps, empty(128), empty(128), 32, 1e-6, silu)
    weight = empty(6144, 3072, dtype=torch.float8_e4m3fn)
    for vectors in (empty(1, 3072), empty(16, 3072, dtype=torch.float32)):
        scale = empty(6144, 1, dtype=torch.float32)
        few_rows_kernel.launch(vectors, weight, scale, empty(6144))


main()
