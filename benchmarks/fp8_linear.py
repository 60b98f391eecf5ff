"""One linear of FLUX.1 in eight bits: this runtime's methods, and torchao's where it is installed.

    python benchmarks/fp8_linear.py              one GPU of compute capability 8.9 or more
    python benchmarks/fp8_linear.py --toy        tiny, on the CPU: does it run?

Each side is given the same bf16 input and weight, quantises the input as it comes and returns bf16.
``row, input quantised before`` is what a block sees where a norm or GELU made the rows in its own
pass. The last line is JSON. Results: ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method, QuantizedRows

TOKENS, WIDTH = 4608, 3072
SHAPES = {
    "q, k, v": (WIDTH, 3 * WIDTH),
    "feed-forward, up": (WIDTH, 4 * WIDTH),
    "feed-forward, down": (4 * WIDTH, WIDTH),
    "single block, out": (5 * WIDTH, WIDTH),
}

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One side at one shape: median of the repeats, and relative L2 to the product in float32."""

    linear: str
    side: str
    microseconds: float
    tflops: float
    relative_l2: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(argv)
    if not options.toy and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --toy runs on the CPU")
    device = torch.device("cpu" if options.toy else "cuda")
    rows = []
    if not has_torchao():
        print("torchao is not installed: it is left out")
    for name, (inputs, outputs) in SHAPES.items():
        tokens = TOKENS
        if options.toy:
            tokens, inputs, outputs = 64, inputs // 64, outputs // 64
        for row in _measured(name, tokens, inputs, outputs, device, options.repeats):
            print(
                f"{row.linear:20} {row.side:30} {row.microseconds:9.1f} us {row.tflops:8.1f} "
                f"TFLOP/s  error {row.relative_l2:.1e}",
                flush=True,
            )
            rows.append(row)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    told = {"device": where, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    print(json.dumps(told))
    return 0


def has_torchao() -> bool:
    """Whether it can be compared with."""
    return importlib.util.find_spec("torchao") is not None


@torch.inference_mode()
def _measured(
    name: str, tokens: int, inputs: int, outputs: int, device: torch.device, repeats: int
) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device=device).mul_(by).bfloat16()
        for shape, by in (((tokens, inputs), 1.0), ((outputs, inputs), 0.02), ((outputs,), 0.02))
    )
    exact = F.linear(x.float(), weight.float(), bias.float())
    for side, call in _sides(x, weight, bias):
        error = (call(x).float() - exact).norm() / exact.norm()
        seconds = _seconds(lambda call=call: call(x), device, repeats)
        flops = 2 * tokens * inputs * outputs
        yield Row(name, side, 1e6 * seconds, flops / seconds / 1e12, error.item())


def _sides(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Linear]]:
    yield "bf16", lambda x: F.linear(x, weight, bias)
    by_row, by_tensor = Fp8Method("row"), Fp8Method("tensor")
    held = by_row.quantize_weight(weight)
    yield "row", partial(_whole, by_row, held, bias)
    yield "row, input quantised before", partial(_product, by_row, by_row.rows(x), held, bias)
    yield "tensor", partial(_whole, by_tensor, by_tensor.quantize_weight(weight), bias)
    if has_torchao() and x.is_cuda:
        theirs = _torchao(weight, bias)
        yield "torchao, row", theirs
        yield "torchao, row, compiled", torch.compile(theirs)


def _whole(method: Fp8Method, held: tuple[Tensor, Tensor], bias: Tensor, x: Tensor) -> Tensor:
    """A quantised linear as it stands in a model."""
    return method.linear(x, *held, bias)


def _product(
    method: Fp8Method, rows: QuantizedRows, held: tuple[Tensor, Tensor], bias: Tensor, x: Tensor
) -> Tensor:
    """Its product alone."""
    out = x.new_empty(len(x), len(held[0]))
    method.into(rows, *held, bias, out)
    return out


def _torchao(weight: Tensor, bias: Tensor) -> nn.Module:
    """A linear that torchao quantised: weight and input by row."""
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
    holder = nn.Sequential(linear)
    quantize_(holder, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return holder


def _seconds(call: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Median of single calls, after three."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
