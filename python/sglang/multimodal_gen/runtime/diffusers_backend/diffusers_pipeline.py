"""Any Diffusers pipeline behind the doors of this runtime."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.multimodal_gen.configs.lora_choice import LoRAChoice
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import (
    NO_PICTURES,
    pipeline_class,
    signature_of,
)
from sglang.multimodal_gen.runtime.diffusers_backend.execution_stage import (
    DiffusersExecutionStage,
)
from sglang.multimodal_gen.runtime.diffusers_backend.library_adapters import (
    LibraryAdapter,
    LibraryAdapters,
    no_adapters,
)
from sglang.multimodal_gen.runtime.diffusers_backend.loading import check_components, load_pipeline
from sglang.multimodal_gen.runtime.diffusers_backend.offload import check_memory, offload_note
from sglang.multimodal_gen.runtime.diffusers_backend.schedulers import check_scheduler
from sglang.multimodal_gen.runtime.diffusers_backend.settings import DiffusersPipelineConfig
from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.loader.lora_file import LoRAFile
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource, resolve_model_source
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.lora_selection import LoadedAdapter, Selection
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    ModelNotFound,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)


class DiffusersPipeline(LoRAPipeline):
    """Runs the pipeline class that ``model_index.json`` names, as Diffusers wrote it.

    For models without a native family: compatible first, without this runtime's speed. Adapters
    are Diffusers' own too, where the pipeline class takes them.
    """

    pipeline_name = "DiffusersPipeline"

    _required_config_modules = ["pipeline"]
    # Its calls take the request's settings, and its warnings do not say whose prompt they quote.
    supports_dynamic_batching = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._library = LibraryAdapters(self.modules["pipeline"])

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each choice made while loading."""
        note = offload_note(self.server_args)
        return super().notes if note is None else (*super().notes, note)

    @classmethod
    def bind_checkpoint(cls, source: ModelSource, server_args: ServerArgs) -> ServerArgs:
        """The arguments with the pipeline's call signature in their config; loads no weights.

        Raises:
            InvalidArgument: an argument that this backend cannot honour.
            ModelNotFound: Diffusers has no such pipeline, or it makes no pictures.
            CheckpointError: a component is missing, or of a library that is not trusted.
        """
        config = server_args.pipeline_config
        if not isinstance(config, DiffusersPipelineConfig):
            raise InvalidArgument(
                "pipeline_config",
                type(config).__name__,
                "is a native family's; with the Diffusers backend give a mapping of settings",
            )
        _refuse_overrides(source, server_args)
        check_components(source)
        found = pipeline_class(source.class_name or "")
        check_memory(server_args, source, found)
        check_scheduler(config.scheduler, source)
        for path in server_args.lora.lora_paths:
            if (problem := no_adapters(found)) is not None:
                raise InvalidArgument("lora_path", path, problem)
        signature = signature_of(found)
        for name in NO_PICTURES:
            if name in signature:
                raise ModelNotFound(
                    f"model_path={source.name!r}: {signature.class_name} takes {name!r}: it makes "
                    "video or sound, and the Diffusers backend serves pipelines that make pictures"
                )
        task = ModelTaskType.TI2I if "image" in signature else ModelTaskType.T2I
        if "image" in signature.required:
            task = ModelTaskType.I2I
        config = dataclasses.replace(config, signature=signature, task_type=task)
        return dataclasses.replace(server_args, pipeline_config=config)

    @classmethod
    def step_cache_problem(
        cls, source: ModelSource, server_args: ServerArgs, method: str
    ) -> str | None:
        """Diffusers calls the denoiser itself."""
        return (
            "Diffusers runs this model from end to end, so none of its steps can be skipped here; "
            "leave it out, or use --backend sglang where a native family serves the model"
        )

    def _load_modules(
        self,
        given: Mapping[str, Any],
        source: ModelSource | None,
        progress: ProgressListener | None,
    ) -> None:
        self.modules = dict(given)
        if "pipeline" not in given:
            if source is None:
                source = resolve_model_source(self.model_path, self.server_args.model.revision)
            self.server_args = self.bind_checkpoint(source, self.server_args)
            pipeline = load_pipeline(source, self.server_args, progress)
            self.modules |= {**pipeline.components, "pipeline": pipeline}
        config = self.server_args.pipeline_config
        assert config is not None
        config.seal()

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Generators and input images are the shared stage's; the rest is one call."""
        self.add_standard_input_validation_stage()
        self.add_stage(
            DiffusersExecutionStage(self._required("pipeline")), "diffusers_execution_stage"
        )

    # Adapters: the verbs are the shared ones, the layers are Diffusers'.

    @contextmanager
    def request_adapters(self, choices: Sequence[LoRAChoice] | None) -> Iterator[list[LoRAReceipt]]:
        """See `LoRAPipeline.request_adapters`; whatever the call did to weights is undone too."""
        with super().request_adapters(choices) as receipts:
            try:
                yield receipts
            finally:
                self._library.refresh()

    def _components(self) -> list[str]:
        return self._library.components

    def _read(self, file: LoRAFile, nickname: str) -> LoadedAdapter:
        problem = no_adapters(type(self.modules["pipeline"]))
        if problem is not None:
            raise UserError(f"lora_path={str(file.path)!r}: {problem}")
        try:
            adapter = self._library.load(file, nickname)
        finally:  # the library puts a new adapter in force at once
            self._library.enforce(self._selections)
        log = logger.warning if adapter.receipt.leftovers() else logger.info
        log("%s", adapter.receipt.summary())
        return adapter

    def _apply(self, component: str, wanted: Selection, *, may_run_live: bool = False) -> None:
        if may_run_live and wanted.mode == "merged":
            wanted = dataclasses.replace(wanted, mode="live")  # as Diffusers does by itself
        if wanted == self._selection(component):
            return
        self._selections[component] = Selection()
        try:
            self._library.enforce({**self._selections, component: wanted})
        except BaseException:
            self._library.enforce(self._selections)
            raise
        self._selections[component] = wanted

    def _forget(self, adapter: LoadedAdapter) -> None:
        assert isinstance(adapter, LibraryAdapter)
        self._library.delete(adapter)
        self._library.enforce(self._selections)


def _refuse_overrides(source: ModelSource, server_args: ServerArgs) -> None:
    model, known = server_args.model, source.components
    if server_args.vae.vae_mode != "auto":
        problem = "the Diffusers backend decodes as its pipeline does. Leave it out"
        raise InvalidArgument("vae_mode", server_args.vae.vae_mode, problem)
    for field in ("component_paths", "component_weights_paths"):
        for name, path in getattr(model, field).items():
            problem = "the Diffusers backend loads one whole folder; leave it out, or change that"
            raise InvalidArgument(f"{field}.{name}", path, problem)
    for name, value in model.component_precisions.items():
        if name not in known:
            raise InvalidArgument(
                f"component_precisions.{name}",
                value,
                f"this checkpoint has no such component.{did_you_mean(name, known)} "
                f"It has: {', '.join(known)}",
            )
