"""What every mechanism is compared with, and what it may use for that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang.multimodal_gen.runtime.verify.on_ranks import Ranks
from sglang.multimodal_gen.runtime.verify.request import Request
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord


@dataclass(frozen=True)
class Baseline:
    """The plain run that a mechanism must not change, and the ranks that are to make the same."""

    request: Request
    record: RunRecord
    ranks: Ranks

    @property
    def picture(self) -> Tensor:
        """What the decoder made of the latents, before anything is clipped."""
        assert self.record.picture is not None
        return self.record.picture

    @property
    def decoded(self) -> Tensor:
        """What the decoder was given."""
        assert self.record.latents is not None
        return self.record.latents

    @property
    def latents(self) -> Tensor:
        """What the last step of the scheduler left."""
        return self.record.steps[-1].latents
