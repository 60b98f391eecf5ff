"""What a caller may set for Wan 2.1 and 2.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import (
    MAX_GUIDANCE,
    VideoSamplingParams,
    check_number,
    setting,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

MAX_SHIFT = 1000.0


@dataclass
class WanSamplingParams(VideoSamplingParams):
    """Wan 2.1 text to video, 1.3B and 14B at 480p."""

    height: int | None = 480
    width: int | None = 832
    num_frames: int = 81
    fps: int = 16
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    negative_prompt: str | None = ""
    max_sequence_length: int | None = 512
    flow_shift: float | None = setting(
        None, "Time shift of the schedule, in place of the checkpoint's: more steps in much noise."
    )
    guidance_scale_2: float | None = setting(
        None, "Guidance of the second expert, in little noise; the first one's if left out."
    )
    boundary_ratio: float | None = setting(
        None, "Share of the time above which the first expert denoises, not the checkpoint's."
    )
    strength: float = setting(
        0.8, "Share of the steps that an input video goes through: at 1 it is replaced by noise."
    )

    def check(self) -> None:
        """The checks of videos, and the ranges of what is Wan's own."""
        super().check()
        self._check_optional("flow_shift", low=0.0, high=MAX_SHIFT)
        if self.flow_shift == 0:
            raise InvalidRequest("flow_shift", 0, "must be above 0; 1 shifts nothing")
        self._check_optional("guidance_scale_2", low=0.0, high=MAX_GUIDANCE)
        self._check_optional("boundary_ratio", low=0.0, high=1.0)
        check_number("strength", self.strength, float, low=0.0, high=1.0)
        if not self.video_paths and self.strength != type(self).strength:
            raise InvalidRequest(
                "strength", self.strength, "has no effect: there is no input video; leave it out"
            )
        if self.video_paths and int(self.num_inference_steps * self.strength) < 1:
            least = 1 / self.num_inference_steps
            problem = f"leaves none of {self.num_inference_steps} steps; at least {least:.3g}"
            raise InvalidRequest("strength", self.strength, problem)

    def _check_optional(self, name: str, **bounds: Any) -> None:
        value = getattr(self, name)
        if value is not None:
            check_number(name, value, float, **bounds)


@dataclass
class Wan720pSamplingParams(WanSamplingParams):
    """Wan 2.1 image to video and first-and-last-frame to video, trained at 720p."""

    height: int | None = 720
    width: int | None = 1280


@dataclass
class Wan22SamplingParams(Wan720pSamplingParams):
    """Wan 2.2 A14B, text to video: two experts, less guidance for the second."""

    num_inference_steps: int = 40
    guidance_scale: float = 4.0
    guidance_scale_2: float | None = 3.0


@dataclass
class Wan22ImageSamplingParams(Wan720pSamplingParams):
    """Wan 2.2 A14B, image to video."""

    num_inference_steps: int = 40
    guidance_scale: float = 3.5
    guidance_scale_2: float | None = 3.5


@dataclass
class WanTI2VSamplingParams(WanSamplingParams):
    """Wan 2.2 5B: text, or text and a first frame, to video at 24 frames a second."""

    height: int | None = 704
    width: int | None = 1280
    num_frames: int = 121
    fps: int = 24
