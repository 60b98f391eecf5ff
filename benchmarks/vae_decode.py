"""One picture or clip through a published autoencoder: at once, in tiles, in bands of rows, beside
Diffusers' own module on the same weights.

    python benchmarks/vae_decode.py --ranks 2 --size 2048            two GPUs of this machine
    python benchmarks/vae_decode.py --model wan2.1-1.3b --height 480 --width 832 --frames 81 \\
        --dtype fp32 --modes plain diffusers                         a clip beside Diffusers
    torchrun --nproc-per-node 2 benchmarks/vae_decode.py --size 2048 the same, started by torchrun
    python benchmarks/vae_decode.py --toy --ranks 2                  tiny, on the CPU: does it run?

``benchmarks/README.md`` says what is measured, and holds the results.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from model_folders import MODELS
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

MODES = ("plain", "tiled", "spatial_shard", "diffusers")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One way to decode: time until the picture is on the first rank, and the worst rank's peak."""

    mode: str
    ranks: int
    median_ms: float
    min_ms: float
    max_ms: float
    peak_gib: float | None
    relative_l2: float
    exchanges: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks; the first prints a JSON line, then a table."""
    options = _options(argv)
    if "RANK" in os.environ:
        _rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
    elif options.ranks == 1:
        _rank_main(0, 1, f"tcp://127.0.0.1:{_free_port()}", options)
    else:
        address = f"tcp://127.0.0.1:{_free_port()}"
        mp.spawn(_rank_main, args=(options.ranks, address, options), nprocs=options.ranks)
    return 0


def _rank_main(rank: int, ranks: int, address: str, options: argparse.Namespace) -> None:
    device = torch.device("cpu")
    if not options.toy:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        # Off in the runtime; --cudnn-benchmark shows what it would bring.
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
        torch.backends.cudnn.allow_tf32 = not options.exact
        torch.backends.cuda.matmul.allow_tf32 = False
    backend = "gloo" if options.toy else "nccl"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    try:
        parallel = ParallelState.create(ParallelLayout(ulysses=ranks), device)
        with torch.inference_mode():
            rows = _measure(parallel, options)
        if rank == 0:
            _tell(rows, options, device)
    finally:
        dist.destroy_process_group()


def _measure(parallel: ParallelState, options: argparse.Namespace) -> list[Row]:
    group, device = parallel.replica, parallel.device
    dtype = torch.float32 if options.toy else DTYPES[options.dtype]
    vae, theirs = _autoencoders(options, device, dtype)
    z = _latents(vae, options).to(device, dtype)
    nothing = z.new_empty(0, 3, *(0 for _ in z.shape[2:]))

    def plain() -> Tensor:
        # By the public door, like the library's: it clamps what it hands out, where a model does.
        return vae.decode(z, return_dict=False)[0] if group.is_first else nothing

    def tiled() -> Tensor:
        if options.tile:
            vae.enable_tiling(options.tile, options.tile)
        try:
            return vae.parallel_tiled_decode(z, group)
        finally:
            vae.disable_tiling()

    def diffusers_own() -> Tensor:
        return theirs.decode(z, return_dict=False)[0] if group.is_first else nothing

    ways: dict[str, Callable[[], Tensor]] = {"plain": plain, "tiled": tiled}
    if group.size > 1:
        vae.enable_spatial_shard(group)
        ways["spatial_shard"] = lambda: vae.spatial_shard_decode(z)
    ways["diffusers"] = diffusers_own
    ways = {mode: way for mode, way in ways.items() if mode in options.modes}
    reference = plain().float().cpu()
    errors, exchanges = {}, {}
    for mode, way in ways.items():
        group.traffic.clear()
        picture = way().float().cpu()
        exchanges[mode] = dict(group.traffic)
        error = (picture - reference).norm() / reference.norm() if group.is_first else 0.0
        errors[mode] = float(error)
        del picture
    times, peaks = _time(ways, parallel, options)
    return [
        Row(
            mode,
            1 if mode in ("plain", "diffusers") else group.size,
            statistics.median(times[mode]),
            min(times[mode]),
            max(times[mode]),
            peaks[mode],
            errors[mode],
            exchanges[mode],
        )
        for mode in ways
    ]


def _autoencoders(
    options: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """This runtime's, with random weights, and the library's on the very same tensors."""
    component = MODELS[options.model].components["vae"]
    config = {**component.facts, **(component.toy if options.toy else {})}
    torch.manual_seed(0)
    ours: Any = ModelRegistry.resolve_model_cls(component.class_name)[0]
    vae = ours(**config).eval()
    nn.Module.to(vae, device, dtype)  # Diffusers' own warns of modules it has not
    with torch.device("meta"):
        theirs = getattr(diffusers, component.class_name)(**config).eval()
    theirs.load_state_dict(vae.state_dict(), assign=True)
    return vae, theirs


def _latents(vae: Any, options: argparse.Namespace) -> Tensor:
    """Noise of the size that the picture or clip has before it is decoded."""
    height, width = options.height or options.size, options.width or options.size
    channels = vae.config.get("z_dim") or vae.config["latent_channels"]
    ratio = vae.spatial_compression_ratio
    shape = [1, channels, height // ratio, width // ratio]
    if "z_dim" in vae.config:  # a clip's, of which a picture is one frame
        shape.insert(2, (options.frames - 1) // vae.temporal_compression_ratio + 1)
    elif options.frames != 1:
        raise SystemExit(f"--frames: {options.model} decodes pictures")
    return torch.randn(shape)


def _time(
    ways: Mapping[str, Callable[[], Tensor]], parallel: ParallelState, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Of each way, milliseconds of each repeat on this rank and the largest peak of all ranks in
    GiB. They take turns, each round in the other order: clocks, heat and neighbours hit all alike.
    """
    gpu = parallel.device.type == "cuda"
    times: dict[str, list[float]] = {mode: [] for mode in ways}
    highest = dict.fromkeys(ways, 0.0)
    for repeat in range(-options.warm_up, options.repeats):
        for mode in list(ways) if repeat % 2 == 0 else reversed(list(ways)):
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            parallel.control.barrier()
            start = time.perf_counter()
            ways[mode]()
            if gpu:
                torch.cuda.synchronize()
            if repeat < 0:
                continue
            times[mode].append(1000 * (time.perf_counter() - start))
            if gpu:
                highest[mode] = max(highest[mode], torch.cuda.max_memory_allocated() / 2**30)
    if not gpu:
        return times, dict.fromkeys(ways)
    mine = torch.tensor(list(highest.values()), dtype=torch.float64)[None]
    worst = parallel.control.all_gather(mine).amax(0).tolist()
    return times, dict(zip(ways, worst, strict=True))


def _tell(rows: Sequence[Row], options: argparse.Namespace, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = {
        "device": name,
        "torch": torch.__version__,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "rows": [asdict(row) for row in rows],
    }
    line = json.dumps(record)
    print(line, flush=True)
    if options.json:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(f"{'':14}{'ranks':>6}{'ms':>10}{'speed-up':>10}{'GiB':>8}{'of plain':>10}{'error':>10}")
    first = rows[0]
    for row in rows:
        gib = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        share = f"{row.peak_gib / first.peak_gib:.0%}" if row.peak_gib and first.peak_gib else ""
        faster = first.median_ms / row.median_ms
        print(
            f"{row.mode:14}{row.ranks:6}{row.median_ms:10.1f}{faster:10.2f}"
            f"{gib:>8}{share:>10}{row.relative_l2:10.1e}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs; torchrun says it itself")
    parser.add_argument("--model", choices=MODELS, default="flux-dev", help="whose autoencoder")
    parser.add_argument("--frames", type=int, default=1, help="of a clip")
    parser.add_argument("--size", type=int, default=2048, help="edge of the picture in pixels")
    parser.add_argument("--height", type=int, default=0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tile", type=int, default=0, help="edge of a tile; 1024 by default")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--exact", action="store_true", help="no TF32 in convolutions of fp32")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try all")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the JSON line here")
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args(argv)
    if options.toy and options.size == parser.get_default("size"):
        options.size, options.warm_up, options.repeats = 104, 0, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
