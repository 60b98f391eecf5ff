"""What the checks look at: both sides' records of one request, and what a check says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from sglang.multimodal_gen.runtime.verify.port import Port
from sglang.multimodal_gen.runtime.verify.reference import Reference
from sglang.multimodal_gen.runtime.verify.run_record import Branch, RunRecord

_TIME = re.compile(r"t|time|timesteps?|sigmas?|.*_timesteps?")


@dataclass(frozen=True)
class Evidence:
    """One request on both sides."""

    reference: RunRecord
    port: RunRecord
    reference_pipeline: Reference
    port_pipeline: Port

    def shared(self, step: int) -> list[tuple[Branch, Branch]]:
        """A step's branches of the port and the reference, side by side, as far as both have it."""
        pairs = zip(self.port.branches(step), self.reference.branches(step), strict=False)
        return list(pairs)


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    ``skipped`` says why nothing could be compared, ``unsupported`` why the model cannot do
    all of it. ``bound`` takes the place of the check's, where it compares several things.
    """

    error: float
    detail: str = ""
    skipped: str | None = None
    unsupported: str | None = None
    bound: float | None = None


class Failure(StrEnum):
    """The common failures of a port, in the words of the porters' contract; and others."""

    SCALE = "wrong latent scale or shift"
    TIMESTEPS = "reversed or dtype-mismatched timesteps"
    NEGATIVE = "missing negative embeddings when CFG is on"
    KWARGS = "conditioning kwarg names mismatched with the denoiser's forward()"
    ROTARY = "rotary embedding shape or style mismatch"
    PACKED = "decoding packed latents without restoring raw_latent_shape"
    GUIDANCE = "another formula or scale of classifier-free guidance"
    SCHEDULE = "another schedule"
    TEXT = "the prompt is encoded in another way"
    NOISE = "the noise is drawn or packed in another way"
    NETWORK = "the denoiser computes something else"
    DECODER = "the decoder computes something else"
    UNKNOWN = "no common failure explains it"


@dataclass(frozen=True)
class Cause:
    """A failure that the evidence was tested for, and what the test said."""

    failure: Failure
    because: str

    def __str__(self) -> str:
        return f"{self.failure}: {self.because}"


def stopped(record: RunRecord) -> Finding:
    """The finding of a check that a run did not reach."""
    return Finding(float("inf"), f"the port stopped before this: {reason_of(record.error)}")


def reason_of(error: BaseException | None) -> str:
    """An error's own words, on one line; of its cause where there is one."""
    if error is None:
        return "nothing was recorded"
    error = error.__cause__ or error
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def is_time(name: str) -> bool:
    """Whether a denoiser's parameter of that name is the time."""
    return _TIME.fullmatch(name) is not None


def latents_input(branch: Branch) -> tuple[str, Tensor] | None:
    """A denoiser's first tensor, by convention the latents."""
    return next(iter(branch.inputs.items()), None)


def conditioning(branch: Branch) -> Mapping[str, Tensor]:
    """The inputs that are neither the latents nor the time."""
    names = list(branch.inputs)[1:]
    return {name: branch.inputs[name] for name in names if not is_time(name)}
