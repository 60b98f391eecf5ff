"""Whether the reference's picture shows anything: equality of what nothing moves means nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.verify.measure import relative_l2
from sglang.multimodal_gen.runtime.verify.reference import Reference
from sglang.multimodal_gen.runtime.verify.request import OTHER, Request
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord

MOVED = 1e-2
"""Relative L2 of the decoder's picture: a hundred times what a port may be off."""


@dataclass(frozen=True)
class Sensitivity:
    """By field, how far another value moves the reference's picture.

    ``idle`` are fields that must move it and do not; ``claimed_idle`` those that do, though the
    port says that they have no effect.
    """

    moved: dict[str, float]
    idle: tuple[str, ...]
    claimed_idle: tuple[str, ...]
    finite: bool = True
    """Whether the reference made a picture at all, and not NaN or infinity."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {moved:.1e}" for name, moved in self.moved.items())


def measure_sensitivity(
    reference: Reference,
    request: Request,
    base: RunRecord,
    config: PipelineConfig,
    say: Callable[[str], None],
) -> Sensitivity:
    """Run the reference again with each field changed; finds where its negative branch stands."""
    assert base.picture is not None
    if not torch.isfinite(base.picture).all():
        return Sensitivity({}, (), (), finite=False)
    moved: dict[str, float] = {}
    for name in OTHER:
        if name not in request:
            continue
        say(f"reference: another {name}")
        other = reference.run(request.changed(name))
        assert other.picture is not None
        moved[name] = relative_l2(other.picture, base.picture)
        if name == "negative_prompt":
            base.order = _order(base, other)
    idle = [n for n, m in moved.items() if not MOVED < m < float("inf")]
    without = set() if _heeds_guidance(config) else {"guidance_scale"}
    claimed = without & moved.keys() - set(idle)
    return Sensitivity(moved, tuple(n for n in idle if n not in without), tuple(sorted(claimed)))


def _heeds_guidance(config: PipelineConfig) -> bool:
    return config.should_use_guidance or config.dit_config.guidance_embeds


def _order(base: RunRecord, other: RunRecord) -> tuple[int, ...]:
    """The negative branch is the one whose inputs another negative prompt changes."""
    ours, theirs = base.branches(0), other.branches(0)
    if len(ours) != 2 or len(theirs) != 2:
        return base.order
    changed = [
        any(
            relative_l2(value, b.inputs[name]) > 0
            for name, value in a.inputs.items()
            if name in b.inputs
        )
        for a, b in zip(ours, theirs, strict=True)
    ]
    return (1, 0) if changed == [True, False] else base.order
