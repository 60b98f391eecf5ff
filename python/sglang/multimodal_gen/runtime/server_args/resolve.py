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
    check_backend(args.model.backend, parallel)
    chosen = dataclasses.replace(
        args,
        platform=dataclasses.replace(args.platform, device=device),
        model=dataclasses.replace(args.model, precision=precision),
        parallel=parallel,
    )
    return Resolution(chosen, tuple(notes))


def check_backend(backend: str, parallel: ParallelArgs) -> None:
    """Refuse several ranks for a pipeline that knows of one: that of the Diffusers library."""
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


def _precision(args: ServerArgs, device: str, notes: list[str]) -> str:
    if args.model.precision != "auto":
        return args.model.precision
    if device == "cpu":
        notes.append("precision fp32: the CPU computes bf16 slowly or not at all")
        return "fp32"
    return "config"
