"""``sglang bench step``: milliseconds a step of the denoising loop."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.multimodal_gen.runtime.entrypoints.cli.bench_trials import Trials

STEPS = 8
"""Of each request, where the command line says nothing: they are all alike."""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = "Time the steps of the denoising loop: median and spread over all but each first."
    return Trials("step", about, {"num_inference_steps": STEPS}).run(argv)
