"""Likely causes of a divergence, each tested on the evidence before it is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean
from sglang.multimodal_gen.runtime.verify.evidence import (
    Cause,
    Evidence,
    Failure,
    conditioning,
    is_time,
)
from sglang.multimodal_gen.runtime.verify.latent_map import declared_map, measured_map
from sglang.multimodal_gen.runtime.verify.measure import FORWARD_LIMIT, relative_l2
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord

Diagnosis = Callable[[Evidence], Cause | None]

SAME = 10 * FORWARD_LIMIT
"""Relative L2 up to which a hypothesis explains what was seen."""


def _close(one: Tensor, other: Tensor) -> bool:
    return relative_l2(one.double(), other.double()) <= SAME


def wrong_scale(evidence: Evidence) -> Cause | None:
    """The reference's scale and shift, put in place of the port's, explain the decoder's input."""
    theirs = measured_map(evidence.reference, evidence)
    ours = measured_map(evidence.port, evidence) or declared_map(evidence)
    expected = evidence.reference.latents
    if theirs is None or expected is None:
        return None
    spread = expected.double().std().item()
    if ours.error(theirs, spread) <= SAME:
        return None
    because = f"the reference decodes {theirs}, the port {ours}"
    corrected = _with_map_of(evidence, ours, theirs)
    if corrected is not None and _close(corrected, expected.flatten().sort().values):
        because += ", and with the reference's numbers the latents agree"
    guesses: Mapping[str, tuple[Tensor, Tensor]] = {
        "the shift is left out": (ours.scale - theirs.scale, ours.shift),
        "the shift has the wrong sign": (ours.scale - theirs.scale, ours.shift + theirs.shift),
        "the latents are multiplied by the scale": (
            (ours.scale * theirs.scale - 1) * theirs.scale,
            ours.shift - theirs.shift,
        ),
        "the shift is added before the division": (
            ours.scale - theirs.scale,
            ours.shift - theirs.shift / theirs.scale,
        ),
    }
    for words, (scale, shift) in guesses.items():
        if (scale / theirs.scale).abs().max() < SAME and (shift / spread).abs().max() < SAME:
            return Cause(Failure.SCALE, f"{because}: {words}")
    return Cause(Failure.SCALE, because)


def _with_map_of(evidence: Evidence, ours: object, theirs: object) -> Tensor | None:
    """The port's last latents through the reference's scale and shift, sorted."""
    scale = getattr(theirs, "scale", None)
    if not evidence.port.steps or scale is None or len(scale) != 1:
        return None
    latents = evidence.port.steps[-1].latents.double()
    return (latents / scale + getattr(theirs, "shift", 0)).flatten().sort().values


def wrong_timesteps(evidence: Evidence) -> Cause | None:
    """The port's timesteps are the reference's turned round, scaled, or of another dtype."""
    for what, ours, theirs in _times(evidence):
        for words, turned in _TURNS.items():
            if ours.shape == theirs.shape and not _close(ours, theirs):
                if len(theirs) == 1 and words == "reversed":
                    continue
                if _close(turned(ours.double()), theirs):
                    return Cause(Failure.TIMESTEPS, f"the port's {what} are {words}")
        if ours.dtype != theirs.dtype:
            return Cause(
                Failure.TIMESTEPS,
                f"the port's {what} are {ours.dtype}, the reference's {theirs.dtype}",
            )
        if _close(ours.double(), theirs.double().round()) and not _close(ours, theirs):
            return Cause(Failure.TIMESTEPS, f"the port's {what} are rounded to whole numbers")
    return None


_TURNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda t: t.flip(0),
    "1000 times the reference's": lambda t: t / 1000,
    "1/1000 of the reference's": lambda t: t * 1000,
    "counted from the other end (1000 - t)": lambda t: 1000 - t,
    "counted from the other end (1 - t)": lambda t: 1 - t,
}


def _times(evidence: Evidence) -> list[tuple[str, Tensor, Tensor]]:
    """The schedules, then what the denoisers are given over all steps."""
    ours, theirs = evidence.port, evidence.reference
    pairs = []
    if ours.timesteps is not None and theirs.timesteps is not None:
        pairs.append(("timesteps", ours.timesteps, theirs.timesteps))
    names = [n for pair in evidence.shared(0)[:1] for n in pair[0].inputs if is_time(n)]
    for name in names:
        columns = [_column(record, name) for record in (ours, theirs)]
        if all(len(column) for column in columns):
            pairs.append((f"values of {name}=", columns[0], columns[1]))
    return pairs


def _column(record: RunRecord, name: str) -> Tensor:
    """One denoiser input of the positive branch over all steps."""
    steps = (record.branches(step)[:1] for step in range(len(record.steps)))
    values = [b.inputs[name].flatten()[:1] for branch in steps for b in branch if name in b.inputs]
    return torch.cat(values) if values else torch.empty(0)


def missing_negative(evidence: Evidence) -> Cause | None:
    """The negative branch is not there, or is given what belongs to the positive one."""
    ours, theirs = evidence.port, evidence.reference
    if theirs.branch_count != 2:
        return None
    if ours.guided and not ours.negative_embeds:
        return Cause(
            Failure.NEGATIVE,
            "the request has classifier-free guidance, and no stage wrote negative_prompt_embeds",
        )
    if ours.branch_count == 1:
        return Cause(
            Failure.NEGATIVE, "the reference runs two forwards a step, the port only the positive"
        )
    pair = ours.branches(0)
    if len(pair) != 2:
        return None
    positive, negative = (conditioning(branch) for branch in pair)
    embeds = [n for n in positive if n in negative and positive[n].ndim > 1]
    alike = [n for n in embeds if torch.equal(positive[n], negative[n])]
    expected = theirs.branches(0)
    differing = [
        n
        for n in alike
        if n in expected[0].inputs
        and n in expected[1].inputs
        and not torch.equal(expected[0].inputs[n], expected[1].inputs[n])
    ]
    if differing:
        return Cause(
            Failure.NEGATIVE,
            f"the port's negative branch is given the prompt's own {' and '.join(differing)}",
        )
    return None


def swapped_branches(evidence: Evidence) -> Cause | None:
    """Prompt and negative prompt change places."""
    ours, theirs = evidence.port.branches(0), evidence.reference.branches(0)
    if len(ours) != 2 or len(theirs) != 2:
        return None
    for name, value in conditioning(ours[0]).items():
        right, wrong = (branch.inputs.get(name) for branch in theirs)
        if value.ndim < 2 or right is None or wrong is None:
            continue
        if _close(value, wrong) and not _close(value, right):
            return Cause(Failure.TEXT, f"{name} of prompt and negative prompt change places")
    return None


def another_text(evidence: Evidence) -> Cause | None:
    """Embeddings of another length, or equal only as far as the words go."""
    for ours, theirs in evidence.shared(0):
        for name, value in conditioning(ours).items():
            other = theirs.inputs.get(name)
            if other is None or value.ndim < 2:
                continue
            if value.shape != other.shape:
                because = f"{name} is {list(value.shape)}, the reference's {list(other.shape)}"
                return Cause(Failure.TEXT, because)
            if not _close(value, other) and value.ndim == 3:
                same = [_close(value[:, i], other[:, i]) for i in range(min(value.shape[1], 64))]
                count = same.index(False) if False in same else len(same)
                because = f"{name} agrees in its first {count} tokens: look at "
                because += "padding and mask" if count else "template, hidden state and norm"
                return Cause(Failure.TEXT, because)
    return None


def misnamed_kwargs(evidence: Evidence) -> Cause | None:
    """What the hooks return does not fit ``forward()``."""
    problems = kwarg_problems(evidence)
    return Cause(Failure.KWARGS, "; ".join(problems)) if problems else None


def kwarg_problems(evidence: Evidence) -> list[str]:
    """Names that ``forward()`` does not take, that it needs, or that only the reference gives."""
    problems = []
    hooks = ("prepare_pos_cond_kwargs", "prepare_neg_cond_kwargs")
    for hook, attempt in zip(hooks, evidence.port.attempts, strict=False):
        parameters = inspect.signature(attempt.module.forward).parameters
        kinds = {p.kind for p in parameters.values()}
        names = [n for n, p in parameters.items() if p.kind not in _VARIADIC]
        given = {*attempt.kwargs, *names[: len(attempt.args)]}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            problems += [
                f"{hook} gives {name}=, which forward() does not take.{did_you_mean(name, names)}"
                for name in attempt.kwargs
                if name not in names
            ]
        problems += [
            f"{hook} does not give {name}=, which forward() needs"
            for name in names
            if name not in given and parameters[name].default is inspect.Parameter.empty
        ]
    if problems or not evidence.port.calls or not evidence.reference.calls:
        return problems
    forward = inspect.signature(evidence.port.attempts[0].module.forward).parameters
    ours, theirs = evidence.port.calls[0].inputs, evidence.reference.calls[0].inputs
    return [
        f"the reference gives {name}=, and {hooks[0]} does not"
        for name in theirs
        if name in forward and name not in ours
    ]


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def packed_decode(evidence: Evidence) -> Cause | None:
    """The decoder gets the loop's latents as they are, or put together in another order."""
    ours, theirs = evidence.port.latents, evidence.reference.latents
    if ours is None or theirs is None or not evidence.port.steps:
        return None
    packed = tuple(evidence.port.steps[-1].latents.shape)
    raw = evidence.port.raw_latent_shape
    if ours.shape != theirs.shape:
        if tuple(ours.shape) == packed and ours.numel() == theirs.numel():
            because = f"the decoder gets {list(packed)}, the raw_latent_shape is {list(raw or ())}"
            return Cause(Failure.PACKED, because)
        return None
    if _close(ours, theirs):
        return None
    if _close(ours.flatten().sort().values, theirs.flatten().sort().values):
        because = "the decoder gets the right numbers in another order: undo the packing"
        return Cause(Failure.PACKED, because)
    return None


def another_guidance(evidence: Evidence) -> Cause | None:
    """Both predictions agree, and what the scheduler follows does not: find the scale in it."""
    scales = []
    for record in (evidence.port, evidence.reference):
        pair = record.branches(0)
        if len(pair) != 2 or not record.steps:
            return None
        positive, negative = (branch.prediction.double() for branch in pair)
        followed = record.steps[0].prediction.double()
        if followed.shape != positive.shape:
            return None
        apart = positive - negative
        scales.append((((followed - negative) * apart).sum() / (apart**2).sum()).item())
    if abs(scales[0] - scales[1]) <= SAME * abs(scales[1]):
        return None
    because = f"the port follows negative + {scales[0]:.4g} * (positive - negative), "
    return Cause(Failure.GUIDANCE, because + f"the reference {scales[1]:.4g}")
