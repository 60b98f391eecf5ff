"""FLUX.1-dev with all its weights in host memory, streamed by layers: peak memory and step time.

    python benchmarks/offload_step.py             full size, one GPU, 35 GiB of host memory
    python benchmarks/offload_step.py --check     and fail where a bar is missed
    python benchmarks/offload_step.py --toy       tiny, on the CPU: does the script still run?

Random weights go block by block into pinned host memory. Measured: the peak of a whole request
(text encoders, denoiser and VAE streamed), a streamed step, the bare transfer of the bytes that a
step streams, and the same step with resident weights. ``benchmarks/README.md`` has the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from flux_floor import Workload
from flux_sides import Embeddings, RuntimeSide, first_prediction
from offload_model import Model, full_size, resident_twin, toy
from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.sample.flux import FluxSamplingParams
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.pipelines.flux import FluxPipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent
from step_clock import alternate, synchronize

GIB = 1 << 30
PEAK_BAR_GIB = 8.0
STREAM_BAR = 1.1
COMPUTE_BAR = 1.05


@dataclass
class SizeResult:
    """One picture size: milliseconds a step, and what came of the comparison."""

    edge: int
    streamed_ms: float = 0.0
    resident_ms: float = 0.0
    bar: float = STREAM_BAR
    max_difference: float = 0.0
    ratio: float = 0.0


@dataclass
class Record:
    """Everything that is told, as it becomes known."""

    device: str
    torch: str
    setup_s: float = 0.0
    pin_s: float = 0.0
    pinned: bool = False
    host_gib: float = 0.0
    peak_gib: float = 0.0
    peak_until_decoding_gib: float = 0.0
    peak_reserved_gib: float = 0.0
    ring_gib: float = 0.0
    request_s: float = 0.0
    streamed_gib_a_step: float = 0.0
    transfer_ms: float = 0.0
    transfer_gib_a_s: float = 0.0
    prefetch_misses: int = 0
    sizes: list[SizeResult] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether the bars are met."""
    options = _options(argv)
    device = torch.device("cpu" if options.toy else "cuda")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record = Record(name, torch.__version__)
    start = time.perf_counter()
    model = toy(device) if options.toy else full_size(device, options.prefetch)
    synchronize(device)
    record.setup_s, record.pin_s = time.perf_counter() - start, model.pin_seconds
    record.pinned = all(part.host.pinned for part in model.parts.values())
    record.host_gib = sum(part.host.nbytes for part in model.parts.values()) / GIB
    print(
        f"{name}: {record.host_gib:.2f} GiB of weights in host memory after {record.setup_s:.1f} s "
        f"(pinning took {record.pin_s:.1f} s; pinned: {record.pinned})",
        flush=True,
    )
    edges = options.edges
    _whole_request(model, edges[0], device, record)
    _transfer(model, device, record)
    predictions = _streamed(model, edges, options, device, record)
    _resident(model, edges, options, device, record, predictions)
    print(json.dumps(record, default=vars), flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, default=vars, indent=2) + "\n", encoding="utf-8")
    return _verdict(record, check=options.check)


def _whole_request(model: Model, edge: int, device: torch.device, record: Record) -> None:
    """One request from prompt to pixels, every component streamed."""
    args = ServerArgs.from_flat(
        model_path="random", device=device.type, pipeline_config=FluxPipelineConfig()
    )
    pipeline = FluxPipeline("random", args, loaded_modules=model.modules)
    pipeline.residency = ResidencyManager(model.parts, pipeline.stage_uses, overlap=True)
    pipeline.executor.residency = pipeline.residency
    until_decoding: list[int] = []

    def listen(event: ProgressEvent) -> None:
        if event.phase == "denoise" and event.done == event.total:
            until_decoding.append(_peak(model, device))

    params = FluxSamplingParams(
        prompt="a benchmark", seed=0, height=edge, width=edge, num_inference_steps=3
    )
    control = RequestControl(listen)
    (batch,) = admit(params, FluxPipelineConfig(), batching_max_size=1, control=control)
    start = time.perf_counter()
    output = pipeline.forward(batch, args)
    record.request_s = time.perf_counter() - start
    assert output.output.isfinite().all()
    assert all(part.is_home for part in model.parts.values())
    record.peak_gib = _peak(model, device) / GIB
    record.peak_until_decoding_gib = until_decoding[0] / GIB
    if device.type == "cuda":
        record.peak_reserved_gib = torch.cuda.max_memory_reserved() / GIB
    record.ring_gib = model.parts["transformer"].device_bytes / GIB
    print(
        f"whole request at {edge}x{edge}: peak {record.peak_gib:.2f} GiB allocated "
        f"({record.peak_until_decoding_gib:.2f} until decoding; {record.peak_reserved_gib:.2f} "
        f"reserved), of them {record.ring_gib:.2f} for the denoiser's weights; "
        f"{record.request_s:.1f} s; stages: "
        + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in output.timings.items()),
        flush=True,
    )


def _transfer(model: Model, device: torch.device, record: Record) -> None:
    """The bytes of one step's stream, copied with nothing else to do: median of five."""
    stream = model.parts["transformer"].stream
    assert stream is not None
    groups = [group.host for group in stream.groups if group.host is not None]
    nbytes = sum(group.nbytes for group in groups)
    buffers = [torch.empty(stream.slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    seconds = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for index, group in enumerate(groups):
            buffers[index % 2][: group.nbytes].copy_(group, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    middle = sorted(seconds)[2]
    record.streamed_gib_a_step = nbytes / GIB
    record.transfer_ms, record.transfer_gib_a_s = middle * 1e3, nbytes / GIB / middle
    print(
        f"bare transfer of {nbytes / GIB:.2f} GiB: {middle * 1e3:.1f} ms "
        f"({record.transfer_gib_a_s:.1f} GiB/s)",
        flush=True,
    )


def _streamed(
    model: Model,
    edges: Sequence[int],
    options: argparse.Namespace,
    device: torch.device,
    record: Record,
) -> dict[int, Tensor]:
    """Streamed steps of each size; returns the first predictions."""
    part = model.parts["transformer"]
    predictions = {}
    for edge in edges:
        side = _side(model, model.modules["transformer"], edge, device)
        before = part.stream_counters.misses
        with ResidencyManager(model.parts, {}).use("transformer"):
            predictions[edge] = first_prediction(side)
            (summary,) = alternate([side.loop], options.steps, options.rounds, device)
        record.prefetch_misses += part.stream_counters.misses - before
        record.sizes.append(SizeResult(edge, streamed_ms=summary.median_ms))
        print(
            f"{edge}x{edge} streamed: {summary.median_ms:.1f} ms a step "
            f"({summary.min_ms:.1f}-{summary.max_ms:.1f})",
            flush=True,
        )
    return predictions


def _resident(
    model: Model,
    edges: Sequence[int],
    options: argparse.Namespace,
    device: torch.device,
    record: Record,
    predictions: Mapping[int, Tensor],
) -> None:
    """The same weights on the device for good; the bars."""
    twin = resident_twin(model, device)
    for result, edge in zip(record.sizes, edges, strict=True):
        side = _side(model, twin, edge, device)
        result.max_difference = (first_prediction(side) - predictions[edge]).abs().max().item()
        (summary,) = alternate([side.loop], options.steps, options.rounds, device)
        result.resident_ms = summary.median_ms
        floor = max(result.resident_ms, record.transfer_ms)
        result.bar = STREAM_BAR if record.transfer_ms > result.resident_ms else COMPUTE_BAR
        result.ratio = result.streamed_ms / floor
        print(
            f"{edge}x{edge} resident: {summary.median_ms:.1f} ms a step; streamed takes "
            f"{result.ratio:.3f} of the larger of that and the transfer (bar {result.bar}); "
            f"largest difference of a prediction {result.max_difference:.1e}",
            flush=True,
        )


def _side(model: Model, transformer: nn.Module, edge: int, device: torch.device) -> RuntimeSide:
    work = Workload(model.config, 1, edge, edge, model.text_tokens)
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    embeddings = Embeddings(
        noise(1, model.text_tokens, model.config["joint_attention_dim"]),
        noise(1, model.config["pooled_projection_dim"]),
    )
    return RuntimeSide(transformer, work, embeddings)  # pyright: ignore[reportArgumentType]


def _peak(model: Model, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return model.parts["transformer"].lane.peak


def _verdict(record: Record, *, check: bool) -> int:
    missed = []
    if record.peak_gib > PEAK_BAR_GIB:
        missed.append(f"peak {record.peak_gib:.2f} GiB is above {PEAK_BAR_GIB}")
    for size in record.sizes:
        if size.ratio > size.bar:
            missed.append(f"{size.edge}x{size.edge}: {size.ratio:.3f} is above {size.bar}")
    wrong = [size for size in record.sizes if size.max_difference != 0]
    for line in (*missed, *(f"{size.edge}: predictions differ" for size in wrong)):
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if wrong or (check and missed) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--edges", type=int, nargs="+", help="picture sizes; the first is decoded")
    parser.add_argument("--prefetch", type=int, default=1, help="blocks fetched ahead")
    parser.add_argument("--steps", type=int, default=5, help="steps a loop (at least 2)")
    parser.add_argument("--rounds", type=int, default=2, help="loops a size")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--check", action="store_true", help="fail where a bar is missed")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args(argv)
    if options.edges is None:
        options.edges = [64, 96] if options.toy else [1024, 2048]
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, the first shares its time with set-up")
    if not options.toy and not torch.cuda.is_available():
        parser.error("full size needs a CUDA GPU; --toy runs on the CPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
