"""Any Diffusers pipeline behind the doors of this runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import (
    NO_PICTURES,
    pipeline_class,
    signature_of,
)
from sglang.multimodal_gen.runtime.diffusers_backend.execution_stage import (
    DiffusersExecutionStage,
)
from sglang.multimodal_gen.runtime.diffusers_backend.loading import check_components, load_pipeline
from sglang.multimodal_gen.runtime.diffusers_backend.settings import DiffusersPipelineConfig
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource, resolve_model_source
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, ModelNotFound
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


class DiffusersPipeline(ComposedPipelineBase):
    """Runs the pipeline class that ``model_index.json`` names, as Diffusers wrote it.

    For models without a native family: compatible first, without this runtime's speed.
    """

    pipeline_name = "DiffusersPipeline"

    _required_config_modules = ["pipeline"]
    # Its calls take the request's settings, and its warnings do not say whose prompt they quote.
    supports_dynamic_batching = False

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
        signature = signature_of(pipeline_class(source.class_name or ""))
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


def _refuse_overrides(source: ModelSource, server_args: ServerArgs) -> None:
    model, known = server_args.model, source.components
    if (setting := server_args.memory.first_set()) is not None:
        problem = "the Diffusers backend keeps all components on the device; leave it out"
        raise InvalidArgument(*setting, problem)
    if server_args.vae.vae_mode != "auto":
        problem = "the Diffusers backend decodes as its pipeline does. Leave it out"
        raise InvalidArgument("vae_mode", server_args.vae.vae_mode, problem)
    for name, path in model.component_paths.items():
        raise InvalidArgument(
            f"component_paths.{name}", path, "the Diffusers backend loads one whole folder"
        )
    for name, value in model.component_precisions.items():
        if name not in known:
            raise InvalidArgument(
                f"component_precisions.{name}",
                value,
                f"this checkpoint has no such component.{did_you_mean(name, known)} "
                f"It has: {', '.join(known)}",
            )
