"""Which part of a deployment a stage belongs to, when a pipeline is cut into roles."""

from __future__ import annotations

from enum import Enum


class RoleType(Enum):
    """A role: one kind of worker in a disaggregated deployment."""

    ENCODER = "encoder"
    DENOISER = "denoiser"
    DECODER = "decoder"
