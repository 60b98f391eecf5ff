"""Pipelines: components loaded from a checkpoint, wired into a chain of stages."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image

from sglang.multimodal_gen.configs.step_cache_choice import OFF
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.cache.choice import wants_graphs
from sglang.multimodal_gen.runtime.cache.cuda_graphs import CudaGraphs
from sglang.multimodal_gen.runtime.cache.graph_runner import (
    Caller,
    GraphRunner,
    call_plainly,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
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
    split_denoisers,
)
from sglang.multimodal_gen.runtime.loader.model_source import (
    Layout,
    ModelSource,
    resolve_model_source,
)
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import ResidencyPlan
from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.pipelines_core.executors.sync_executor import SyncExecutor
from sglang.multimodal_gen.runtime.pipelines_core.link import component_uses, link
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    DecodingStage,
    DenoisingStage,
    FrameVAEEncodingStage,
    ImageEncodingStage,
    ImageVAEEncodingStage,
    InputValidationStage,
    LatentPreparationStage,
    StrengthStage,
    TextEncodingStage,
    TimestepPreparationStage,
    VideoVAEEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.experts import Experts
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import guidance_for
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_caches import StepCaches
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_previews import StepPreviews
from sglang.multimodal_gen.runtime.platforms.copy_lane import copy_lane
from sglang.multimodal_gen.runtime.platforms.device import peak_memory_mb, reset_peak_memory
from sglang.multimodal_gen.runtime.platforms.memory import memory_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import role_of
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    InvalidRequest,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)

Keys = str | Sequence[str] | None


class ComposedPipelineBase(ABC):
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
        self.stages: dict[str, PipelineStage] = {}
        self.stage_roles: dict[str, RoleType] = {}
        self.stage_uses: dict[str, tuple[str, ...]] = {}
        """Stage -> the components whose weights it needs."""
        self.modules: dict[str, Any] = {}
        self.server_args = server_args
        self.parallel = (
            ParallelState.single(server_args.platform.device) if parallel is None else parallel
        )

        self.plan = ResidencyPlan()
        """Where each component's weights rest."""
        self._offloaded: dict[str, OffloadedComponent] = {}
        self.graphs: GraphRunner | None = None
        """Recordings of the denoisers' GPU work, where there are any."""
        self._graph_note: str | None = None
        self.experts: Experts | None = None
        """Which denoiser makes which step, where there are two."""
        self.step_caches: StepCaches | None = None
        """What lets steps be skipped, where the standard loop runs."""

        self._load_modules(loaded_modules or {}, source, progress)
        split_denoisers(self.modules, self._index_names(self.modules), self.parallel)
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
        return tuple(note for note in (self.plan.note, self._graph_note) if note is not None)

    @abstractmethod
    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Wire the stages, in running order."""

    # Components.

    def get_module(self, name: str, default: Any = None) -> Any:
        """A loaded component; ``default`` if this pipeline has none of that name."""
        return self.modules.get(name, default)

    def _required(self, name: str) -> Any:
        """A component that a standard stage cannot do without."""
        if name not in self.modules:
            raise PipelineDefinitionError(
                f"{type(self).__name__} has no component {name!r}."
                f"{did_you_mean(name, self.modules)} It has: {', '.join(self.modules)}"
            )
        return self.modules[name]

    def add_module(self, name: str, module: Any) -> None:
        """Put a component in place, for stages wired after this."""
        self.modules[name] = module

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

    # Stages.

    def add_stage(self, stage: PipelineStage, stage_name: str | None = None) -> Self:
        """Append a stage; its name is its class's unless given.

        Raises:
            PipelineDefinitionError: the name is taken, or the stage holds a component that its
                `uses` does not declare.
        """
        name = type(stage).__name__ if stage_name is None else stage_name
        if name in self.stages:
            raise PipelineDefinitionError(
                f"Duplicate stage name detected: {name!r} in {type(self).__name__}; pass another "
                "stage_name"
            )
        self.stage_uses[name] = component_uses(stage, self.modules)
        self.stages[name] = stage
        self.stage_roles.setdefault(name, stage.role_affinity)
        return self

    def add_stage_factory(
        self, role_affinity: RoleType, factory: Callable[[], PipelineStage], stage_name: str
    ) -> Self:
        """Append the stage that ``factory`` makes, as part of the given role."""
        self.stage_roles[stage_name] = role_affinity
        return self.add_stage(factory(), stage_name)

    def get_stage(self, name: str) -> PipelineStage:
        """A stage by its name.

        Raises:
            KeyError: there is none of that name.
        """
        return self.stages[name]

    def add_standard_input_validation_stage(self) -> Self:
        """Generators and input images."""
        return self.add_stage(InputValidationStage(), "input_validation_stage")

    def add_standard_text_encoding_stage(
        self, text_encoder_key: Keys = None, tokenizer_key: Keys = None
    ) -> Self:
        """Prompts through all text encoders of this pipeline, or through those named."""
        stage = TextEncodingStage(
            text_encoders=self._modules_of("text_encoder", text_encoder_key),
            tokenizers=self._modules_of("tokenizer", tokenizer_key),
        )
        config = self.server_args.pipeline_config
        assert config is not None
        described = len(config.text_encoder_configs)
        if described != len(stage.text_encoders):
            raise PipelineDefinitionError(
                f"{type(self).__name__} has {len(stage.text_encoders)} text encoders, but "
                f"{type(config).__name__}.text_encoder_configs describes {described}"
            )
        return self.add_stage(stage, "text_encoding_stage")

    def add_standard_image_vae_encoding_stage(self, vae_key: str = "vae") -> Self:
        """Input images to latents."""
        stage = ImageVAEEncodingStage(self._required(vae_key), self.parallel, self.server_args.vae)
        return self.add_stage(stage, "image_vae_encoding_stage")

    def add_standard_image_encoding_stage(
        self, image_encoder_key: str = "image_encoder", image_processor_key: str = "image_processor"
    ) -> Self:
        """Input images to what an image encoder sees in them."""
        stage = ImageEncodingStage(
            self._required(image_encoder_key), self._required(image_processor_key)
        )
        return self.add_stage(stage, "image_encoding_stage")

    def add_standard_frame_vae_encoding_stage(self, vae_key: str = "vae") -> Self:
        """Given frames of a clip to latents."""
        stage = FrameVAEEncodingStage(self._required(vae_key), self.parallel, self.server_args.vae)
        return self.add_stage(stage, "frame_vae_encoding_stage")

    def add_standard_video_vae_encoding_stage(self, vae_key: str = "vae") -> Self:
        """A given clip to latents."""
        stage = VideoVAEEncodingStage(self._required(vae_key), self.parallel, self.server_args.vae)
        return self.add_stage(stage, "video_vae_encoding_stage")

    def add_standard_latent_preparation_stage(
        self, scheduler_key: str = "scheduler", transformer_key: str = "transformer"
    ) -> Self:
        """Initial noise."""
        stage = LatentPreparationStage(
            self._required(scheduler_key), self._required(transformer_key)
        )
        return self.add_stage(stage, "latent_preparation_stage")

    def add_standard_timestep_preparation_stage(self, scheduler_key: str = "scheduler") -> Self:
        """The schedule."""
        return self.add_stage(
            TimestepPreparationStage(self._required(scheduler_key)), "timestep_preparation_stage"
        )

    def add_standard_denoising_stage(
        self, transformer_key: str = "transformer", scheduler_key: str = "scheduler"
    ) -> Self:
        """The loop."""
        call = self._caller_of(transformer_key)
        second = f"{transformer_key}_2"
        if second in self.modules:
            call = self._caller_of(second) if call is not call_plainly else call
            names = (transformer_key, second)
            self.experts = Experts(self._required(transformer_key), self.modules[second], names)
        names = [name for name in (transformer_key, second) if name in self.modules]
        self.step_caches = StepCaches({n: self._required(n) for n in names}, self.parallel)
        return self.add_stage_factory(
            RoleType.DENOISER,
            lambda: DenoisingStage(
                self._required(transformer_key),
                self._required(scheduler_key),
                guidance_for(self.parallel.cfg, call),
                previews=StepPreviews(self.get_module("vae")),
                experts=self.experts,
                step_caches=self.step_caches,
            ),
            "denoising_stage",
        )

    def _caller_of(self, name: str) -> Caller:
        """How a denoiser is called: plainly, or through recordings of its GPU work."""
        device = self.parallel.device
        wanted, note = wants_graphs(
            self.server_args.speed.enable_cuda_graph,
            self._required(name),
            name,
            self.plan,
            memory_facts(device.type),
            device=device.type,
            check_stages=self.server_args.observe.check_stages,
        )
        self._graph_note = note or self._graph_note
        if not wanted:
            return call_plainly
        if self.graphs is None:
            ranks = (self.parallel.tp, self.parallel.sp)
            self.graphs = GraphRunner(CudaGraphs(device, ranks))
        return self.graphs

    def _check_graphs(self) -> None:
        """A wish for graphs that no stage meets would be passed over in silence."""
        if self.server_args.speed.enable_cuda_graph and self.graphs is None:
            problem = f"{type(self).__name__} calls its denoiser in its own way. Leave it out"
            raise InvalidArgument("enable_cuda_graph", True, problem)

    def add_standard_decoding_stage(self, vae_key: str = "vae") -> Self:
        """Latents to pictures."""
        return self.add_stage_factory(
            RoleType.DECODER,
            lambda: DecodingStage(self._required(vae_key), self.parallel, self.server_args.vae),
            "decoding_stage",
        )

    def add_standard_t2i_stages(self) -> Self:
        """The whole chain from text to image."""
        self.add_standard_input_validation_stage()
        self.add_standard_text_encoding_stage()
        return self._add_from_latents_on()

    def add_standard_ti2i_stages(self) -> Self:
        """The whole chain from text, and images where the request has them, to image."""
        self.add_standard_input_validation_stage()
        self.add_standard_text_encoding_stage()
        self.add_standard_image_vae_encoding_stage()
        return self._add_from_latents_on()

    def add_standard_ti2v_stages(self, image_encoder_key: str = "image_encoder") -> Self:
        """The whole chain from text, and from frames or a clip as far as tasks take them, to video.

        An image encoder has its stage where there is one.
        """
        config = self.server_args.pipeline_config
        assert config is not None
        tasks = config.get_supported_task_types()
        with_video = any(task.accepts_video_input for task in tasks)
        self.add_standard_input_validation_stage()
        self.add_standard_text_encoding_stage()
        if any(task.accepts_image_input for task in tasks):
            if image_encoder_key in self.modules:
                self.add_standard_image_encoding_stage(image_encoder_key)
            self.add_standard_frame_vae_encoding_stage()
        if with_video:
            self.add_standard_video_vae_encoding_stage()
        return self._add_from_latents_on(with_video=with_video)

    def _add_from_latents_on(self, *, with_video: bool = False) -> Self:
        self.add_standard_latent_preparation_stage()
        self.add_standard_timestep_preparation_stage()
        if with_video:
            self.add_stage(StrengthStage(), "strength_stage")
        self.add_standard_denoising_stage()
        return self.add_standard_decoding_stage()

    def _modules_of(self, role: str, keys: Keys) -> list[Any]:
        """The components under ``keys``; by default ``role``, ``role_2``, ... as far as loaded."""
        if keys is None:
            keys = [name for name in self.required_config_modules if role_of(name) == role]
        return [self._required(key) for key in ([keys] if isinstance(keys, str) else keys)]

    # Running.

    def close(self) -> None:
        """Let go of what must not outlive the ranks' groups: recordings with their messages."""
        if self.graphs is not None:
            self.graphs.drop()

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
