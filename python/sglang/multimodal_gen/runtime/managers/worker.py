"""The worker: one loaded pipeline, and the boundary at which a request may fail alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import (
    DiffusionError,
    InternalError,
    OutOfMemory,
    UserError,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


class Worker:
    """Holds one loaded pipeline and runs admitted requests on it, one batch at a time.

    ``progress`` hears about loading, in bytes.

    Raises:
        CheckpointError: a component cannot be loaded; nothing is left behind.
    """

    def __init__(
        self, model: ModelDescription, *, progress: ProgressListener | None = None
    ) -> None:
        self.model = model
        self.pipeline: ComposedPipelineBase = model.info.pipeline_cls(
            model.server_args.model.model_path,
            model.server_args,
            source=model.source,
            progress=progress,
        )
        self.lora_receipts = self._start_adapters()

    @property
    def lora_pipeline(self) -> LoRAPipeline:
        """The pipeline, if it takes adapters.

        Raises:
            UserError: it takes none.
        """
        if not isinstance(self.pipeline, LoRAPipeline):
            raise UserError(f"{type(self.pipeline).__name__} takes no LoRA adapters")
        return self.pipeline

    def run(self, batch: Req) -> OutputBatch:
        """Run one batch. A failure is that batch's alone: the pipeline serves the next one.

        Raises:
            DiffusionError: as stages raise it; any other failure arrives as `InternalError` with
                the request's id, its cause attached.
        """
        try:
            with self._adapters_of(batch):
                return self.pipeline.forward(batch, self.pipeline.server_args)
        except DiffusionError:
            raise
        except torch.OutOfMemoryError as error:
            size = f"{batch.height}x{batch.width}, " if batch.height and batch.width else ""
            raise OutOfMemory(
                f"{size}{batch.batch_size} images together, did not fit "
                f"into the device's memory ({error}). Ask for less at once (batching_max_size), a "
                "smaller size, or --precision bf16"
            ) from error
        except Exception as error:  # the worker boundary: name the request, keep the cause
            raise InternalError(
                f"request {batch.request_id} failed: {type(error).__name__}: {error}"
            ) from error

    def check(self) -> None:
        """Ask the device for a small sum: a GPU that faulted answers nothing any more.

        Raises:
            WorkerDied: it does not answer.
        """
        try:
            torch.ones(2, device=self.model.server_args.platform.device).sum().item()
        except RuntimeError as error:
            raise WorkerDied(f"the device does not answer: {error}") from error

    def load_lora(self, name: str, path: str) -> dict[str, Any]:
        """Load an adapter's file under a name; see `LoRAPipeline.load_lora_adapter`."""
        receipt = self.lora_pipeline.load_lora_adapter(path, name)
        return {"name": receipt.nickname, "ranks": list(receipt.ranks), "format": receipt.format,
                "components": sorted(receipt.modules), "unused": receipt.leftovers()}  # fmt: skip

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; it is taken out of whatever is in force."""
        self.lora_pipeline.unload_lora_adapter(name)

    def lora_status(self) -> dict[str, Any]:
        """``loaded_adapters`` and ``active``; both empty where the pipeline takes none."""
        if not isinstance(self.pipeline, LoRAPipeline):
            return {"loaded_adapters": [], "active": {}}
        return self.pipeline.get_lora_status()

    def _start_adapters(self) -> tuple[LoRAReceipt, ...]:
        """Put the server arguments' adapters in force."""
        args = self.model.server_args.lora
        if not args.lora_paths:
            return ()
        return self.lora_pipeline.set_lora(
            args.lora_nicknames,
            args.lora_paths,
            strength=args.lora_scales,
            merge_mode=args.lora_merge_mode,
        )

    @contextmanager
    def _adapters_of(self, batch: Req) -> Iterator[None]:
        """The batch's own adapters while it runs, in place of those in force."""
        choices = batch.request.lora_choices
        if not isinstance(self.pipeline, LoRAPipeline) and not choices:
            yield
            return
        with self.lora_pipeline.request_adapters(choices) as receipts:
            for receipt in receipts:
                batch.warnings += [f"lora {receipt.nickname!r}: {p}" for p in receipt.leftovers()]
            yield
