"""Looks at unfinished pictures, taken between two steps of the denoising loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import decode_latents
from sglang.multimodal_gen.runtime.utils.progress import Preview, preview_steps

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig


class StepPreviews:
    """Decodes what the model expects to arrive at, for the images whose callers want to see it.

    Changes nothing that the loop computes. Without a VAE on the device there is nothing to show.
    """

    def __init__(self, vae: Any = None) -> None:
        self.vae = vae

    def show(
        self, batch: Req, config: PipelineConfig, step: int, latents: Tensor, prediction: Tensor
    ) -> None:
        """Show the images that are due at ``step`` (from 0).

        ``latents`` are those the ``prediction`` was made from, both packed.
        """
        total = len(batch.timesteps)
        due = [
            i for i, count in enumerate(batch.previews) if step + 1 in preview_steps(total, count)
        ]
        if not due or self.vae is None or not batch.control.wants_previews:
            return
        if next(self.vae.parameters()).device != latents.device:
            batch.warn("no previews: the VAE's weights are in host memory while it denoises", due)
            return
        expected = config.post_denoising_loop(
            expected_latents(batch, step, latents, prediction), batch
        )
        for image in due:
            picture = decode_latents(self.vae, config, expected[image : image + 1])[0]
            pixels = (picture.nan_to_num() * 255).round().byte().permute(1, 2, 0).numpy()
            batch.control.show(Preview(image, step + 1, total, pixels))


def expected_latents(batch: Req, step: int, latents: Tensor, prediction: Tensor) -> Tensor:
    """The clean latents that a step's prediction points to.

    Flow matching predicts the velocity from clean to noise, so x0 = x - sigma v (Lipman et al.
    2023). For other schedules the noisy latents themselves, which clear up as the steps go.
    """
    scheduler = batch.scheduler
    kind = getattr(getattr(scheduler, "config", None), "prediction_type", None)
    flows = type(scheduler).__name__.startswith("FlowMatch") or kind == "flow_prediction"
    if not flows or batch.sigmas is None:
        return latents
    return latents - batch.sigmas[step] * prediction
