"""Turns "auto" into a choice, once, and says why.

A pure function of the arguments and the facts of the machine: it reads no environment, no device
and no checkpoint, so each choice can be tested and printed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang.multimodal_gen.runtime.platforms.device import DeviceFacts
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.server_args.resolve_parallel import resolve_parallel
from sglang.multimodal_gen.runtime.server_args.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

FP8_CAPABILITY = (8, 9)
"""From here on GPUs multiply in e4m3."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Arguments without any "auto", and one sentence for each choice made for the user."""

    args: ServerArgs
    notes: tuple[str, ...]


def resolve(
    args: ServerArgs, facts: DeviceFacts, launched: LaunchedRank | None = None
) -> Resolution:
    """Choose what was left open. Resolving a resolved value again changes and says nothing.

    ``launched`` is this process's place where torchrun started it.

    Raises InvalidArgument where an explicit wish cannot be met on this machine.
    """
    notes: list[str] = []
    device = _device(args, facts, notes)
    precision = _precision(args, device, notes)
    parallel = resolve_parallel(args.parallel, device, facts, launched, notes)
    compiled = args.speed.enable_torch_compile
    check_backend(args.model.backend, parallel, args.model.quantization, compiled=compiled)
    _check_quantization(args, device, facts)
    if compiled:
        _check_compile(args, parallel)
    chosen = dataclasses.replace(
        args,
        platform=dataclasses.replace(args.platform, device=device),
        model=dataclasses.replace(args.model, precision=precision),
        parallel=parallel,
    )
    return Resolution(chosen, tuple(notes))


def check_backend(
    backend: str,
    parallel: ParallelArgs,
    quantization: str | None = None,
    *,
    compiled: bool = False,
) -> None:
    """Refuse several ranks, quantisation and compiled blocks for a pipeline that knows of none of
    them: that of the Diffusers library."""
    if backend == "diffusers" and compiled:
        problem = (
            "a model that runs through Diffusers (backend=diffusers) is not compiled here; that "
            "needs a native family ('sglang models' lists them). Leave it out"
        )
        raise InvalidArgument("enable_torch_compile", True, problem)
    if backend == "diffusers" and quantization is not None:
        problem = (
            "a model that runs through Diffusers (backend=diffusers) is not quantised here; that "
            "needs a native family ('sglang models' lists them). Leave it out"
        )
        raise InvalidArgument("quantization", quantization, problem)
    ranks = parallel.layout.world_size
    if backend == "diffusers" and ranks > 1:
        problem = (
            "a model that runs through Diffusers (backend=diffusers) uses one rank; several need "
            "a native family ('sglang models' lists them)."
        )
        raise InvalidArgument("num_gpus", ranks, problem)


def _device(args: ServerArgs, facts: DeviceFacts, notes: list[str]) -> str:
    wish = args.platform.device
    if wish == "cuda" and not facts.cuda_available:
        problem = "no usable CUDA GPU is visible. Use --device cpu, or check the driver and the "
        raise InvalidArgument("device", wish, problem + "CUDA build of torch.")
    if wish != "auto":
        return wish
    if facts.cuda_available:
        notes.append(f"device cuda: {facts.name}, {facts.memory_bytes / 2**30:.0f} GiB")
        return "cuda"
    notes.append("device cpu: no usable CUDA GPU is visible")
    return "cpu"


def fp8_problem(capability: tuple[int, int] | None) -> str | None:
    """What a GPU of this compute capability lacks for products in eight bits; None if nothing."""
    if capability is None or capability >= FP8_CAPABILITY:
        return None
    need = ".".join(map(str, FP8_CAPABILITY))
    return (
        "products in e4m3 need tensor cores of compute capability "
        f"{need} (Ada, Hopper or newer), and this GPU has {capability[0]}.{capability[1]}"
    )


def _check_quantization(args: ServerArgs, device: str, facts: DeviceFacts) -> None:
    wish, ignored = args.model.quantization, args.model.quantization_ignored_layers
    if wish is None:
        if ignored:
            problem = "nothing is quantised without --quantization; give that, or leave it out"
            raise InvalidArgument("quantization_ignored_layers", ignored, problem)
        return
    if args.memory.use_fsdp_inference:
        problem = "weights that are spread over ranks (use_fsdp_inference) cannot be quantised"
        raise InvalidArgument("quantization", wish, f"{problem}; use one of the two")
    problem = fp8_problem(facts.capability) if device == "cuda" else None
    if problem is not None:
        raise InvalidArgument("quantization", wish, f"{problem}. Leave it out")


def _check_compile(args: ServerArgs, parallel: ParallelArgs) -> None:
    """Refuse what would break a block's graph, or be left out of it in silence."""
    layout = parallel.layout
    reason = None
    if args.model.quantization is not None:
        reason = (
            "weights in eight bits (--quantization) are multiplied by operators that pass rows "
            "with their scales from one to the next, which compiled code cannot"
        )
    elif args.memory.use_fsdp_inference:
        reason = "weights spread over ranks (--use-fsdp-inference) are gathered inside of blocks"
    elif layout.tp > 1 or layout.sp > 1:
        reason = (
            "blocks that send messages to other ranks (--tp-size, --sp-degree, --ulysses-degree, "
            "--ring-degree) are not compiled; CFG parallelism and replicas are"
        )
    if reason is not None:
        raise InvalidArgument("enable_torch_compile", True, f"{reason}. Use one of the two")


def _precision(args: ServerArgs, device: str, notes: list[str]) -> str:
    if args.model.precision != "auto":
        return args.model.precision
    if device == "cpu":
        notes.append("precision fp32: the CPU computes bf16 slowly or not at all")
        return "fp32"
    return "config"
