"""The checks against the reference, in the order of a request's way through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from sglang.multimodal_gen.runtime.verify import causes
from sglang.multimodal_gen.runtime.verify.causes import Diagnosis, kwarg_problems
from sglang.multimodal_gen.runtime.verify.evidence import (
    Cause,
    Evidence,
    Failure,
    Finding,
    conditioning,
    is_time,
    latents_input,
    stopped,
)
from sglang.multimodal_gen.runtime.verify.first_module import first_differing_module
from sglang.multimodal_gen.runtime.verify.latent_map import declared_map, measured_map
from sglang.multimodal_gen.runtime.verify.measure import (
    FINAL_LIMIT,
    FORWARD_LIMIT,
    largest_difference,
    relative_l2,
)
from sglang.multimodal_gen.runtime.verify.rotary_probe import rotary_cause

NOISE_LIMIT = 1e-6
"""Both sides draw the same numbers; a scheduler may scale them in another order."""


@dataclass(frozen=True)
class ReferenceCheck:
    """One row: what is measured, how far it may be off, what is tested where it is off more."""

    name: str
    title: str
    bound: float
    measure: Callable[[Evidence], Finding]
    diagnoses: tuple[Diagnosis, ...]
    otherwise: Failure = Failure.UNKNOWN
    """What is wrong at least, where no diagnosis holds."""


def likely_cause(check: ReferenceCheck, evidence: Evidence, finding: Finding) -> Cause:
    """The first diagnosis that holds; a port that stopped is tested for all of them."""
    diagnoses: Iterable[Diagnosis] = check.diagnoses
    if evidence.port.error is not None:
        others = (d for c in REFERENCE_CHECKS for d in c.diagnoses)
        diagnoses = dict.fromkeys((*check.diagnoses, *others))
    for diagnose in diagnoses:
        cause = diagnose(evidence)
        if cause is not None:
            return cause
    return Cause(check.otherwise, finding.detail or "nothing that was tested explains it")


def _scale(evidence: Evidence) -> Finding:
    theirs, expected = measured_map(evidence.reference, evidence), evidence.reference.latents
    if theirs is None or expected is None:
        why = "the reference's decoder gets no affine map of its last latents"
        return Finding(0.0, skipped=f"{why}: the final latents decide")
    ours = measured_map(evidence.port, evidence) or declared_map(evidence)
    detail = f"the reference decodes {theirs}"
    return Finding(ours.error(theirs, expected.double().std().item()), detail)


def _timesteps(evidence: Evidence) -> Finding:
    ours, theirs = evidence.port.timesteps, evidence.reference.timesteps
    if ours is None or theirs is None:
        return stopped(evidence.port)
    if ours.dtype != theirs.dtype:
        return Finding(float("inf"), f"{ours.dtype} against {theirs.dtype}")
    worst = _Worst()
    worst.add("timesteps", relative_l2(ours, theirs))
    for step in range(min(len(evidence.port.steps), len(evidence.reference.steps))):
        for mine, other in evidence.shared(step):
            for name in filter(is_time, mine.inputs):
                if name in other.inputs:
                    one, two = mine.inputs[name], other.inputs[name]
                    if one.ndim == 1 and two.ndim == 2:  # one time spelled out for each token
                        one = one[:, None].expand_as(two).to(two.dtype)
                    off = relative_l2(one, two) if one.dtype == two.dtype else float("inf")
                    worst.add(f"{name}= at step {step + 1}", off)
    return worst.finding()


def _sigmas(evidence: Evidence) -> Finding:
    ours, theirs = evidence.port.sigmas, evidence.reference.sigmas
    if theirs is None:
        return Finding(0.0, skipped="the reference's scheduler has none")
    if ours is None:
        return stopped(evidence.port)
    return Finding(relative_l2(ours, theirs))


def _kwargs(evidence: Evidence) -> Finding:
    problems = kwarg_problems(evidence)
    if problems:
        return Finding(float(len(problems)), "; ".join(problems))
    if not evidence.port.attempts:
        return stopped(evidence.port)
    finding = _conditioning(evidence, lambda value: value.ndim == 1)
    fits = "the names fit forward()"
    return Finding(0.0, fits) if finding.skipped is not None else finding


def _embeddings(evidence: Evidence) -> Finding:
    if not evidence.port.calls:
        return stopped(evidence.port)
    ours, theirs = len(evidence.port.branches(0)), len(evidence.reference.branches(0))
    if ours != theirs:
        return Finding(float("inf"), f"{ours} branches a step against {theirs}")
    return _conditioning(evidence, lambda value: value.ndim > 1)


def _conditioning(evidence: Evidence, counts: Callable[[Tensor], bool]) -> Finding:
    """The inputs that both denoisers have under one name, in all branches of the first step."""
    worst = _Worst()
    for side, (mine, other) in zip(("positive", "negative"), evidence.shared(0), strict=False):
        for name, value in conditioning(mine).items():
            if counts(value) and name in other.inputs:
                worst.add(f"{side} {name}", relative_l2(value, other.inputs[name]))
    return worst.finding()


def _noise(evidence: Evidence) -> Finding:
    pairs = evidence.shared(0)
    ours, theirs = (latents_input(b) for b in pairs[0]) if pairs else (None, None)
    if ours is None or theirs is None:
        return stopped(evidence.port)
    parts = _ends(theirs[1], ours[1])
    return Finding(min(relative_l2(ours[1], part) for part in parts), ours[0])


def _prediction(step: int) -> Callable[[Evidence], Finding]:
    def measure(evidence: Evidence) -> Finding:
        pairs = evidence.shared(step)
        if not pairs or (step < 0 and len(evidence.port.steps) != len(evidence.reference.steps)):
            return stopped(evidence.port)
        worst = _Worst()
        for side, (mine, other) in zip(("positive", "negative"), pairs, strict=False):
            both = (_followed(evidence, step, branch.prediction) for branch in (mine, other))
            worst.add(f"{side} branch", relative_l2(*both))
        return worst.finding()

    return measure


def _followed(evidence: Evidence, step: int, prediction: Tensor) -> Tensor:
    """What of a prediction the loop follows: some denoisers answer at input images' tokens too."""
    steps = evidence.reference.steps
    if not steps:
        return prediction
    # At tokens of something else, a network says something that is not like what was followed.
    followed = steps[step].prediction
    return min(_ends(prediction, followed), key=lambda part: relative_l2(part, followed))


def _ends(tokens: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """The first and the last so many tokens as ``like`` has; all of them where that has as many.

    Input images stand behind the picture to make, or text and images before it.
    """
    count = like.shape[1] if like.ndim == tokens.ndim == 3 else 0
    if not 0 < count < tokens.shape[1]:
        return (tokens,)
    return tokens[:, :count], tokens[:, -count:]


def _final_latents(evidence: Evidence) -> Finding:
    ours, theirs = evidence.port.latents, evidence.reference.latents
    if ours is None or theirs is None:
        return stopped(evidence.port)
    shapes = "" if ours.shape == theirs.shape else f"{list(ours.shape)} for {list(theirs.shape)}"
    return Finding(relative_l2(ours, theirs), shapes)


def _decode(evidence: Evidence) -> Finding:
    ours, theirs = evidence.port.picture, evidence.reference.picture
    if ours is None or theirs is None or evidence.port.pixels is None:
        return stopped(evidence.port)
    worst = _Worst()
    worst.add("the decoder's picture", relative_l2(ours, theirs))
    pixels = evidence.reference.pixels
    if pixels is not None and pixels.ndim == 5:
        # Clips are rounded to levels already: one may fall to either side.
        levels = (pixels * 255).round().movedim(2, -1)
        off = largest_difference(evidence.port.pixels, levels)
        worst.add("the levels after it", off * FINAL_LIMIT)
    elif pixels is not None:
        # In stored levels, so that the one bound serves both: a tenth of a level is too much.
        off = largest_difference(evidence.port.pixels, pixels) * 255
        worst.add("the pixels after it", off * FINAL_LIMIT * 10)
    return worst.finding()


class _Worst:
    """The largest of several errors, and whose it is."""

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}

    def add(self, what: str, error: float) -> None:
        self.errors[what] = max(error, self.errors.get(what, 0.0))

    def finding(self) -> Finding:
        if not self.errors:
            return Finding(0.0, skipped="the two denoisers share no such input by name")
        what = max(self.errors, key=lambda name: self.errors[name])
        return Finding(self.errors[what], what)


REFERENCE_CHECKS: tuple[ReferenceCheck, ...] = (
    ReferenceCheck(
        "latent-scale", "latent scale and shift", FORWARD_LIMIT, _scale,
        (causes.wrong_scale,), Failure.SCALE,
    ),
    ReferenceCheck(
        "timesteps", "timesteps: order, dtype", FORWARD_LIMIT, _timesteps,
        (causes.wrong_timesteps,), Failure.SCHEDULE,
    ),
    ReferenceCheck(
        "sigmas", "sigmas", FORWARD_LIMIT, _sigmas, (causes.wrong_timesteps,), Failure.SCHEDULE
    ),
    ReferenceCheck(
        "kwargs", "conditioning kwargs", FORWARD_LIMIT, _kwargs,
        (causes.misnamed_kwargs, causes.missing_negative), Failure.UNKNOWN,
    ),
    ReferenceCheck(
        "prompt-embeddings", "prompt embeddings", FORWARD_LIMIT, _embeddings,
        (causes.missing_negative, causes.swapped_branches, causes.another_text), Failure.TEXT,
    ),
    ReferenceCheck("noise", "initial noise", NOISE_LIMIT, _noise, (), Failure.NOISE),
    ReferenceCheck(
        "first-prediction", "prediction of step 1", FORWARD_LIMIT, _prediction(0),
        (rotary_cause, first_differing_module), Failure.NETWORK,
    ),
    ReferenceCheck(
        "last-prediction", "prediction of the last step", FINAL_LIMIT, _prediction(-1),
        (causes.another_guidance, causes.wrong_timesteps), Failure.SCHEDULE,
    ),
    ReferenceCheck(
        "final-latents", "final latents", FINAL_LIMIT, _final_latents,
        (causes.packed_decode, causes.wrong_scale, causes.another_guidance), Failure.UNKNOWN,
    ),
    ReferenceCheck("vae-decode", "VAE decode", FINAL_LIMIT, _decode, (), Failure.DECODER),
)  # fmt: skip
"""In the order of a request's way; a check may take for granted what those before it compared."""
