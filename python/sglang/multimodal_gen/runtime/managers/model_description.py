"""A model that was found and understood, but not loaded: enough to refuse a request early."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.step_cache_choice import METHODS, OFF, chosen
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.registry import REGISTRY, ModelInfo
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.lora_file import find_lora_file
from sglang.multimodal_gen.runtime.loader.model_source import (
    ModelSource,
    read_sampling_defaults,
)
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_arguments import not_loaded
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.server_args.resolve import check_backend
from sglang.multimodal_gen.runtime.server_args.resolve_parallel import fit_heads
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Where a model is, which classes serve it, and what its checkpoint says about itself.

    ``server_args`` are resolved and hold the family's pipeline config with the checkpoint's facts.
    """

    source: ModelSource
    info: ModelInfo
    server_args: ServerArgs
    sampling_defaults: Mapping[str, Any]

    @classmethod
    def find(
        cls,
        server_args: ServerArgs,
        pipeline_config: PipelineConfig | Mapping[str, Any] | None = None,
    ) -> Self:
        """Find the model that the arguments name; reads its JSON files, no weights.

        ``pipeline_config`` is an operator's settings for the family's config, or a whole one of
        that class. A ``task_type`` among the settings is one of those that the checkpoint allows.

        Raises:
            ModelNotFound: nothing is there, or no family serves it.
            CheckpointError: a file of it, or an adapter's, is missing or damaged, or its
                ``sampling_params.json`` holds a bad value.
            InvalidArgument: adapters are asked for, and the pipeline takes none; or several ranks,
                and the pipeline uses one; or ``pipeline_config`` is of another family.
        """
        source, info = REGISTRY.find(server_args.model)
        check_backend(
            info.backend,
            server_args.parallel,
            server_args.model.quantization,
            compiled=server_args.speed.enable_torch_compile,
        )
        model = dataclasses.replace(server_args.model, backend=info.backend)
        for path in server_args.lora.lora_paths:
            if not issubclass(info.pipeline_cls, LoRAPipeline):
                problem = f"{info.pipeline_cls.__name__} takes no LoRA adapters"
                raise InvalidArgument("lora_path", path, problem)
            find_lora_file(path)
        task: dict[str, Any] = {}
        if isinstance(pipeline_config, PipelineConfig):
            config = pipeline_config
            if not isinstance(config, info.pipeline_config_cls):
                problem = (
                    f"{info.pipeline_cls.__name__} takes a {info.pipeline_config_cls.__name__}"
                )
                raise InvalidArgument("pipeline_config", type(config).__name__, problem)
        elif not isinstance(pipeline_config, Mapping | None):
            problem = "must be a PipelineConfig or a mapping of its fields"
            raise InvalidArgument("pipeline_config", pipeline_config, problem)
        else:
            settings = dict(pipeline_config or {})
            if info.backend == "sglang" and "task_type" in settings:
                task = {"task_type": settings.pop("task_type")}
            config = info.pipeline_config_cls().with_settings(settings)
        args = dataclasses.replace(server_args, model=model, pipeline_config=config)
        args = info.pipeline_cls.bind_checkpoint(source, args)
        assert args.pipeline_config is not None
        # Only now: what a pipeline is capable of may depend on the checkpoint.
        args = dataclasses.replace(args, pipeline_config=args.pipeline_config.with_settings(task))
        assert args.pipeline_config is not None
        args.pipeline_config.get_supported_task_types()  # a bad declaration ends here
        defaults = read_sampling_defaults(source.root)
        found = cls(source, info, args, defaults)
        method = args.speed.default_step_cache
        if method != OFF and (problem := found._step_cache_problem(method)) is not None:
            raise InvalidArgument("default_step_cache", method, problem)
        if "prompt" in defaults:
            problem = f"sampling_params.json of {source.name}: prompt is a request's, not a default"
            raise CheckpointError(problem)
        try:
            info.sampling_param_cls.from_values(defaults)
        except InvalidRequest as error:
            raise CheckpointError(f"sampling_params.json of {source.name}: {error}") from error
        return found

    def fitted(self, asked: ParallelArgs) -> tuple[Self, tuple[str, ...]]:
        """The same with ranks that fit its heads, and a sentence if that changed what was chosen.

        ``asked`` are the arguments as the user gave them.
        """
        parallel = self.server_args.parallel
        if parallel.layout.world_size == 1:
            return self, ()
        heads = self.info.pipeline_cls.attention_heads(self.source, self.server_args)
        parallel, notes = fit_heads(asked, parallel, heads)
        args = dataclasses.replace(self.server_args, parallel=parallel)
        return dataclasses.replace(self, server_args=args), notes

    def open_pipeline(
        self,
        *,
        progress: ProgressListener | None = None,
        parallel: ParallelState | None = None,
    ) -> ComposedPipelineBase:
        """Load it; ``progress`` hears of bytes, ``parallel`` is this rank's place in a run of many.

        Raises:
            CheckpointError: a component cannot be loaded; nothing is left behind.
        """
        return self.info.pipeline_cls(
            self.server_args.model.model_path,
            self.server_args,
            source=self.source,
            progress=progress,
            parallel=parallel,
        )

    def sampling_params(self, values: Mapping[str, Any]) -> SamplingParams:
        """A request's settings: the caller's over the checkpoint's over the family's.

        Raises:
            InvalidRequest: a field is unknown, or a value is refused.
        """
        return self.info.sampling_param_cls.from_values({**self.sampling_defaults, **values})

    def admit(
        self,
        params: SamplingParams,
        control: RequestControl | None = None,
        *,
        data_type: DataType | None = None,
        previews: int = 0,
    ) -> list[Req]:
        """Batches for a request; see `admission.admit`."""
        self._check_adapters(params)
        return admit(
            self._with_step_cache(params),
            self.config,
            batching_max_size=self.server_args.batching.batching_max_size,
            control=control,
            data_type=data_type,
            previews=previews,
        )

    def _with_step_cache(self, params: SamplingParams) -> SamplingParams:
        """The same, saying itself what it was left to the server to say of step caches.

        Raises:
            InvalidRequest: the request asks for one, and the denoiser does not say what is needed.
        """
        params.check()
        wish, threshold = params.step_cache, params.step_cache_threshold
        choice = chosen(wish, threshold, self.server_args.speed.step_cache_choice)
        if choice is None:
            if threshold is not None:
                problem = f"has no effect: choose step_cache={' or '.join(METHODS)}"
                raise InvalidRequest("step_cache_threshold", threshold, problem)
            return dataclasses.replace(params, step_cache=None)
        problem = self._step_cache_problem(choice.method)
        if problem is not None:
            raise InvalidRequest("step_cache", choice.method, problem)
        return dataclasses.replace(
            params, step_cache=choice.method, step_cache_threshold=choice.threshold
        )

    def _step_cache_problem(self, method: str) -> str | None:
        """Why this model, with these arguments, can skip no step; None if it can."""
        if self.server_args.memory.use_fsdp_inference:
            return (
                "the denoiser's weights are spread over ranks, which gather each block for the "
                "next; use --no-use-fsdp-inference, or leave it out"
            )
        return self.info.pipeline_cls.step_cache_problem(self.source, self.server_args, method)

    @property
    def config(self) -> PipelineConfig:
        """The family's pipeline config with the checkpoint's facts."""
        config = self.server_args.pipeline_config
        assert config is not None, "find() puts one in"
        return config

    def check_adapter_names(self, params: SamplingParams) -> None:
        """Refuse a request's adapter that start-up does not load, where nobody else will load it.

        Raises:
            InvalidRequest: a name is none of ``lora_nickname``.
        """
        lora = self.server_args.lora
        known = dict(zip(lora.lora_nicknames, lora.lora_paths, strict=False))
        for choice in params.lora_choices or ():
            if not choice.is_path and choice.adapter not in known:
                problem = not_loaded(choice.adapter, known)
                raise InvalidRequest("lora", choice.adapter, problem)

    def _check_adapters(self, params: SamplingParams) -> None:
        """What can be said of a request's adapters without the model: their files' headers."""
        choices = params.lora_choices or ()
        if choices and not issubclass(self.info.pipeline_cls, LoRAPipeline):
            problem = f"{self.info.pipeline_cls.__name__} takes no LoRA adapters"
            raise InvalidRequest("lora", choices[0].adapter, problem)
        for choice in choices:
            if choice.is_path:
                find_lora_file(choice.adapter)
