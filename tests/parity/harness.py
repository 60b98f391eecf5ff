"""One row for each thing a family must get right: :class:`ParityCase` and :func:`assert_parity`.

A new family writes a checkpoint class (see ``tiny_checkpoints.TinyFlux``) and one
``family.Family`` record; from then on a case is one line::

    ParityCase("wide", flux_dev(), FLUX_DEV, {"prompt": "a fox", "height": 96, "width": 128, ...})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.multimodal_gen.runtime.verify.measure import largest_difference

from parity.compare import Report, compare
from parity.family import Family, Request
from parity.oracle import run_oracle
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_checkpoints import Checkpoint
from parity.trace import Trace

MOVED = 3 / 255
"""A pixel difference that no rounding explains."""


@dataclass(frozen=True)
class ParityCase:
    """One request on one tiny checkpoint."""

    name: str
    checkpoint: Checkpoint
    family: Family
    request: Request
    """Sampling fields; must hold prompt, seed, num_inference_steps and the size."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Further server arguments of this runtime (batching, parallel sizes, offload)."""


def assert_parity(case: ParityCase, folder: Path) -> Report:
    """Run the reference and this runtime on `case`; fail where they part.

    `folder` keeps checkpoints by name, so that cases share them. Sensitivity comes first: equality
    of pictures that nothing moves would mean nothing.
    """
    root = checkpoint_folder(case.checkpoint, folder)
    expected = run_oracle(root, case.family, case.request)
    assert_sensitive(root, case.family, case.request, expected)
    with opened_runtime(root, **case.server) as generator:
        measured = record_runtime(generator, case.family, case.request)
    report = compare(measured, expected)
    assert not report.broken, f"{case.name}: parts from {case.family.reference}\n{report}"
    return report


def checkpoint_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """Where `checkpoint` lies under `folder`; written the first time it is asked for."""
    root = folder / checkpoint.name
    if not root.exists():
        checkpoint.write(root)
    return root


def assert_sensitive(root: Path, family: Family, request: Request, base: Trace) -> None:
    """Fail unless each field that should move each picture does, and `base` shows something."""
    assert_lively(base)
    for name, change in family.other.items():
        if not _in_effect(name, request, family):
            continue
        other = run_oracle(root, family, {**request, name: change(request[name])})
        moved = [
            largest_difference(changed, pixels)
            for changed, pixels in zip(other.pixels, base.pixels, strict=True)
        ]
        if name in family.without_effect:
            assert max(moved) == 0, f"{name} moves the reference: not without effect"
        else:
            assert min(moved) > MOVED, f"{name} moves the reference by {moved} only"


def assert_lively(trace: Trace) -> None:
    """Fail if a picture is flat, or clipped in a quarter of its values or more."""
    for index, pixels in enumerate(trace.pixels):
        spread = pixels.std().item()
        clipped = ((pixels <= 0) | (pixels >= 1)).float().mean().item()
        assert spread > 0.1, f"picture {index} is flat: standard deviation {spread:.3f}"
        assert clipped < 0.25, f"picture {index} is clipped in {clipped:.0%} of its values"
        assert torch.unique(trace.images[index]).numel() > 64, f"picture {index} has few levels"


def _in_effect(name: str, request: Request, family: Family) -> bool:
    """Whether `request` uses field `name`: true CFG needs both a negative prompt and a scale."""
    if name in ("negative_prompt", "true_cfg_scale"):
        return request.get(family.guidance, 1.0) > 1 and "negative_prompt" in request
    return name in request
