"""One picture through FLUX.1's autoencoder: at once, in tiles, in bands of rows on several GPUs.

    python benchmarks/vae_decode.py --ranks 2 --size 2048            two GPUs of this machine
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL

FLUX: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TOY = FLUX | {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4, "sample_size": 64}
MODES = ("plain", "tiled", "spatial_shard")
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
    torch.manual_seed(0)
    vae = AutoencoderKL(**(TOY if options.toy else FLUX)).eval()
    torch.nn.Module.to(vae, device, dtype)  # Diffusers' own warns of modules it has not
    height, width = options.height or options.size, options.width or options.size
    z = torch.randn(1, 16, height // 8, width // 8).to(device, dtype)

    def plain() -> Tensor:
        return vae._decode(z) if group.is_first else z.new_empty(0, 3, 0, 0)

    def tiled() -> Tensor:
        return vae.parallel_tiled_decode(z, group)

    ways: dict[str, Callable[[], Tensor]] = {"plain": plain, "tiled": tiled}
    if group.size > 1:
        vae.enable_spatial_shard(group)
        ways["spatial_shard"] = lambda: vae.spatial_shard_decode(z)
    if options.tile:
        vae.enable_tiling(options.tile, options.tile)
    reference = plain().float().cpu()
    rows = []
    for mode in [mode for mode in options.modes if mode in ways]:
        group.traffic.clear()
        picture = ways[mode]().float().cpu()
        exchanges = dict(group.traffic)
        error = (picture - reference).norm() / reference.norm() if group.is_first else 0.0
        del picture
        times, peak = _time(ways[mode], parallel, options)
        rows.append(
            Row(
                mode,
                1 if mode == "plain" else group.size,
                statistics.median(times),
                min(times),
                max(times),
                peak,
                float(error),
                exchanges,
            )
        )
    return rows


def _time(
    work: Callable[[], Tensor], parallel: ParallelState, options: argparse.Namespace
) -> tuple[list[float], float | None]:
    """Milliseconds of each repeat on this rank, and the largest peak of all ranks in GiB."""
    gpu = parallel.device.type == "cuda"
    for _ in range(options.warm_up):
        work()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.repeats):
        parallel.control.barrier()
        start = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    if not gpu:
        return times, None
    mine = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], dtype=torch.float64)
    return times, parallel.control.all_gather(mine).max().item()


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
