"""The Python door: load a model, ask it for pictures and videos."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
from sglang.multimodal_gen.runtime.entrypoints.generated import (
    Generated,
    GeneratedImage,
    GeneratedVideo,
)
from sglang.multimodal_gen.runtime.entrypoints.input_pictures import InputPictures
from sglang.multimodal_gen.runtime.entrypoints.result_files import Destination, Kind, local_path
from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.managers.finished import FinishedImage, finished_of, settings_of
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.open_worker import open_worker
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_arguments import MergeMode
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    OutputBatch,
    Req,
    RequestControl,
)
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.environ import launched_rank
from sglang.multimodal_gen.runtime.utils.errors import CallbackFailed, UserError
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig


@dataclass(frozen=True, eq=False)
class GenerationResult(Sequence[Any]):
    """The pictures or the videos of one call, in order: a sequence, with what the call cost.

    Its items are `GeneratedImage` or, of a task that makes videos, `GeneratedVideo`.

    ``timings`` are seconds by stage summed over batches; ``peak_memory_mb`` is the device's peak in
    MiB (CPU: the process's); ``parameters`` are the settings that were in force; ``backend`` is who
    ran the model, ``sglang`` or ``diffusers``; ``step_cache`` is what a step cache saved, None
    without one.
    """

    images: list[GeneratedImage]
    timings: dict[str, float]
    load_seconds: float
    peak_memory_mb: float
    warnings: list[str]
    model: str
    parameters: dict[str, Any]
    backend: str = "sglang"
    videos: list[GeneratedVideo] = field(default_factory=list)
    step_cache: StepCacheUse | None = None

    @property
    def outputs(self) -> Sequence[Generated]:
        """The videos of a call that made videos, the pictures of any other."""
        return self.videos or self.images

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self.outputs[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.outputs)

    def save(self, path: str | Path, *, metadata: bool = True, frames: bool = False) -> list[Path]:
        """Write the outputs into a folder, or a single one to a file; returns the paths.

        In a folder, names are made of time and seed and avoid every existing file; a file that you
        name is replaced. With ``metadata`` each holds its prompt, seed, model and settings. Videos
        are .mp4 (or .gif, .webp where you name the file); with ``frames`` each is a new folder of
        PNG files.

        Raises:
            OutputError: the place cannot be written; nothing half-written stays.
            UserError: MP4, and the extra ``video`` is not installed; or ``frames`` of pictures.
        """
        kind: Kind = "video" if self.videos else "image"
        if frames and kind == "image":
            raise UserError("frames=True: these are pictures, which have none; leave it out")
        place = Destination.of_path(
            local_path(path), len(self), overwrite=True, kind="frames" if frames else kind
        )
        written = place.write(
            self.outputs, model=self.model, parameters=self.parameters, metadata=metadata
        )
        return list(written)


class DiffGenerator:
    """A loaded model that makes pictures. Use `from_pretrained`; close it, or use ``with``.

    With one rank: one process, no sockets, safe in a notebook. With more (``num_gpus=2``) the model
    is in processes of its own. Not for use from several threads at once.
    """

    def __init__(
        self, worker: Worker | WorkerGroup, *, notes: Sequence[str] = (), load_seconds: float
    ) -> None:
        self._worker: Worker | WorkerGroup | None = worker
        self.notes = tuple(notes)
        """One sentence for each choice that was made for the caller."""
        self.load_seconds = load_seconds

    @classmethod
    def from_pretrained(
        cls,
        model_path: str = "demo",
        *,
        pipeline_config: PipelineConfig | Mapping[str, Any] | None = None,
        progress: ProgressListener | None = None,
        **server_args: Any,
    ) -> Self:
        """Load a model.

        Args:
            model_path: bundled name, local folder in the Diffusers layout, or hub id.
            pipeline_config: settings of the family's `PipelineConfig`, e.g.
                ``{"vae_precision": "fp32"}``.
            progress: hears about loading, in bytes.
            server_args: any flat server argument, e.g. ``device="cpu"``, ``precision="fp32"``.

        Raises:
            UserError: an argument is unknown or cannot be honoured, or the model is not found.
            CheckpointError: the checkpoint is incomplete or damaged.
        """
        args = ServerArgs.from_flat(model_path=model_path, **server_args)
        return cls.from_server_args(args, pipeline_config=pipeline_config, progress=progress)

    @classmethod
    def from_server_args(
        cls,
        server_args: ServerArgs,
        *,
        pipeline_config: PipelineConfig | Mapping[str, Any] | None = None,
        before_loading: Callable[[ModelDescription], object] | None = None,
        progress: ProgressListener | None = None,
    ) -> Self:
        """Load the model that the arguments name; raises as `from_pretrained`.

        ``before_loading`` sees the model once it is found; raising from it saves the loading.

        Where this process only follows another (torchrun's ranks but the first, nodes but number
        0), it works for it here until that one is done, and then ends.

        Raises:
            SystemExit: this process followed another, and all is well.
            WorkerDied: a rank failed alone, or is gone.
        """
        start = time.perf_counter()
        load_external_packages()
        launched = launched_rank()
        resolution = resolve(server_args, device_facts(), launched)
        model = ModelDescription.find(resolution.args, pipeline_config)
        model, fitted = model.fitted(server_args.parallel)
        if before_loading is not None:
            before_loading(model)
        worker = open_worker(model, progress=progress, launched=launched)
        notes = (*resolution.notes, *fitted, *model.info.notes, *worker.notes)
        return cls(worker, notes=notes, load_seconds=time.perf_counter() - start)

    def generate(
        self,
        sampling_params_kwargs: Mapping[str, Any] | None = None,
        *,
        progress: ProgressListener | None = None,
        cancelled: threading.Event | None = None,
        **sampling_params: Any,
    ) -> GenerationResult:
        """Make pictures, or videos where the task makes those.

        Args:
            sampling_params_kwargs: sampling fields as a mapping.
            progress: called as each stage begins, and after each denoising step and decoded
                image; what it raises stops the work and comes back to the caller.
            cancelled: set it, from another thread, to stop within one step.
            sampling_params: sampling fields by name: ``prompt`` (text or a list), ``seed``,
                ``num_outputs_per_prompt``, ``height``, ``width``, ``num_inference_steps``,
                ``guidance_scale``, ``negative_prompt``, ``true_cfg_scale``, ``num_frames``,
                ``fps``, ``image_path`` (paths, Pillow's images, bytes of files, ``data:`` URLs, or
                URLs that are fetched as a server does by default), ...

        Raises:
            InvalidRequest: a field is unknown or a value does not fit the model.
            OutOfMemory: the device cannot hold the batch.
            Cancelled: ``cancelled`` was set.
        """
        return merge_results(
            list(
                self.generate_batches(
                    sampling_params_kwargs,
                    progress=progress,
                    cancelled=cancelled,
                    **sampling_params,
                )
            )
        )

    def generate_batches(
        self,
        sampling_params_kwargs: Mapping[str, Any] | None = None,
        *,
        progress: ProgressListener | None = None,
        cancelled: threading.Event | None = None,
        **sampling_params: Any,
    ) -> Iterator[GenerationResult]:
        """The same, a result for each batch as soon as it is there; raises as `generate`.

        All of the request is checked before the first batch runs.
        """
        worker = self._open()
        _check_call(sampling_params_kwargs, progress, cancelled)
        pictures = InputPictures()
        try:
            values = pictures.named({**(sampling_params_kwargs or {}), **sampling_params})
            batches = worker.model.admit(worker.model.sampling_params(values))
        except BaseException:
            pictures.close()
            raise
        counter = _WholeCallProgress(progress, batches, cancelled or threading.Event())
        return self._run_batches(worker, batches, counter, pictures)

    def _run_batches(
        self,
        worker: Worker | WorkerGroup,
        batches: Sequence[Req],
        counter: _WholeCallProgress,
        pictures: InputPictures,
    ) -> Iterator[GenerationResult]:
        with pictures:
            yield from self._results(worker, batches, counter)

    def _results(
        self, worker: Worker | WorkerGroup, batches: Sequence[Req], counter: _WholeCallProgress
    ) -> Iterator[GenerationResult]:
        watched = [counter.watch(index, batch) for index, batch in enumerate(batches)]
        outputs = iter(worker.run_all(watched))
        for index, batch in enumerate(batches):
            try:
                output = next(outputs)
            except CallbackFailed as error:
                raise error.cause from None
            counter.finished.add(index)
            yield _result(output, batch.request, worker.model, self.load_seconds)

    def set_lora(
        self,
        lora_nickname: str | Sequence[str],
        lora_path: str | Sequence[str | None] | None = None,
        target: str | Sequence[str] = "all",
        strength: float | Sequence[float] = 1.0,
        merge_mode: MergeMode | None = None,
    ) -> tuple[LoRAReceipt, ...]:
        """Put LoRA adapters in force for all further calls; see `LoRAPipeline.set_lora`.

        For one call alone, give ``generate`` a ``lora``: ``["name=0.5"]``, or mappings with name or
        path, and weight.
        """
        worker = self._open()
        return worker.set_lora(lora_nickname, lora_path, target, strength, merge_mode=merge_mode)

    def unset_lora(self, target: str | Sequence[str] = "all") -> None:
        """Take adapters out of force; the model is the base again, bit for bit."""
        self._open().unset_lora(target)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; it is taken out of whatever is in force."""
        self._open().unload_lora(name)

    def merge_lora_weights(
        self, target: str | Sequence[str] = "all", strength: float = 1.0
    ) -> None:
        """Put the chosen adapters into the weights; ``strength`` multiplies their weights."""
        self._open().merge_lora_weights(target, strength)

    def unmerge_lora_weights(self, target: str | Sequence[str] = "all") -> None:
        """Take merged adapters out of the weights; they stay chosen."""
        self._open().unmerge_lora_weights(target)

    def list_loras(self) -> dict[str, Any]:
        """``loaded_adapters``, and which of them are ``active`` on which component."""
        return self._open().on_adapters("get_lora_status")

    @property
    def pipeline(self) -> ComposedPipelineBase:
        """The pipeline behind this generator, for inspection.

        Raises:
            UserError: it is in other processes.
        """
        worker = self._open()
        if isinstance(worker, WorkerGroup):
            ranks = worker.model.server_args.parallel.layout.world_size
            raise UserError(
                f"the pipeline is in {ranks} other processes (num_gpus={ranks}), out of reach; "
                "load the model with one rank to look into it"
            )
        return worker.pipeline

    def close(self) -> None:
        """Let go of the model and its memory; the generator cannot be used afterwards."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Worker | WorkerGroup:
        if self._worker is None:
            raise UserError("this DiffGenerator is closed; load the model again")
        return self._worker


class _WholeCallProgress:
    """Turns the progress of single batches into that of the whole call."""

    def __init__(
        self,
        listener: ProgressListener | None,
        batches: Sequence[Req],
        cancelled: threading.Event,
    ) -> None:
        self.listener = listener
        self.batches = batches
        self.cancelled = cancelled
        self.finished: set[int] = set()
        self._done: dict[tuple[str, int], int] = {}

    def watch(self, index: int, batch: Req) -> Req:
        """The batch, reporting how far the whole call has come."""
        listener = self.listener

        def report(event: ProgressEvent) -> None:
            if listener is None:
                return
            units = [b.batch_size if event.phase == "decode" else event.total for b in self.batches]
            self._done[event.phase, index] = event.done
            done = sum(
                unit if i in self.finished else self._done.get((event.phase, i), 0)
                for i, unit in enumerate(units)
            )
            listener(dataclasses.replace(event, done=done, total=sum(units)))

        batch.control = RequestControl(report, self.cancelled)
        return batch


def merge_results(parts: Sequence[GenerationResult]) -> GenerationResult:
    """One result of several batches of one request: times add up, memory is the highest."""
    timings: dict[str, float] = {}
    used = [part.step_cache for part in parts if part.step_cache is not None]
    for part in parts:
        for stage, seconds in part.timings.items():
            timings[stage] = timings.get(stage, 0.0) + seconds
    return dataclasses.replace(
        parts[0],
        images=[image for part in parts for image in part.images],
        videos=[video for part in parts for video in part.videos],
        timings=timings,
        peak_memory_mb=max(part.peak_memory_mb for part in parts),
        warnings=list(dict.fromkeys(warning for part in parts for warning in part.warnings)),
        step_cache=reduce(StepCacheUse.and_then, used) if used else None,
    )


def _result(
    output: OutputBatch, params: SamplingParams, model: ModelDescription, load_seconds: float
) -> GenerationResult:
    finished = finished_of(output)
    return GenerationResult(
        images=[
            GeneratedImage(image.array, image.prompt, image.seed)
            for image in finished
            if isinstance(image, FinishedImage)
        ],
        videos=[
            GeneratedVideo(video.frames, video.fps, video.prompt, video.seed)
            for video in finished
            if not isinstance(video, FinishedImage)
        ],
        timings=output.timings,
        load_seconds=load_seconds,
        peak_memory_mb=output.peak_memory_mb,
        warnings=output.warnings,
        model=model.source.name,
        parameters=settings_of(params),
        backend=model.info.backend,
        step_cache=output.step_cache,
    )


def _check_call(settings: object, progress: object, cancelled: object) -> None:
    """Refuse what cannot be the arguments meant, before anything runs."""
    if isinstance(settings, (str, bytes, list, tuple)):
        raise UserError(f"generate({settings!r:.40}): say it by name, generate(prompt=...)")
    if settings is not None and not (
        isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)
    ):
        raise UserError(f"sampling_params_kwargs={settings!r:.40} must map field names to values")
    if progress is not None and not callable(progress):
        raise UserError(f"progress={progress!r:.40} must be a function of one ProgressEvent")
    if cancelled is not None and not isinstance(cancelled, threading.Event):
        raise UserError(f"cancelled={cancelled!r:.40} must be a threading.Event")
