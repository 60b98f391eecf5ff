"""What a run of a diffusion pipeline leaves behind, step by step.

Put together from what the package's recorder saw. All tensors are on the CPU; the first axis counts
images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.verify.recorder import Call


@dataclass(frozen=True)
class Branch:
    """One guidance branch of one step: what the denoiser was given, and what it said."""

    inputs: Mapping[str, Tensor]
    prediction: Tensor


@dataclass(frozen=True)
class Step:
    """One denoising step; `branches`: the positive one, then the negative one if there is one."""

    latents: Tensor
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Trace:
    """All that a run has to agree on, from the noise to the picture."""

    noise: Tensor
    """The latents as the first step sees them."""
    timesteps: Tensor
    sigmas: Tensor
    """One for each step; the final 0 is left out."""
    steps: tuple[Step, ...]
    final_latents: Tensor
    """As the VAE is given them: unpacked, scaled, shifted."""
    pixels: Tensor
    """Decoded, float in 0..1, channels before height and width."""
    images: Tensor
    """The same as uint8, channels last, as a user gets them."""


def steps_of(
    calls: Sequence[Call],
    count: int,
    images: int,
    latents_of: Callable[[Mapping[str, Tensor]], Tensor],
    target_last: bool = False,
) -> tuple[Step, ...]:
    """Sort `calls` into `count` steps of one or more branches of `images` rows each.

    A branch may be a call of its own or a part of a larger batch; the positive one comes first.
    """
    assert calls, "the denoiser was never called"
    assert len(calls) % count == 0, f"{len(calls)} forward passes do not make {count} equal steps"
    width = len(calls) // count
    return tuple(
        _step(calls[first : first + width], images, latents_of, target_last)
        for first in range(0, len(calls), width)
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of all images of `traces`, which ran one after another with the same schedule."""
    first, *rest = traces
    for other in rest:
        assert torch.equal(other.timesteps, first.timesteps), "groups with different timesteps"
        assert torch.equal(other.sigmas, first.sigmas), "groups with different sigmas"
    return Trace(
        noise=torch.cat([trace.noise for trace in traces]),
        timesteps=first.timesteps,
        sigmas=first.sigmas,
        steps=tuple(_joined_step(parts) for parts in zip(*(t.steps for t in traces), strict=True)),
        final_latents=torch.cat([trace.final_latents for trace in traces]),
        pixels=torch.cat([trace.pixels for trace in traces]),
        images=torch.cat([trace.images for trace in traces]),
    )


def _step(
    calls: Sequence[Call],
    images: int,
    latents_of: Callable[[Mapping[str, Tensor]], Tensor],
    target_last: bool,
) -> Step:
    branches = _branches(calls, images)
    latents = latents_of(branches[0].inputs)
    for branch in branches[1:]:
        assert torch.equal(latents_of(branch.inputs), latents), "branches of one step differ"
    # Some denoisers answer at the tokens of input images too, which nobody reads.
    count = latents.shape[1]
    if target_last:
        branches = tuple(
            Branch({n: x for n, x in b.inputs.items() if x.ndim < 3}, b.prediction[:, -count:])
            for b in branches
        )
    own = (Branch(b.inputs, b.prediction[:, :count]) for b in branches)
    return Step(latents, tuple(own))


def _branches(calls: Sequence[Call], images: int) -> tuple[Branch, ...]:
    """One for each call where that has a row for each image: texts then differ in length."""
    if all(len(call.output) == images for call in calls):
        return tuple(Branch({n: _rows([c], n) for n in c.inputs}, c.output) for c in calls)
    predictions = torch.cat([call.output for call in calls]).split(images)
    columns = {name: _rows(calls, name).split(images) for name in calls[0].inputs}
    return tuple(
        Branch({name: columns[name][index] for name in columns}, prediction)
        for index, prediction in enumerate(predictions)
    )


def _rows(calls: Sequence[Call], name: str) -> Tensor:
    """Input `name` of all calls, one row for each image; a value that images share is repeated."""
    rows = []
    for call in calls:
        value = torch.atleast_1d(call.inputs[name])
        batch = call.output.shape[0]
        rows.append(value.expand(batch, *value.shape[1:]) if value.shape[0] == 1 else value)
    return torch.cat(rows)


def _joined_step(parts: tuple[Step, ...]) -> Step:
    branches = []
    for same in zip(*(part.branches for part in parts), strict=True):
        inputs = {name: torch.cat([b.inputs[name] for b in same]) for name in same[0].inputs}
        branches.append(Branch(inputs, torch.cat([branch.prediction for branch in same])))
    return Step(torch.cat([part.latents for part in parts]), tuple(branches))
