"""Pipelines: components loaded from a checkpoint, wired into a chain of stages."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image

from sglang.multimodal_gen.configs.step_cache_choice import OFF
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.backends.choice import (
    Machine,
    choose_backend,
)
from sglang.multimodal_gen.runtime.loader.compile_denoisers import (
    attention_for_compiling,
    check_machine,
    compile_denoisers,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.components import (
    load_components,
    offload_given,
    plan_memory,
    read_component_configs,
)
from sglang.multimodal_gen.runtime.loader.denoiser_split import (
    check_denoisers,
    denoiser_heads,
    denoiser_step_cache_problem,
    give_attention,
    split_denoisers,
)
from sglang.multimodal_gen.runtime.loader.model_source import (
    Layout,
    ModelSource,
    resolve_model_source,
)
from sglang.multimodal_gen.runtime.loader.quantize import quantization_note
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import ResidencyPlan
from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.pipelines_core.executors.sync_executor import SyncExecutor
from sglang.multimodal_gen.runtime.pipelines_core.link import link
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stage_wiring import StageWiring
from sglang.multimodal_gen.runtime.platforms.copy_lane import copy_lane
from sglang.multimodal_gen.runtime.platforms.device import (
    compute_capability,
    peak_memory_mb,
    reset_peak_memory,
)
from sglang.multimodal_gen.runtime.platforms.memory import memory_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidRequest,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)


class ComposedPipelineBase(StageWiring, ABC):
    """Base of every native pipeline.

    A family names the components it needs and wires its stages in `create_pipeline_stages`, most
    of them through the ``add_standard_*`` helpers. Construction loads the components, builds the
    stages, and checks the chain: a pipeline that exists is one that can run.

    Args:
        model_path: folder, hub id or bundled name; only used to load what is not given.
        server_args: resolved arguments with the family's ``pipeline_config`` in them.
        required_config_modules: replaces the class's list.
        loaded_modules: components by name that need no loading.
        executor: runs the stages; in order, in this process, by default.
        source: what ``model_path`` was found to be, where that is known already; the arguments
            then hold the checkpoint's facts (`bind_checkpoint`).
        progress: hears about loading, in bytes.
        parallel: this rank's place among the ranks of the run; one rank by default.

    Raises:
        CheckpointError: a required component is missing or does not fit.
        InvalidArgument: ``parallel`` asks of the denoiser what it cannot do.
        PipelineDefinitionError: the stages do not fit together.
    """

    pipeline_name: ClassVar[str]
    """Equals ``_class_name`` in the checkpoint's ``model_index.json``."""
    _required_config_modules: ClassVar[list[str]] = []
    _optional_config_modules: ClassVar[list[str]] = []
    """Components that are loaded where the checkpoint has them."""
    _extra_config_module_map: ClassVar[dict[str, str]] = {}
    """Alias -> the component of ``model_index.json`` it stands for."""
    component_loaders: ClassVar[dict[str, type[ComponentLoader]]] = {}
    """Loaders that differ from the default of the component's role, by exact component name, an
    alias where the pipeline uses one."""
    default_component_configs: ClassVar[dict[str, dict[str, Any]]] = {}
    """What ``config.json`` says, by component, for checkpoints that lack it (one bare file)."""
    supports_dynamic_batching: ClassVar[bool] = True
    """Whether requests of several callers may share a batch: every stage must go by the batch's
    prompts, negative prompts and seeds, one an image, and not by ``batch.request``'s."""

    def __init__(
        self,
        model_path: str,
        server_args: ServerArgs,
        required_config_modules: Sequence[str] | None = None,
        loaded_modules: Mapping[str, Any] | None = None,
        executor: Callable[[Mapping[str, PipelineStage]], SyncExecutor] = SyncExecutor,
        *,
        source: ModelSource | None = None,
        progress: ProgressListener | None = None,
        parallel: ParallelState | None = None,
    ) -> None:
        if server_args.pipeline_config is None:
            raise PipelineDefinitionError(
                f"{type(self).__name__} needs server_args.pipeline_config: the family's data and "
                "hooks"
            )
        self.model_path = model_path
        self._takes_optional = required_config_modules is None
        self.required_config_modules = list(
            self._required_config_modules
            if required_config_modules is None
            else required_config_modules
        )
        self.stages = {}
        self.stage_roles = {}
        self.stage_uses = {}
        self.modules = {}
        self.server_args = server_args
        self.parallel = (
            ParallelState.single(server_args.platform.device) if parallel is None else parallel
        )

        self.plan = ResidencyPlan()
        self._offloaded: dict[str, OffloadedComponent] = {}
        self.graphs = None
        self._graph_note = None
        self.experts = None
        self.step_caches = None

        device, wish = self.parallel.device.type, server_args.speed.attention_backend
        self.attention, self._attention_note = choose_backend(
            wish, Machine(device, compute_capability(device)), ring=self.parallel.ring.size > 1
        )
        if server_args.speed.enable_torch_compile:
            check_machine(device)
            self.attention, self._attention_note = attention_for_compiling(
                self.attention, self._attention_note
            )
        self._load_modules(loaded_modules or {}, source, progress)
        names = self._index_names(self.modules)
        split_denoisers(self.modules, names, self.parallel)
        give_attention(self.modules, names, self.attention, wish)
        self.compiled, self._compile_note = compile_denoisers(
            self.modules, names, server_args.speed, device
        )
        self.create_pipeline_stages(self.server_args)
        self._check_graphs()
        link(self.stages)
        self.residency = ResidencyManager(
            self._offloaded, self.stage_uses, overlap=self.plan.overlap
        )
        if self.experts is not None:
            self.experts.residency = self.residency
        self.executor = executor(self.stages)
        self.executor.residency = self.residency

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each choice made while loading."""
        quantized = quantization_note(self.modules, self.parallel.device.type)
        notes = (
            self.plan.note, quantized, self._graph_note, self._attention_note, self._compile_note,
        )  # fmt: skip
        return tuple(note for note in notes if note is not None)

    @abstractmethod
    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Wire the stages, in running order."""

    # Components.

    @classmethod
    def bind_checkpoint(cls, source: ModelSource, server_args: ServerArgs) -> ServerArgs:
        """The arguments with the checkpoint's facts in their pipeline config; loads no weights."""
        config = server_args.pipeline_config
        assert config is not None
        facts = cls.default_component_configs | read_component_configs(
            source, cls._index_names(cls.component_names(source)), server_args
        )
        config = config.with_checkpoint(facts, source.model_index)
        return dataclasses.replace(server_args, pipeline_config=config)

    @classmethod
    def attention_heads(cls, source: ModelSource, server_args: ServerArgs) -> tuple[int, ...]:
        """The numbers of heads that a split of the sequence by heads must divide; reads JSON."""
        return denoiser_heads(
            source,
            cls._index_names(cls.component_names(source)),
            server_args,
            cls.default_component_configs,
        )

    @classmethod
    def step_cache_problem(
        cls, source: ModelSource, server_args: ServerArgs, method: str
    ) -> str | None:
        """Why steps of this pipeline's denoisers cannot be skipped, if so; reads JSON alone."""
        return denoiser_step_cache_problem(
            source,
            cls._index_names(cls.component_names(source)),
            server_args,
            cls.default_component_configs,
            method,
        )

    @classmethod
    def component_names(cls, source: ModelSource) -> list[str]:
        """The components of this pipeline for a checkpoint, with the optional ones that it has."""
        names = cls._index_names(cls._optional_config_modules)
        present = [
            name
            for name, key in names.items()
            if key in source.components or (not source.indexed and (source.root / key).is_dir())
        ]
        return [*cls._required_config_modules, *present]

    @classmethod
    def _index_names(cls, names: Iterable[str] | None = None) -> dict[str, str]:
        """This pipeline's component names -> those of ``model_index.json``."""
        names = cls._required_config_modules if names is None else names
        return {name: cls._extra_config_module_map.get(name, name) for name in names}

    @classmethod
    def checkpoint_layout(cls) -> Layout:
        """What a checkpoint of this pipeline without ``model_index.json`` consists of."""
        keys = dict.fromkeys(cls._index_names().values())
        denoiser = cls._extra_config_module_map.get("transformer", "transformer")
        return Layout(cls.pipeline_name, tuple(keys), denoiser)

    @classmethod
    def warmup_settings(cls, task: ModelTaskType, folder: Path) -> dict[str, Any]:
        """Sampling settings of the request that warms a server up, for the model's default task.

        Anything left out is the model's default. A task that needs a picture gets a grey one,
        written into ``folder``; a family whose task needs more overrides this.
        """
        settings: dict[str, Any] = {"prompt": "warm-up", "seed": 0}
        if task.requires_image_input:
            path = folder / "warmup.png"
            Image.new("RGB", (64, 64), (127, 127, 127)).save(path)
            settings["image_path"] = str(path)
        return settings

    def _check_loaders(self) -> None:
        """A loader chosen for a name that no component has would be passed over in silence."""
        known = {*self._required_config_modules, *self.required_config_modules}
        known |= {*self._optional_config_modules}
        known |= self._extra_config_module_map.keys()
        for name in self.component_loaders:
            if name not in known:
                raise PipelineDefinitionError(
                    f"{type(self).__name__}.component_loaders names {name!r}, which is no "
                    f"component of it.{did_you_mean(name, known)} "
                    f"It has: {', '.join(sorted(known))}"
                )

    def _load_modules(
        self,
        given: Mapping[str, Any],
        source: ModelSource | None,
        progress: ProgressListener | None,
    ) -> None:
        self._check_loaders()
        self.modules = dict(given)
        missing = [name for name in self.required_config_modules if name not in given]
        if missing and source is None:
            source = resolve_model_source(
                self.model_path, self.server_args.model.revision, self.checkpoint_layout
            )
            self.server_args = self.bind_checkpoint(source, self.server_args)
        if source is not None and self._takes_optional:
            self.required_config_modules = self.component_names(source)
            missing = [name for name in self.required_config_modules if name not in given]
        names = self._index_names(missing)
        if source is not None:
            check_denoisers(
                source, names, self.server_args, self.default_component_configs, self.parallel
            )
        self.plan = plan_memory(
            source,
            names,
            self.server_args,
            self.component_loaders,
            self.default_component_configs,
            given,
            parallel=self.parallel,
            memory=memory_facts(self.parallel.device.type),
        )
        lane = copy_lane(self.parallel.device)
        self._offloaded = offload_given(given, self.plan, self.server_args, lane)
        if missing:
            assert source is not None
            loaded = load_components(
                source,
                names,
                self.server_args,
                self.component_loaders,
                progress,
                self.default_component_configs,
                parallel=self.parallel,
                plan=self.plan,
                lane=lane,
            )
            self.modules |= {name: component.module for name, component in loaded.items()}
            for name, component in loaded.items():
                logger.info("%s: %s loaded in %.2f s", self.model_path, name, component.seconds)
                if component.offloaded is not None:
                    self._offloaded[name] = component.offloaded
        config = self.server_args.pipeline_config
        assert config is not None
        config.seal()

    # Running.

    def close(self) -> None:
        """Let go of what must not outlive the ranks' groups: recordings with their messages."""
        if self.graphs is not None:
            self.graphs.drop()
        if self.compiled is not None:
            self.compiled.close()

    def forward(self, batch: Req, server_args: ServerArgs) -> OutputBatch:
        """Carry one batch through all stages.

        Raises:
            DiffusionError: from a stage; the batch is lost, the pipeline is as before.
        """
        wish = batch.request.step_cache
        if self.step_caches is None and wish is not None and wish != OFF:
            problem = f"{type(self).__name__} calls its denoiser in its own way. Leave it out"
            raise InvalidRequest("step_cache", wish, problem)
        device = server_args.platform.device
        reset_peak_memory(device)
        batch = self.executor.execute(batch, server_args)
        return OutputBatch(
            request_id=batch.request_id,
            # Of the ranks of a replica, the first gives the result; others need not have one.
            output=batch.output if self.parallel.replica.is_first else torch.empty(0),
            prompt=batch.prompt,
            seeds=batch.seeds,
            timings=batch.timings,
            peak_memory_mb=peak_memory_mb(device),
            warnings=batch.warnings,
            warned_images=batch.warned_images,
            fps=batch.fps,
            step_cache=batch.step_cache,
        )
