"""The worker: one loaded pipeline, and the boundary at which a request may fail alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.registry import REGISTRY
from sglang.multimodal_gen.runtime.loader.model_source import (
    read_sampling_defaults,
    resolve_model_source,
)
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    OutputBatch,
    Req,
    RequestControl,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError, InternalError
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


class Worker:
    """Holds one pipeline and runs admitted requests on it, one batch at a time.

    Args:
        server_args: resolved arguments; ``pipeline_config`` in them is ignored.
        pipeline_config: an operator's settings for the family's `PipelineConfig`, or a whole one.
        progress: hears about loading, in bytes.

    Raises:
        ModelNotFound, CheckpointError: the model cannot be loaded; nothing is left behind.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        *,
        pipeline_config: PipelineConfig | Mapping[str, Any] | None = None,
        progress: ProgressListener | None = None,
    ) -> None:
        source = resolve_model_source(server_args.model.model_path, server_args.model.revision)
        info = REGISTRY.get_model_info(source)
        self.model_name = source.name
        self.sampling_param_cls = info.sampling_param_cls
        self.sampling_defaults = read_sampling_defaults(source.root)
        # Refuses a bad defaults file now, not at the first request.
        self.sampling_param_cls.from_values(
            self.sampling_defaults, source=f"sampling_params.json of {source.name}"
        )
        if isinstance(pipeline_config, PipelineConfig):
            config = pipeline_config
        else:
            config = info.pipeline_config_cls().with_settings(pipeline_config or {})
        self.pipeline: ComposedPipelineBase = info.pipeline_cls(
            server_args.model.model_path,
            dataclasses.replace(server_args, pipeline_config=config),
            progress=progress,
        )

    @property
    def server_args(self) -> ServerArgs:
        """The arguments in force, with the checkpoint's facts in ``pipeline_config``."""
        return self.pipeline.server_args

    def sampling_params(self, values: Mapping[str, Any]) -> SamplingParams:
        """A request's settings: the caller's over the checkpoint's over the family's.

        Raises:
            InvalidRequest: a field is unknown, or a value is refused.
        """
        return self.sampling_param_cls.from_values({**self.sampling_defaults, **values})

    def admit(self, params: SamplingParams, control: RequestControl | None = None) -> list[Req]:
        """Batches for a request; see `admission.admit`."""
        config = self.server_args.pipeline_config
        assert config is not None
        size = self.server_args.batching.batching_max_size
        return admit(params, config, batching_max_size=size, control=control)

    def run(self, batch: Req) -> OutputBatch:
        """Run one batch. A failure is that batch's alone: the pipeline serves the next one.

        Raises:
            DiffusionError: as stages raise it; any other failure arrives as `InternalError` with
                the request's id, its cause attached.
        """
        try:
            return self.pipeline.forward(batch, self.server_args)
        except DiffusionError:
            raise
        except Exception as error:  # the worker boundary: name the request, keep the cause
            raise InternalError(
                f"request {batch.request_id} failed: {type(error).__name__}: {error}"
            ) from error
