"""First stage: random generators, input images and videos, from an admitted request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image
from sglang.multimodal_gen.runtime.utils.video_file import load_input_video

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class InputValidationStage(PipelineStage):
    """Gives each output a generator of its own, and opens the input images and videos.

    Generators live on the CPU: the same seed gives the same noise on every device, and an image
    does not depend on its neighbours in the batch.

    Args:
        keep_alpha: input images that are partly transparent stay so, as RGBA; else they are laid
            over white.
    """

    uses = ()
    reads = frozenset({"seeds", "image_path", "video_path"})
    writes = frozenset({"generator", "condition_image", "condition_video"})

    def __init__(self, *, keep_alpha: bool = False) -> None:
        self.keep_alpha = keep_alpha

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes one generator an output, and the inputs in the order given."""
        batch.generator = [torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds]
        batch.condition_image = [
            load_input_image(path, keep_alpha=self.keep_alpha) for path in batch.image_path
        ]
        batch.condition_video = [load_input_video(path) for path in batch.video_path]
        return batch
