"""One request for videos on its way: from settings and uploads to a job that outlives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.request_checks import (
    check_limits,
    in_the_clients_words,
)
from sglang.multimodal_gen.runtime.entrypoints.http.video_schemas import (
    KIND,
    VideoSettings,
    effective,
)
from sglang.multimodal_gen.runtime.managers.service import GenerationService, Job, WorkOrder
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest


@dataclass(eq=False)
class VideoWork:
    """A request for videos; ``cleanup`` removes the uploads when its job has ended."""

    context: Context
    settings: VideoSettings
    images: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    cleanup: Callable[[], None] | None = None

    def submit(self) -> Job:
        """Check, and put the job in line.

        Raises:
            ApiError, DiffusionError: it is refused.
        """
        settings = self.settings
        service = self.context.service_for(settings.model, DataType.VIDEO)
        try:
            check_limits(settings, self.context.args.limits)
            order = WorkOrder(
                kind=KIND,
                settings=self._sampling(service),
                data_type=DataType.VIDEO,
                priority=0 if settings.priority is None else settings.priority,
                timeout=settings.timeout,
                keep=settings.output_format or "mp4",
                warnings=self._warnings(),
            )
            job = service.submit(order)
        except InvalidRequest as error:
            raise in_the_clients_words(error, settings) from error
        if self.cleanup is not None:
            cleanup, self.cleanup = self.cleanup, None
            job.result.add_done_callback(lambda _: cleanup())
        return job

    def _sampling(self, service: GenerationService) -> dict[str, Any]:
        model = service.model
        fields = model.info.sampling_param_cls.field_names()
        values = self.settings.sampling(fields)
        for name, paths in (("image_path", self.images), ("video_path", self.videos)):
            if paths and name not in fields:
                raise InvalidRequest(name, None, f"the model takes no {name.removesuffix('_path')}")
            if paths:
                values[name] = [str(path) for path in paths]
        seconds = self.settings.seconds_asked
        if seconds is not None:
            fps = model.sampling_params({**values, "num_frames": 1}).fps  # type: ignore[attr-defined]
            values["num_frames"] = model.config.nearest_num_frames(seconds * fps)
        values = effective(values, model.sampling_params(values))
        self._check_work(values)
        return values

    def _check_work(self, values: dict[str, Any]) -> None:
        """All videos of the request together are one piece of work, with one limit."""
        most = self.context.args.limits.max_video_pixels
        sizes = values["width"], values["height"]
        if most is None or None in sizes:
            return
        count = 1 if self.settings.n is None else self.settings.n
        frames = values["num_frames"]
        pixels = sizes[0] * sizes[1]
        if count * frames * pixels > most:
            raise InvalidRequest(
                "num_frames*height*width",
                f"{count}x{frames}x{sizes[1]}x{sizes[0]}",
                f"n x frames x height x width is more than the {most} that this server makes for "
                f"a request; at this size that is {most // pixels} frames in all",
            )

    def _warnings(self) -> tuple[str, ...]:
        quality = self.settings.quality
        if quality in (None, "auto", "standard"):
            return ()
        return (f"quality={quality!r} has no effect on this server",)
