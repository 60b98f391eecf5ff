"""``sglang bench request``: seconds of a whole request, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.multimodal_gen.runtime.entrypoints.cli.bench_trials import Trials


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    about = "Time whole requests, from settings to pixels, and each of their stages."
    return Trials("request", about, {}).run(argv)
