"""One denoising step of FLUX.1-dev: Diffusers and this runtime side by side, on the same weights.

    python benchmarks/denoise_step.py                   full size, one GPU
    python benchmarks/denoise_step.py --compile         and Diffusers with its blocks compiled
    python benchmarks/denoise_step.py --compile-ours    and this runtime with its blocks compiled
    python benchmarks/denoise_step.py --graphs          and this runtime with CUDA graphs
    python benchmarks/denoise_step.py --quantization fp8    and this runtime in eight bits
    python benchmarks/denoise_step.py --toy             tiny, on the CPU: does the script still run?

``benchmarks/README.md`` says what is measured, and holds the results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from flux_floor import FLUX_DEV, TOY, Operations, Workload, count_operations
from flux_sides import (
    DiffusersSide,
    RuntimeSide,
    first_prediction,
    make_sides,
    quantized_side,
    same_weights,
)
from step_clock import Summary, alternate, peak_gib

OURS, THEIRS, COMPILED = "this runtime", "diffusers", "diffusers, compiled"
GRAPHS = "this runtime, graphs"
MODES = ("default", "max-autotune-no-cudagraphs")
OURS_COMPILED = "this runtime, compiled"
QUANTIZED = "this runtime, {}"
QUANTIZED_LIMIT = 0.2
"""Relative L2 of a prediction in eight bits to the same weights' in more."""
SAME_WEIGHTS_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Relative L2 of two predictions that must not differ by more than the dtype explains."""


@dataclass(frozen=True)
class Row:
    """One side's line in the table."""

    side: str
    time: Summary
    floor_percent: float
    peak_gib: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether both sides computed the same."""
    options = _options(argv)
    device = torch.device("cpu" if options.toy else "cuda")
    dtype = torch.float32 if options.toy else torch.bfloat16
    work = Workload(
        TOY if options.toy else FLUX_DEV,
        options.batch,
        options.height,
        options.width,
        options.text_tokens,
    )
    operations = count_operations(work)
    floor = operations.floor_ms(options.linear_tflops, options.attention_tflops)
    _print_header(work, operations, floor, options, device, dtype)

    theirs, ours = make_sides(work, device, dtype)
    agreement = relative_l2(first_prediction(ours), first_prediction(theirs))
    print(f"relative L2 of one prediction, ours to diffusers': {agreement:.2e}", flush=True)
    record: dict[str, Any] = {
        "workload": asdict(work),
        "operations": operations.to_dict(),
        "floor_ms": floor,
        "relative_l2": agreement,
        "machine": _machine(device),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
    }
    extras: dict[str, RuntimeSide] = {}
    graphed: dict[str, tuple[RuntimeSide, RuntimeSide]] = {}
    if options.quantization:
        quantized = QUANTIZED.format(options.quantization)
        extras[quantized] = _in_eight_bits(ours, options, record)
        if options.graphs:
            side = extras[quantized]
            graphed[f"{quantized}, graphs"] = side, _with_graphs(side)
    if options.graphs:
        graphed[GRAPHS] = ours, _with_graphs(ours)
    extras |= {name: side for name, (_, side) in graphed.items()}
    if options.compile_ours:
        side = same_weights(ours)
        _compiled_side(side, options, record)
        extras[OURS_COMPILED] = side
    rows = _measure(ours, theirs, floor, options, device, extras=extras)
    record["graphs"] = {
        name: _compare_graphs(name, *pair, options.steps) for name, pair in graphed.items()
    }
    unequal = [name for name, facts in record["graphs"].items() if not facts["equal"]]
    _tell(record, rows, options)
    if options.compile:
        # Told and written first: compiling takes minutes, and lent machines have limits.
        record["compile_wait_s"] = _compile(theirs, options.steps)
        rows += _measure(ours, theirs, floor, options, device, COMPILED, extras)
        _tell(record, rows, options)
        print(f"wait for the first compiled loop: {record['compile_wait_s']:.1f} s")
    return _verdict(agreement, dtype, unequal, rows, check=options.check)


def _tell(record: dict[str, Any], rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the table so far, and write everything so far."""
    record |= {"rows": [asdict(row) for row in rows], "ratios": _print_rows(rows)}
    sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def relative_l2(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """``|measured - expected| / |expected|``."""
    return ((measured - expected).norm() / expected.norm()).item()


def _measure(
    ours: RuntimeSide,
    theirs: DiffusersSide,
    floor: float,
    options: argparse.Namespace,
    device: torch.device,
    their_name: str = THEIRS,
    extras: Mapping[str, RuntimeSide] | None = None,
) -> list[Row]:
    """All sides in turn, after a warm-up of each; memory before time, one side at a time."""
    sides: list[tuple[str, Any]] = [(their_name, theirs), (OURS, ours), *(extras or {}).items()]
    for _, side in sides:
        side.loop(options.steps, lambda: None)
    peaks = [
        peak_gib(side.loop, side.transformer, [other.transformer for _, other in sides])
        if device.type == "cuda"
        else None
        for _, side in sides
    ]
    times = alternate([side.loop for _, side in sides], options.steps, options.rounds, device)
    return [
        Row(name, summary, 100 * floor / summary.median_ms, peak)
        for (name, _), summary, peak in zip(sides, times, peaks, strict=True)
    ]


def _in_eight_bits(
    ours: RuntimeSide, options: argparse.Namespace, record: dict[str, Any]
) -> RuntimeSide:
    """Our side on the same weights, quantised as the flag of this name does; both are compared.

    Raises:
        SystemExit: it says something else than rounding explains, or the same.
    """
    side = quantized_side(ours, options.quantization)
    error = relative_l2(first_prediction(side), first_prediction(ours))
    sizes = [sum(p.nbytes for p in s.transformer.parameters()) for s in (side, ours)]
    record["quantized"] = {"relative_l2": error, "bytes": sizes[0], "bytes_before": sizes[1]}
    print(
        f"{options.quantization}: relative L2 of one prediction {error:.2e}; "
        f"{sizes[0] / 2**30:.3f} GiB of weights, {sizes[0] / sizes[1]:.3f} of those before",
        flush=True,
    )
    if not 1e-4 < error < QUANTIZED_LIMIT:
        raise SystemExit(f"FAILED: {error:.2e} is not between 1e-4 and {QUANTIZED_LIMIT}")
    return side


def _with_graphs(ours: RuntimeSide) -> RuntimeSide:
    """Our side once more, on the same module, with its work recorded."""
    side = RuntimeSide(ours.transformer, ours.work, ours.embeddings)
    side.use_graphs()
    return side


def _compare_graphs(
    name: str, ours: RuntimeSide, graphs: RuntimeSide, steps: int
) -> dict[str, Any]:
    """Whether replayed loops give what direct ones give, and what was recorded."""
    expected, found = ours.loop(steps, lambda: None), graphs.loop(steps, lambda: None)
    equal = torch.equal(expected, found)
    facts = graphs.graph_facts()
    print(f"{name}: latents equal those without, bit for bit: {equal}; {facts}", flush=True)
    return {
        "equal": equal,
        "relative_l2": relative_l2(found.float(), expected.float()),
        "recordings": facts,
    }


def _compile(theirs: DiffusersSide, steps: int) -> float:
    """Compile Diffusers' blocks in place; returns the seconds until the first loop is through."""
    start = time.perf_counter()
    theirs.transformer.compile_repeated_blocks(fullgraph=True)
    theirs.loop(steps, lambda: None)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _compiled_side(ours: RuntimeSide, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Our side compiled from now on, as the flag does; what it took and what it says is recorded.

    Raises:
        SystemExit: blocks were left out, or it says something else than rounding explains.
    """
    expected = first_prediction(ours)
    facts = ours.use_compiled_blocks(options.compile_mode)
    start = time.perf_counter()
    ours.loop(options.steps, lambda: None)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wait = time.perf_counter() - start
    error = relative_l2(first_prediction(ours), expected)
    record["our_compiled"] = {"wait_s": wait, "relative_l2": error, **asdict(facts)}
    print(
        f"ours compiled ({options.compile_mode}): {wait:.1f} s until the first loop is through; "
        f"{facts}; relative L2 of one prediction {error:.2e}",
        flush=True,
    )
    if not facts.blocks or facts.direct or not error <= SAME_WEIGHTS_LIMIT[torch.bfloat16]:
        raise SystemExit("FAILED: blocks that are not compiled, or another prediction")


def _verdict(
    agreement: float,
    dtype: torch.dtype,
    unequal: Sequence[str],
    rows: Sequence[Row],
    *,
    check: bool,
) -> int:
    """The exit code; ``unequal`` are the sides whose replays differ from their direct calls."""
    if not agreement <= SAME_WEIGHTS_LIMIT[dtype]:
        print(f"FAILED: both sides must agree to {SAME_WEIGHTS_LIMIT[dtype]:.0e}", file=sys.stderr)
        return 1
    if unequal:
        print(f"FAILED: other latents than without: {'; '.join(unequal)}", file=sys.stderr)
        return 1
    theirs, ours = rows[:2]
    if check and ours.time.median_ms > theirs.time.median_ms:
        print("FAILED: a step takes longer than eager diffusers'", file=sys.stderr)
        return 1
    if check and (ours.peak_gib or 0.0) > (theirs.peak_gib or 0.0):
        print("FAILED: peak memory is above diffusers'", file=sys.stderr)
        return 1
    return 0


def _print_header(
    work: Workload,
    operations: Operations,
    floor: float,
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    machine = _machine(device)
    name = "toy" if options.toy else "FLUX.1-dev"
    print(
        f"{name}, {work.height}x{work.width}, batch {work.batch}, {work.image_tokens} image + "
        f"{work.text_tokens} text tokens, {dtype}, on {machine['device']}, torch {machine['torch']}"
    )
    print(
        f"floor {floor:.4g} ms = {operations.linears / 1e12:.4g} TFLOP of linears at "
        f"{options.linear_tflops:g} TFLOP/s + {operations.attention / 1e12:.4g} TFLOP of attention "
        f"at {options.attention_tflops:g} TFLOP/s"
    )


def _print_rows(rows: Sequence[Row]) -> dict[str, float]:
    """The table, and our ratio to each other side (within the same rounds)."""
    print(f"{'':22}{'ms a step':>10}{'min':>9}{'max':>9}{'of floor':>10}{'loop ms':>10}{'GiB':>8}")
    for row in rows:
        t = row.time
        peak = "" if row.peak_gib is None else f"{row.peak_gib:8.2f}"
        print(
            f"{row.side:22}{t.median_ms:10.2f}{t.min_ms:9.2f}{t.max_ms:9.2f}"
            f"{row.floor_percent:9.1f}%{t.whole_loop_ms:10.1f}{peak}"
        )
    ratios: dict[str, float] = {}
    theirs = rows[0]
    for row in rows:
        if row.side in (THEIRS, COMPILED):
            theirs = row
            continue
        name = theirs.side if row.side == OURS else f"{row.side} / {theirs.side}"
        ratios[name] = row.time.median_ms / theirs.time.median_ms
        whole = row.time.whole_loop_ms / theirs.time.whole_loop_ms
        print(f"{row.side} to {theirs.side}: {ratios[name]:.3f} a step, {whole:.3f} whole loop")
    return ratios


def _machine(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=1, help="images denoised together")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--text-tokens", type=int)
    parser.add_argument("--steps", type=int, help="steps a loop (at least 2; the first is set-up)")
    parser.add_argument("--rounds", type=int, help="loops a side, sides in turn")
    parser.add_argument("--graphs", action="store_true", help="this runtime with graphs as well")
    parser.add_argument("--quantization", choices=("fp8", "fp8-tensor"), help="in eight bits too")
    parser.add_argument("--compile", action="store_true", help="also compile diffusers' blocks")
    parser.add_argument("--compile-ours", action="store_true", help="this runtime's blocks too")
    parser.add_argument("--compile-mode", choices=MODES, default=MODES[0], help="how ours are")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--check", action="store_true", help="fail if slower or larger than eager")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--linear-tflops", type=float, default=769.0)
    parser.add_argument("--attention-tflops", type=float, default=553.0)
    options = parser.parse_args(argv)
    sizes = ("height", "width", "text_tokens", "steps", "rounds")
    defaults = (64, 96, 32, 3, 2) if options.toy else (1024, 1024, 512, 8, 6)
    for name, default in zip(sizes, defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, the first shares its time with set-up")
    if not options.toy and not torch.cuda.is_available():
        parser.error("full size needs a CUDA GPU; --toy runs on the CPU")
    if options.toy and options.compile:
        parser.error("--compile is for full size; leave out --toy")
    return options


if __name__ == "__main__":
    sys.exit(main())
