"""How long a batch will take, learned from those that ran."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

_WEIGHT_OF_THE_LAST = 0.3
# What a batch counts as where an opaque pipeline chooses its numbers.
_UNKNOWN_PIXELS = 1024 * 1024
_UNKNOWN_STEPS = 30


class CostModel:
    """Seconds in proportion to images x pixels x frames x forwards.

    Before the first measurement every estimate is 0, and the line is served in order of arrival.
    """

    def __init__(self, seconds_per_unit: float = 0.0) -> None:
        self.seconds_per_unit = seconds_per_unit

    def seconds(self, batch: Req) -> float:
        """An estimate for a batch that waits."""
        return work_units(batch) * self.seconds_per_unit

    def learn(self, batch: Req, seconds: float) -> None:
        """Take in what a batch took."""
        measured = seconds / work_units(batch)
        known = self.seconds_per_unit
        change = _WEIGHT_OF_THE_LAST * (measured - known)
        self.seconds_per_unit = known + change if known else measured


def work_units(batch: Req) -> float:
    """Pixels that go through the denoiser, over all images and steps."""
    pixels = batch.height * batch.width or _UNKNOWN_PIXELS
    steps = batch.num_inference_steps or _UNKNOWN_STEPS
    forwards = 2 if batch.do_classifier_free_guidance else 1
    return float(batch.batch_size * pixels * batch.num_frames * steps * forwards)
