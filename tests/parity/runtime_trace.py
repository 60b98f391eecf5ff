"""This runtime on the same folder, watched from outside while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sglang import multimodal_gen
from sglang.multimodal_gen.runtime.verify.recorder import (
    Call,
    Decode,
    recorded_calls,
    recorded_decodes,
)

from parity.family import Family, Request
from parity.oracle import seeds_of
from parity.trace import Trace, joined, steps_of


@dataclass
class _Group:
    """What one pass through the pipeline showed: all images of a request, or some."""

    calls: list[Call] = field(default_factory=list)
    timesteps: Tensor | None = None
    sigmas: Tensor | None = None
    decodes: list[Decode] = field(default_factory=list)
    pixels: Tensor | None = None


def opened_runtime(root: Path, **server: Any) -> multimodal_gen.DiffGenerator:
    """The checkpoint at `root`, loaded in fp32 on the CPU; a context manager."""
    return multimodal_gen.DiffGenerator.from_pretrained(
        model_path=str(root), device="cpu", precision="fp32", **server
    )


def record_runtime(
    generator: multimodal_gen.DiffGenerator, family: Family, request: Request
) -> Trace:
    """Run `request` on a loaded ``DiffGenerator`` and keep what :class:`Trace` holds."""
    with _recorded_groups(generator.pipeline, family) as groups:
        result = generator.generate(**request)
    seeds = [output.seed for output in result.outputs]
    assert seeds == seeds_of(request), f"images have the seeds {seeds}, not {seeds_of(request)}"
    arrays = [torch.from_numpy(image.array.copy()) for image in result.images]
    arrays += [torch.from_numpy(clip.frames.copy()) for clip in result.videos]
    assert groups, "the pipeline's forward was never called"
    traces = []
    for group in groups:
        assert group.pixels is not None, "no stage decoded anything"
        count = group.pixels.shape[0]
        traces.append(_trace(group, family, torch.stack(arrays[:count])))
        del arrays[:count]
    assert not arrays, f"{len(arrays)} images came from no pass through the pipeline"
    return joined(traces)


def _trace(group: _Group, family: Family, images: Tensor) -> Trace:
    assert group.timesteps is not None, "no stage wrote timesteps"
    assert group.sigmas is not None, "no stage wrote sigmas"
    assert group.decodes, "the decoder was never called"
    assert group.pixels is not None, "no stage wrote the output"
    count = len(group.timesteps)
    theirs = {ours: name for name, ours in family.own_inputs.items()}
    calls = [
        Call({theirs.get(n, n): value for n, value in call.inputs.items()}, call.output)
        for call in group.calls
    ]
    steps = steps_of(calls, count, len(images), family.latents_of, family.target_last)
    return Trace(
        noise=steps[0].latents,
        timesteps=group.timesteps,
        sigmas=group.sigmas[-1 - count : -1],
        steps=steps,
        final_latents=torch.cat([decode.latents for decode in group.decodes]),
        pixels=_unit_range(group.decodes) if family.clips else group.pixels,
        images=images,
    )


def _unit_range(decodes: list[Decode]) -> Tensor:
    """What was decoded, in 0..1: of clips the pipeline's output is rounded already."""
    pictures = [decode.picture for decode in decodes if decode.picture is not None]
    return (torch.cat(pictures) / 2 + 0.5).clamp(0, 1)


@contextmanager
def _recorded_groups(pipeline: Any, family: Family) -> Iterator[list[_Group]]:
    """Collect one :class:`_Group` for each ``pipeline.forward`` until the context ends."""
    groups: list[_Group] = []
    denoisers = [pipeline.get_module(name) for name in family.denoisers]
    decoder = pipeline.get_module(family.decoder)
    forward = pipeline.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        group = _Group()
        with ExitStack() as stack:
            names = [family.own_inputs.get(name, name) for name in family.inputs]
            group.calls = stack.enter_context(recorded_calls(denoisers, names))
            group.decodes = stack.enter_context(recorded_decodes(decoder))
            for stage in pipeline.stages.values():
                stack.enter_context(patch.object(stage, "forward", _watched(stage, group)))
            output = forward(*args, **kwargs)
        groups.append(group)
        return output

    with patch.object(pipeline, "forward", watched):
        yield groups


def _watched(stage: Any, group: _Group) -> Callable[..., Any]:
    """`stage`'s forward, which then notes the fields that the stage says it writes."""
    forward = stage.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        batch = forward(*args, **kwargs)
        if "timesteps" in stage.writes:
            group.timesteps = batch.timesteps.clone()
        if "scheduler" in stage.writes:
            group.sigmas = batch.scheduler.sigmas.clone()  # batch.sigmas: before the shift
        if "output" in stage.writes:
            group.pixels = batch.output.clone()
        return batch

    return watched
