"""Whether and how a pipeline's denoisers are compiled: decided once, when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks, keep_compiled_code
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import (
    AttentionBackend,
    ByLength,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA, TorchSDPA
from sglang.multimodal_gen.runtime.layers.ops.operator import HAS_TRITON
from sglang.multimodal_gen.runtime.layers.quantization.install import method_of
from sglang.multimodal_gen.runtime.loader.denoiser_split import denoisers
from sglang.multimodal_gen.runtime.memory.layerwise import streams
from sglang.multimodal_gen.runtime.server_args.speed_section import SpeedArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

FLAG = "enable_torch_compile"


def attention_for_compiling(
    backend: AttentionBackend, note: str | None
) -> tuple[AttentionBackend, str | None]:
    """The attention of denoisers that are compiled, and the sentence about it.

    Raises:
        InvalidArgument: a library's kernel was asked for, which the compiler cannot see into.
    """
    if isinstance(backend, TorchSDPA):
        return backend, note
    if isinstance(backend, ByLength):
        return SDPA, "attention: torch's own alone, since FlashAttention's kernel is not compiled"
    problem = (
        "is not among the kernels that --enable-torch-compile compiles around; use torch_sdpa, or "
        "leave --enable-torch-compile out"
    )
    raise InvalidArgument("attention_backend", backend.name, problem)


def compile_denoisers(
    modules: Mapping[str, Any], names: Mapping[str, str], speed: SpeedArgs, device: str
) -> tuple[CompiledBlocks | None, str | None]:
    """The blocks of a pipeline's denoisers, compiled, and the sentence about it; None unless asked.

    Raises:
        InvalidArgument: they cannot be; the message says why, and what to leave out.
    """
    if not speed.enable_torch_compile:
        return None, None
    found = [name for name in denoisers(names) if isinstance(modules[name], nn.Module)]
    if not found:
        problem = f"no component of this pipeline ({', '.join(names)}) is a denoiser. Leave it out"
        raise InvalidArgument(FLAG, True, problem)
    for name in found:
        _check(name, modules[name])
    folder = keep_compiled_code()
    compiled = CompiledBlocks(speed.torch_compile_mode)
    for name in found:
        compiled.add(modules[name])
    return compiled, (
        f"torch.compile: {compiled.counters.blocks} blocks of {' and '.join(found)}, "
        f"{compiled.kinds} kinds of code; the first two sizes wait for the compiler; "
        f"its work is kept in {folder}"
    )


def check_machine(device: str) -> None:
    """Refuse where torch's compiler has nothing to compile with; asked before weights are read.

    Raises:
        InvalidArgument: Triton (on a GPU) or a C++ compiler (on a CPU) is missing.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    problem = None
    if device == "cuda" and not HAS_TRITON:
        problem = "on a GPU it needs Triton, which is not installed: pip install triton"
    elif device == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            problem = "on a CPU it needs a C++ compiler: install g++, or name one in CXX"
    if problem is not None:
        raise InvalidArgument(FLAG, True, f"{problem}. Or leave it out")


def _check(name: str, denoiser: nn.Module) -> None:
    if not streams(denoiser):
        problem = f"{type(denoiser).__name__} ({name}) names no repeated blocks (layer_names)"
        raise InvalidArgument(FLAG, True, f"{problem}. Leave it out")
    if any(method_of(module) is not None for module in denoiser.modules()):
        problem = (
            f"the weights of {name} are held in eight bits, whose operators pass rows with their "
            "scales from one to the next, which compiled code cannot. Leave it out, or use weights "
            "in 16 bits"
        )
        raise InvalidArgument(FLAG, True, problem)
