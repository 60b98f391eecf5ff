"""Runs a chain of stages one after the other, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch

from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.pipelines_core.link import Guarded, last_use
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.platforms.device import synchronize
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class SyncExecutor:
    """Runs stages in order, times each, and frees each tensor after its last reader."""

    residency: ResidencyManager | None = None
    """Has each stage's components on the device while it runs; set by the pipeline."""

    def __init__(self, stages: Mapping[str, PipelineStage]) -> None:
        self.stages = stages
        self.last_use = last_use(stages)

    @torch.inference_mode()
    def execute(self, batch: Req, server_args: ServerArgs) -> Req:
        """Carry ``batch`` through all stages; seconds by stage end up in ``batch.timings``."""
        residency = self.residency or ResidencyManager({}, {})
        device = server_args.platform.device
        with residency.request():
            for name, stage in self.stages.items():
                start = time.perf_counter()
                with residency.stage(name):
                    self._run(stage, batch, server_args)
                    synchronize(device)
                batch.timings[name] = time.perf_counter() - start
                for field in self.last_use.get(name, ()):
                    batch.release(field)
        return batch

    def _run(self, stage: PipelineStage, batch: Req, server_args: ServerArgs) -> None:
        checked = server_args.observe.check_stages and stage.reads is not None
        seen = cast(Req, Guarded(batch, stage)) if checked else batch
        returned = stage(seen, server_args)
        if returned is not seen:
            raise PipelineDefinitionError(
                f"{type(stage).__name__}.forward must return the batch it was given, "
                f"not {type(returned).__name__}"
            )
