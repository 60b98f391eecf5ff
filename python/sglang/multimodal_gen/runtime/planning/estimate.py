"""What a request will take on a named GPU: memory by component and stage, time by roofline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.step_cache_choice import OFF
from sglang.multimodal_gen.runtime.cache.choice import wants_graphs
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.backends.choice import (
    Machine,
    backend_to_plan,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA
from sglang.multimodal_gen.runtime.loader.components import (
    components_facts,
    outline_components,
)
from sglang.multimodal_gen.runtime.loader.denoiser_split import denoisers, give_attention
from sglang.multimodal_gen.runtime.loader.residency import plan_components
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.memory.plan import (
    ComponentFacts,
    Residency,
    ResidencyPlan,
)
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.planning.dry_run import DryRun, Kernel
from sglang.multimodal_gen.runtime.planning.gpus import GPU
from sglang.multimodal_gen.runtime.platforms.device import DeviceFacts
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts, host_free
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

_ANY_NUMBER = 1 << 20
_STEPS = 2
"""Steps of the dry run: all are alike, and the first may differ from the others."""


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """One component: bytes of its weights, and where they rest."""

    name: str
    nbytes: int
    place: str


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: the device memory that weights and activations take meanwhile, and its seconds.

    Weights are those in use, and those of the next stage where there is room to bring them already;
    beside activations the libraries' workspaces are counted.
    ``transfer_seconds`` are those of weights on their way, as far as they are not hidden behind
    the computation; they are part of ``seconds``.
    """

    name: str
    weight_bytes: int
    activation_bytes: int
    seconds: float
    transfer_seconds: float
    tera_operations: float

    @property
    def bytes(self) -> int:
        """The device memory that it takes in all."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """The plan for one request; ``steps`` of the denoiser take ``step_seconds`` each."""

    model: str
    gpu: GPU
    settings: Mapping[str, object]
    components: Sequence[ComponentPlan]
    stages: Sequence[StagePlan]
    steps: int
    step_seconds: float
    host_bytes: int
    notes: Sequence[str]

    @property
    def peak_bytes(self) -> int:
        """The most device memory that is taken at once."""
        return max(stage.bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """The whole request, once the model is loaded."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the GPU has that much."""
        return self.peak_bytes <= self.gpu.usable_bytes


def estimate(
    server_args: ServerArgs, values: Mapping[str, object], gpu: GPU, host_gib: float | None = None
) -> Estimate:
    """Plan a request on one ``gpu``; reads configs, tokenizers and safetensors headers, no weights.

    ``values`` are a request's sampling settings; the prompt may be left out. ``host_gib`` is the
    host memory of that machine; this one's by default.

    Raises:
        UserError, CheckpointError: as loading the model and running the request would.
        OutOfMemory: the weights fit in no way.
    """
    # How many GPUs that machine has is not known: never what several ranks are refused for.
    facts = DeviceFacts(True, _ANY_NUMBER, gpu.name, gpu.memory_bytes, gpu.capability)
    resolution = resolve(server_args, facts)
    ranks = resolution.args.parallel.layout.world_size
    if ranks > 1:
        problem = "plans are made for one GPU so far; leave out what asks for more"
        raise InvalidArgument("num_gpus", ranks, problem)
    model = ModelDescription.find(resolution.args)
    if model.info.backend != "sglang":
        problem = "plans are made of native families' modules; leave --backend out"
        raise InvalidArgument("backend", model.info.backend, problem)
    params = model.sampling_params({"prompt": "a", **values}).seal()
    host = host_free() if host_gib is None else int(host_gib * (1 << 30))
    memory = MemoryFacts(gpu.usable_bytes, gpu.memory_bytes, host)
    sizes, plan = _weights(model, memory)
    pipeline = _outline(model)
    _check_speed(model, pipeline, plan, memory, gpu)
    batches = _batches(model, params)
    runs = [_dry_run(pipeline, batch) for batch in batches]
    steps = params.num_inference_steps or _STEPS
    stages, workspace = [], 0
    for name in pipeline.stages:
        counted = [run[name] for run in runs]
        if any(kernel.kind == "product" for run in counted for kernel in (*run.once, *run.step)):
            workspace = gpu.workspace_bytes  # from the first product on, for good
        stages.append(_stage_plan(pipeline, name, counted, steps, sizes, plan, gpu, workspace))
    loops = [s for s in stages if pipeline.stage_roles[s.name] is RoleType.DENOISER]
    step = sum(stage.seconds for stage in loops) / max(1, steps * len(batches))
    return Estimate(
        model=model.source.name,
        gpu=gpu,
        settings={"height": batches[0].height, "width": batches[0].width,
                  "num_frames": batches[0].num_frames, "num_inference_steps": steps,
                  "images": sum(batch.batch_size for batch in batches)},
        components=[ComponentPlan(f.name, f.nbytes, plan[f.name].mode.value) for f in sizes],
        stages=stages,
        steps=steps,
        step_seconds=step,
        host_bytes=plan.host_bytes,
        notes=[*resolution.notes, *([plan.note] if plan.note else []), *_uncounted(model)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Floor:
    """What products and attention alone take on a GPU, nothing else taking time: seconds of one
    step of the loop, and of a whole request."""

    gpu: str
    step_seconds: float
    seconds: float


def floor_of(model: ModelDescription, values: Mapping[str, object], gpu: GPU) -> Floor:
    """The floor of a request on one GPU, all weights resident; needs no files of weights.

    ``gpu`` says at which rates products and attention were seen to run.

    Raises:
        UserError: as running the request would.
    """
    params = model.sampling_params({"prompt": "a", **values}).seal()
    pipeline, batches = _outline(model, stored=False), _batches(model, params)
    steps = params.num_inference_steps or _STEPS
    step = whole = 0.0
    for batch in batches:
        for counted in _dry_run(pipeline, batch).values():
            once, loop = (
                sum(gpu.seconds(k.kind, k.flops, 0, k.bits) for k in kernels if k.flops)
                for kernels in (counted.once, counted.step)
            )
            step += loop / len(batches)
            whole += once + loop * steps
    return Floor(gpu.name, step, whole)


def _weights(
    model: ModelDescription, memory: MemoryFacts
) -> tuple[list[ComponentFacts], ResidencyPlan]:
    """The sizes of components, and where they will rest."""
    cls, parallel = model.info.pipeline_cls, ParallelState.single("cuda")
    names = cls._index_names()
    sizes = components_facts(
        model.source, names, model.server_args, cls.component_loaders,
        cls.default_component_configs, parallel=parallel,
    )  # fmt: skip
    plan = plan_components(sizes, [], list(names), model.server_args.memory, memory, parallel)
    return sizes, plan


def _outline(model: ModelDescription, *, stored: bool = True) -> ComposedPipelineBase:
    """The pipeline with modules that hold no weights, on this machine."""
    cls, parallel = model.info.pipeline_cls, ParallelState.single("cpu")
    modules = outline_components(
        model.source, cls._index_names(), model.server_args, cls.component_loaders,
        cls.default_component_configs, parallel=parallel, stored=stored,
    )  # fmt: skip
    args = model.server_args
    here = dataclasses.replace(
        args,
        platform=dataclasses.replace(args.platform, device="cpu"),
        memory=type(args.memory)(),  # what is to be offloaded was planned already
        speed=type(args.speed)(),  # as are kernels: all of attention is counted alike
    )
    return cls(model.source.name, here, loaded_modules=modules, parallel=parallel)


def _check_speed(
    model: ModelDescription,
    pipeline: ComposedPipelineBase,
    plan: ResidencyPlan,
    memory: MemoryFacts,
    gpu: GPU,
) -> None:
    """Refuse the kernels and graphs that loading on that GPU would refuse: the outline has none.

    Raises:
        InvalidArgument: such a wish cannot be.
    """
    args = model.server_args
    wish = args.speed.attention_backend
    attention = backend_to_plan(wish, Machine("cuda", gpu.capability))
    names = pipeline._index_names(pipeline.modules)
    give_attention(pipeline.modules, names, attention, wish)  # checks that the layers take it
    give_attention(pipeline.modules, names, SDPA, "auto")
    for name in denoisers(names) if args.speed.enable_cuda_graph else ():
        wants_graphs(
            True, pipeline.modules[name], name, plan, memory,
            device="cuda", check_stages=args.observe.check_stages, attention=attention,
        )  # fmt: skip


def _uncounted(model: ModelDescription) -> list[str]:
    """Sentences about wishes that are possible there, and change nothing in the numbers."""
    speed, notes = model.server_args.speed, []
    if speed.attention_backend != "auto":
        told = f"attention_backend={speed.attention_backend}"
        notes.append(f"{told}: attention is counted at one rate, whatever computes it")
    if speed.enable_cuda_graph:
        notes.append("CUDA graphs: the memory that recordings keep is not counted")
    return notes


def _batches(model: ModelDescription, params: SamplingParams) -> list[Req]:
    steps = min(_STEPS, params.num_inference_steps or _STEPS)
    # What a step cache leaves out depends on the picture: all is counted.
    few = dataclasses.replace(
        params, num_inference_steps=steps, step_cache=OFF, step_cache_threshold=None
    )
    return model.admit(few)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one stage did for one batch: once, and once for each step; and its most bytes alive."""

    once: Sequence[Kernel]
    step: Sequence[Kernel]
    peak_bytes: int


def _dry_run(pipeline: ComposedPipelineBase, batch: Req) -> dict[str, _Counted]:
    """Stage -> what it did. Its last step stands for all: the first may do more."""
    done: dict[str, _Counted] = {}
    run = DryRun()
    ends: list[int] = []

    def heard(event: ProgressEvent) -> None:
        if event.phase == "denoise":
            ends.append(len(run.tally.kernels))

    batch.control = RequestControl(heard)
    with torch.inference_mode(), run:
        for name, stage in pipeline.stages.items():
            tally = run.start()
            ends.clear()
            stage(batch, pipeline.server_args)
            start, end = ends[-2:] if len(ends) > 1 else (0, 0)
            first = ends[0] if ends else 0
            once = (*tally.kernels[:first], *tally.kernels[end:])
            done[name] = _Counted(once, tally.kernels[start:end], tally.peak_bytes)
            for field in pipeline.executor.last_use.get(name, ()):
                batch.release(field)
    return done


def _stage_plan(
    pipeline: ComposedPipelineBase,
    name: str,
    runs: Sequence[_Counted],
    steps: int,
    sizes: Sequence[ComponentFacts],
    plan: ResidencyPlan,
    gpu: GPU,
    workspace: int,
) -> StagePlan:
    """One stage over all batches of the request, beside a ``workspace`` of the libraries."""
    used = {facts.name: facts for facts in sizes if facts.name in pipeline.stage_uses[name]}
    weights = sum(plan[facts.name].always(facts) for facts in sizes)
    present = {*used, *_coming(pipeline, name, plan)}
    weights += sum(plan[facts.name].in_use(facts) for facts in sizes if facts.name in present)
    streamed, brought = 0, 0
    for facts in used.values():
        moved = plan[facts.name].in_host(facts)
        if plan[facts.name].mode is Residency.LAYERWISE:
            streamed += moved
        else:
            brought += moved
    computed = waited = flops = 0.0
    for run in runs:
        for kernels, repeats in ((run.once, 1), (run.step, steps)):
            seconds = sum(gpu.seconds(k.kind, k.flops, k.nbytes, k.bits) for k in kernels)
            computed += repeats * seconds
            flops += repeats * sum(k.flops for k in kernels)
            streams = kernels is (run.step or run.once)
            if streamed and streams:
                waited += repeats * max(0.0, gpu.copy_seconds(streamed) - seconds)
        waited += gpu.copy_seconds(brought)
    return StagePlan(
        name=name,
        weight_bytes=weights,
        activation_bytes=max(run.peak_bytes for run in runs) + workspace,
        seconds=computed + waited,
        transfer_seconds=waited,
        tera_operations=flops / 1e12,
    )


def _coming(pipeline: ComposedPipelineBase, name: str, plan: ResidencyPlan) -> Sequence[str]:
    """What the next stage that needs offloaded components has brought while this one runs, as
    `ResidencyManager` does where there is room."""
    order = list(pipeline.stages)
    later = (pipeline.stage_uses[other] for other in order[order.index(name) + 1 :])
    moving = ([n for n in names if plan[n].mode is not Residency.RESIDENT] for names in later)
    return next((names for names in moving if names), []) if plan.overlap else []
