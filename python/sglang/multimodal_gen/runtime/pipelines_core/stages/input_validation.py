"""First stage: random generators and input images, from an admitted request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class InputValidationStage(PipelineStage):
    """Gives each image a generator of its own, and opens the input images.

    Generators live on the CPU: the same seed gives the same noise on every device, and an image
    does not depend on its neighbours in the batch.
    """

    uses = ()
    reads = frozenset({"seeds", "image_path"})
    writes = frozenset({"generator", "condition_image"})

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes one generator an image, and the input images in the order given."""
        batch.generator = [torch.Generator("cpu").manual_seed(seed) for seed in batch.seeds]
        batch.condition_image = [load_input_image(path) for path in batch.image_path]
        return batch
