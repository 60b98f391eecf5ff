"""The worker: one loaded pipeline, and the boundary at which a request may fail alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.managers.lora_verbs import LoRAVerbs
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
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


class Worker(LoRAVerbs):
    """Holds one loaded pipeline and runs admitted requests on it, one batch at a time.

    ``progress`` hears about loading, in bytes; ``parallel`` is this rank's place in a run of many.

    Raises:
        CheckpointError: a component cannot be loaded; nothing is left behind.
    """

    def __init__(
        self,
        model: ModelDescription,
        *,
        progress: ProgressListener | None = None,
        parallel: ParallelState | None = None,
    ) -> None:
        self.model = model
        self.pipeline = model.open_pipeline(progress=progress, parallel=parallel)
        self.lora_receipts = self._start_adapters()
        self.notes = (*self.pipeline.notes, *(r.summary() for r in self.lora_receipts))
        """One sentence for each choice that was made while loading."""

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

    def run_all(self, batches: Iterable[Req]) -> Iterator[OutputBatch]:
        """Run batches, each when the one before it was taken; raises as `run`."""
        return map(self.run, batches)

    def on_adapters(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a verb of the pipeline; see `LoRAVerbs`."""
        return getattr(self.lora_pipeline, verb)(*args, **kwargs)

    def close(self) -> None:
        """Drops recordings; the model goes when nobody holds the worker any more."""
        self.pipeline.close()

    def check(self) -> None:
        """Ask the device for a small sum: a GPU that faulted answers nothing any more.

        Raises:
            WorkerDied: it does not answer.
        """
        try:
            torch.ones(2, device=self.model.server_args.platform.device).sum().item()
        except RuntimeError as error:
            raise WorkerDied(f"the device does not answer: {error}") from error

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
