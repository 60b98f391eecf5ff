"""How a pipeline is wired: components by name, stages added in order, the standard ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from sglang.multimodal_gen.runtime.cache.choice import wants_graphs
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks
from sglang.multimodal_gen.runtime.cache.cuda_graphs import CudaGraphs
from sglang.multimodal_gen.runtime.cache.graph_runner import (
    Caller,
    GraphRunner,
    call_plainly,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.memory.plan import ResidencyPlan
from sglang.multimodal_gen.runtime.pipelines_core.link import component_uses
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
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
from sglang.multimodal_gen.runtime.platforms.memory import memory_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import role_of
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

Keys = str | Sequence[str] | None


class StageWiring:
    """What `create_pipeline_stages` works with: the loaded components, and the helpers that add
    stages.

    `ComposedPipelineBase` is the one class that extends it: it loads what is wired here.
    """

    required_config_modules: list[str]
    modules: dict[str, Any]
    """The components, by name."""
    stages: dict[str, PipelineStage]
    stage_roles: dict[str, RoleType]
    stage_uses: dict[str, tuple[str, ...]]
    """Stage -> the components whose weights it needs."""
    server_args: ServerArgs
    parallel: ParallelState
    plan: ResidencyPlan
    """Where each component's weights rest."""
    attention: AttentionBackend
    """What computes the denoisers' attention."""
    graphs: GraphRunner | None
    """Recordings of the denoisers' GPU work, where there are any."""
    compiled: CompiledBlocks | None
    """The denoisers' blocks that torch compiles, where it does."""
    _graph_note: str | None
    experts: Experts | None
    """Which denoiser makes which step, where there are two."""
    step_caches: StepCaches | None
    """What lets steps be skipped, where the standard loop runs."""

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
            attention=self.attention,
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
