"""Which of a pipeline's denoisers makes which step: a collaborator of the denoising loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


@dataclass(frozen=True, slots=True)
class Expert:
    """The denoiser of one step, its component's name, and its scale of guidance."""

    denoiser: nn.Module
    name: str
    scale: float


class Experts:
    """One denoiser for all steps; or one for much noise, and another below a boundary in time.

    eDiff-I (Balaji et al. 2022). The two run one after the other: where their weights rest in host
    memory, the second takes the first one's place on the device in the middle of the loop.

    Args:
        denoiser: the first, whose weights the stage has brought.
        low_noise: the second.
        names: the names of both components.
    """

    residency: ResidencyManager | None = None
    """Brings the second denoiser; set by the pipeline."""

    def __init__(
        self,
        denoiser: nn.Module,
        low_noise: nn.Module | None = None,
        names: tuple[str, str] = ("transformer", "transformer_2"),
    ) -> None:
        self.denoiser = denoiser
        self.low_noise = low_noise
        self.names = names
        self._present = names[0]

    def of_steps(self, batch: Req, config: PipelineConfig) -> list[Expert]:
        """The expert of each step, in order. Asked once a request: it waits for the device."""
        first, second = self.names
        scale = batch.true_cfg_scale
        high = Expert(self.denoiser, first, scale)
        boundary = getattr(batch.request, "boundary_ratio", None)
        boundary = config.boundary_ratio if boundary is None else boundary
        if self.low_noise is None or boundary is None:
            return [high] * len(batch.timesteps)
        own = getattr(batch.request, "guidance_scale_2", None)
        low = Expert(self.low_noise, second, scale if own is None else float(own))
        train_steps = batch.scheduler.config.num_train_timesteps
        above = (batch.timesteps >= boundary * train_steps).tolist()
        return [high if is_above else low for is_above in above]

    def begin(self) -> None:
        """At the start of a request the stage has brought the first denoiser."""
        self._present = self.names[0]

    def bring(self, expert: Expert) -> None:
        """Have its weights on the device, the other one's not."""
        if self.residency is not None and expert.name != self._present:
            self.residency.swap(self._present, expert.name)
        self._present = expert.name
