"""One denoising step of FLUX.1-dev on several GPUs, beside the same step on one.

    python benchmarks/parallel_step.py --layout ulysses=2                 on two GPUs
    python benchmarks/parallel_step.py --layout tp=2 ulysses=2 ring=2 cfg=2   one after the other
    python benchmarks/parallel_step.py --layout cfg=2,ulysses=2           on four
    python benchmarks/parallel_step.py --toy --layout ulysses=2           tiny, CPUs: does it run?
    torchrun --nproc-per-node 2 benchmarks/parallel_step.py --layout ulysses=2

Prints a line of JSON for each layout. ``benchmarks/README.md`` says what is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flux_floor import FLUX_DEV, TOY, Workload
from flux_sides import Embeddings, RuntimeSide, first_prediction
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.layers.sequence_parallel import split_denoiser
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import guidance_for
from step_clock import Summary, synchronize, time_loop

TRUE_CFG_SCALE = 4.0
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Relative L2 of a prediction on many ranks to one rank's, that the dtype explains."""
TOY_CONFIG = {**TOY, "num_attention_heads": 4}
GROUPS = ("tp", "ulysses", "ring", "sp", "cfg")


@dataclass(frozen=True)
class Measured:
    """Some layout's loops, as this rank saw them."""

    time: Summary
    peak_gib: float
    prediction: Tensor
    latents: Tensor
    traffic: Mapping[str, Mapping[str, int]]
    graphs: Mapping[str, Any]
    """With CUDA graphs, where asked for: ``time``, ``equal`` (latents, bit for bit), counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of those that torchrun started."""
    options = _options(argv)
    if "RANK" in os.environ:
        return _rank_main(int(os.environ["RANK"]), None, options)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/store", options)
        mp.spawn(_rank_main, arguments, nprocs=options.layout[0].world_size)
    return 0


def _rank_main(rank: int, meeting: str | None, options: argparse.Namespace) -> int:
    """Measure one rank, then each layout, on this rank; a failed check ends the run."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu") if options.toy else torch.device("cuda", local)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    place: dict[str, Any] = {}
    if meeting is not None:
        place = {
            "init_method": meeting, "rank": rank, "world_size": options.layout[0].world_size
        }  # fmt: skip
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=300),
        device_id=device if on_gpu else None,
        **place,
    )
    try:
        _measure_all(options, device)
    finally:
        dist.destroy_process_group()
    return 0


def _measure_all(options: argparse.Namespace, device: torch.device) -> None:
    dtype = torch.float32 if options.toy else torch.bfloat16
    config = TOY_CONFIG if options.toy else FLUX_DEV
    work = Workload(config, options.batch, options.height, options.width, options.text_tokens)
    alone: dict[bool, Measured] = {}
    for layout in options.layout:
        guided = options.true_cfg or layout.cfg > 1
        if guided not in alone:
            alone[guided] = _measure(work, ParallelState.single(device), dtype, guided, options)
        together = _measure(work, ParallelState.create(layout, device), dtype, guided, options)
        record = _record(work, layout, guided, alone[guided], together, device, options)
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        if record["relative_l2_prediction"] > LIMITS[dtype] or not record["ranks_equal"]:
            raise SystemExit(f"FAILED: {_name(layout)} does not compute what one rank does")


def _measure(
    work: Workload,
    parallel: ParallelState,
    dtype: torch.dtype,
    guided: bool,
    options: argparse.Namespace,
) -> Measured:
    """Time, memory and result of a layout; all ranks call this together."""
    device = parallel.device
    side = RuntimeSide(
        build_transformer(work, dtype, parallel),
        work,
        embeddings(work, dtype, device),
        true_cfg_scale=TRUE_CFG_SCALE if guided else 1.0,
        guidance=guidance_for(parallel.cfg),
    )
    prediction = first_prediction(side)  # and the warm-up
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = {name: getattr(parallel, name).traffic.copy() for name in GROUPS}
    latents = side.loop(options.steps, lambda: None)
    traffic = {
        name: {verb: calls / options.steps for verb, calls in (now - before[name]).items()}
        for name in GROUPS
        if (now := getattr(parallel, name).traffic) - before[name]
    }
    synchronize(device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    time = _timed(side, options, device)
    graphs: dict[str, Any] = {}
    if options.graphs:
        side.use_graphs((parallel.tp, parallel.sp))
        side.loop(options.steps, lambda: None)  # records
        replayed = side.loop(options.steps, lambda: None)
        graphs = {"time": _timed(side, options, device), "equal": torch.equal(replayed, latents)}
        graphs |= side.graph_facts()
    result = Measured(time, peak, prediction, latents.float().cpu(), traffic, graphs)
    if side.graphs is not None:
        side.graphs.drop()  # messages are in them: before their groups end
    del side
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _timed(side: RuntimeSide, options: argparse.Namespace, device: torch.device) -> Summary:
    """Loops of all ranks together."""
    loops = []
    for _ in range(options.rounds):
        dist.barrier()
        loops.append(time_loop(side.loop, options.steps, device))
    steps = sorted(ms for loop in loops for ms in loop.steps_ms)
    whole = sorted(loop.whole_ms for loop in loops)
    return Summary(steps[len(steps) // 2], steps[0], steps[-1], len(steps), whole[len(whole) // 2])


def build_transformer(
    work: Workload, dtype: torch.dtype, parallel: ParallelState
) -> FluxTransformer2DModel:
    """The denoiser as this rank of the layout holds it.

    Random weights, made on the device, by the parameter's name: whatever a layout deals out is a
    slice of the same whole.
    """
    with torch.device("meta"):
        model = FluxTransformer2DModel(**work.config).eval()
    if parallel.tp.size > 1:
        _deal_weights(model, parallel)
    for name, empty in list(model.named_parameters()):
        shard = shard_of(empty)
        shape = empty.shape if shard is None else shard.whole_shape(empty.shape)
        generator = torch.Generator(parallel.device).manual_seed(zlib.crc32(name.encode()))
        is_norm = len(shape) == 1 and name.endswith("weight")
        whole = torch.empty(shape, dtype=dtype, device=parallel.device)
        whole.normal_(1.0 if is_norm else 0.0, 0.02, generator=generator)
        value = whole if shard is None else shard.of(whole).contiguous()
        parameter = torch.nn.Parameter(value, requires_grad=False)
        vars(parameter).update(vars(empty))
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameter)
    if parallel.device.type == "cuda":
        pack_linears(model)  # as the loader does
    split_denoiser(model, parallel, "transformer")
    return model


def _deal_weights(model: FluxTransformer2DModel, parallel: ParallelState) -> None:
    """Put the model's ``TP_PLAN`` in force, on meta."""
    plan = plan_of(type(model))
    assert plan is not None
    PlannedModel(model, plan).apply(parallel.tp)


def embeddings(work: Workload, dtype: torch.dtype, device: torch.device) -> Embeddings:
    """What text encoders would give; equal on all ranks."""
    generator = torch.Generator(device).manual_seed(1)
    shapes = (
        (work.batch, work.text_tokens, work.config["joint_attention_dim"]),
        (work.batch, work.config["pooled_projection_dim"]),
    )
    prompt, pooled = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes
    )
    return Embeddings(prompt, pooled)


def _record(
    work: Workload,
    layout: ParallelLayout,
    guided: bool,
    alone: Measured,
    together: Measured,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """What rank 0 prints; all ranks call this together."""
    mine = {
        "ms": together.time.median_ms,
        "peak_gib": together.peak_gib,
        "digest": zlib.crc32(together.latents.numpy().tobytes()),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    # Only the first branch's ranks predict what one rank predicts first.
    off = torch.tensor([_relative(together.prediction, alone.prediction)])
    if dist.get_rank() != 0:
        off.zero_()
    off = off.to(device)
    dist.broadcast(off, 0)
    return {
        "layout": _name(layout),
        "ranks": layout.world_size,
        "true_cfg": guided,
        "tokens": [work.image_tokens, work.text_tokens],
        "batch": work.batch,
        "one_rank_ms": alone.time.median_ms,
        "ms": together.time.median_ms,
        "slowest_rank_ms": max(rank["ms"] for rank in ranks),
        "speedup": alone.time.median_ms / together.time.median_ms,
        "one_rank_peak_gib": alone.peak_gib,
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "relative_l2_prediction": off.item(),
        "relative_l2_latents": _relative(together.latents, alone.latents),
        "ranks_equal": len({rank["digest"] for rank in ranks}) == 1,
        "messages_a_step": together.traffic,
        **_graph_record(alone, together),
        "one_rank": asdict(alone.time),
        "time": asdict(together.time),
        "steps": options.steps,
        "rounds": options.rounds,
        "device": torch.cuda.get_device_name(device) if not options.toy else platform.machine(),
        "torch": torch.__version__,
    }


def _graph_record(alone: Measured, together: Measured) -> dict[str, Any]:
    """The same figures with CUDA graphs, and the speed-up over one rank with and without them."""
    if not together.graphs:
        return {}
    one, many = alone.graphs["time"], together.graphs["time"]
    return {
        "graph_one_rank_ms": one.median_ms,
        "graph_ms": many.median_ms,
        "graph_min_ms": many.min_ms,
        "graph_max_ms": many.max_ms,
        "graph_whole_loop_ms": many.whole_loop_ms,
        "graph_speedup": one.median_ms / many.median_ms,
        "graph_speedup_over_one_without": alone.time.median_ms / many.median_ms,
        "graph_latents_equal": [alone.graphs["equal"], together.graphs["equal"]],
        "graph_facts": {k: v for k, v in together.graphs.items() if k not in ("time", "equal")},
    }


def _relative(measured: Tensor, expected: Tensor) -> float:
    return ((measured - expected).norm() / expected.norm()).item()


def _name(layout: ParallelLayout) -> str:
    sizes = {f.name: getattr(layout, f.name) for f in fields(layout)}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def _layout(text: str) -> ParallelLayout:
    """``ulysses=2,tp=2`` as a layout."""
    known = [f.name for f in fields(ParallelLayout) if f.name != "dp"]
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in known or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: write one of {known} as NAME=NUMBER")
        sizes[name] = int(size)
    return ParallelLayout(**sizes)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layout", type=_layout, nargs="+", required=True)
    parser.add_argument("--graphs", action="store_true", help="and each with CUDA graphs")
    parser.add_argument("--true-cfg", action="store_true", help="guidance also without cfg=2")
    parser.add_argument("--batch", type=int, default=1, help="images denoised together")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--text-tokens", type=int)
    parser.add_argument("--steps", type=int, help="steps a loop (at least 2; the first is set-up)")
    parser.add_argument("--rounds", type=int, help="loops of each layout")
    parser.add_argument("--toy", action="store_true", help="a tiny model on CPUs")
    parser.add_argument("--json", type=Path, help="append the lines to this file too")
    options = parser.parse_args(argv)
    sizes = ("height", "width", "text_tokens", "steps", "rounds")
    defaults = (64, 96, 32, 3, 2) if options.toy else (1024, 1024, 512, 6, 3)
    for name, default in zip(sizes, defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, the first shares its time with set-up")
    worlds = {layout.world_size for layout in options.layout}
    if len(worlds) > 1:
        parser.error(f"layouts of one run must have as many ranks as each other, not {worlds}")
    if not options.toy and torch.cuda.device_count() < max(worlds):
        parser.error(f"{max(worlds)} ranks need as many GPUs; --toy runs on the CPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
