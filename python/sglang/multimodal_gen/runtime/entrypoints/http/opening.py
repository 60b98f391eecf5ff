"""From arguments to a service that is ready: find the model, load it, warm it up."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.jobs import MemoryJobStore
from sglang.multimodal_gen.runtime.managers.lifecycle import warm_up
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.open_worker import open_worker
from sglang.multimodal_gen.runtime.managers.runner import Runner
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, SchedulingLimits
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.environ import launched_rank
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener
from sglang.multimodal_gen.runtime.utils.video_file import require_video_codec

logger = logging.getLogger(__name__)


def open_service(
    server_args: ServerArgs,
    serving: ServingArgs,
    progress: ProgressListener,
    files: FileStore | None = None,
) -> GenerationService:
    """Load the model that the arguments name, and warm it up; ``files`` is where results are kept.

    Raises:
        UserError, CheckpointError: the model is not found, or cannot be served.
    """
    load_external_packages()
    launched = launched_rank()
    resolution = resolve(server_args, device_facts(), launched)
    most = serving.limits.max_image_pixels
    settings = {} if most is None else {"max_pixels": most}
    if serving.limits.max_video_pixels is not None:
        settings["max_video_pixels"] = serving.limits.max_video_pixels
    model = ModelDescription.find(resolution.args, settings)
    if model.config.makes_videos:
        require_video_codec()  # known before a weight is loaded
    model, fitted = model.fitted(server_args.parallel)
    runner = open_worker(model, progress=progress, launched=launched)
    notes = [*resolution.notes, *fitted, *model.info.notes, *runner.notes]
    for note in notes:
        logger.info("%s", note)
    if serving.http.warmup_mode == "server":
        seconds = warm_up(model, runner, steps=serving.http.warmup_steps)
        logger.info("warmed up in %.1f s", seconds)
    return service_of(model, runner, serving, notes=notes, files=files)


def service_of(
    model: ModelDescription,
    runner: Runner,
    serving: ServingArgs,
    *,
    notes: list[str] | None = None,
    files: FileStore | None = None,
) -> GenerationService:
    """A service around a model and whatever runs it."""
    queue = serving.queue
    limits = SchedulingLimits(
        max_waiting=queue.max_queued_requests,
        max_batch=model.server_args.batching.batching_max_size,
        batching_delay=queue.batching_delay_ms / 1000,
        together=model.info.pipeline_cls.supports_dynamic_batching,
    )
    return GenerationService(
        model,
        Scheduler(runner, limits),
        MemoryJobStore(),
        served_name=serving.http.served_model_name or served_name(model),
        job_ttl=serving.keep.job_ttl,
        default_timeout=queue.request_timeout,
        notes=notes or (),
        files=files,
        file_ttl=serving.keep.file_ttl,
    )


def served_name(model: ModelDescription) -> str:
    """What clients call a model: its bundled name or hub id, or its folder's name alone."""
    if model.source.kind == "local":
        return Path(model.source.name).resolve().name
    return model.source.name
