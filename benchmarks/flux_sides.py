"""The same FLUX.1 weights under Diffusers' pipeline and under this runtime's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from diffusers.models.transformers.transformer_flux import (
    FluxTransformer2DModel as DiffusersFlux,
)
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline as DiffusersPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn

from flux_floor import Workload
from random_weights import fill
from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.sample.flux import FluxSamplingParams
from sglang.multimodal_gen.runtime.cache.compiled_blocks import (
    CompileCounters,
    CompiledBlocks,
    keep_compiled_code,
)
from sglang.multimodal_gen.runtime.cache.cuda_graphs import CudaGraphs
from sglang.multimodal_gen.runtime.cache.graph_runner import GraphRunner
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.layers.quantization.install import quantize_linears
from sglang.multimodal_gen.runtime.loader.quantize import METHODS
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import (
    ClassifierFreeGuidance,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.latent_preparation import (
    LatentPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.timestep_preparation import (
    TimestepPreparationStage,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

GUIDANCE = 3.5
FIRST_SEED = 0


@dataclass(frozen=True)
class Embeddings:
    """What the text encoders would give; [B, T, D] and [B, P]."""

    prompt: Tensor
    pooled: Tensor


class Side(Protocol):
    """One of the contestants: from embeddings and seeds to final latents."""

    @property
    def transformer(self) -> nn.Module:
        """The denoiser at work."""
        ...

    def loop(self, steps: int, on_step: Callable[[], None]) -> Tensor:
        """Denoise in `steps` steps as the pipeline itself does; latents of any layout."""
        ...


class DiffusersSide:
    """``FluxPipeline.__call__`` itself, with embeddings given and no decoding."""

    def __init__(self, transformer: DiffusersFlux, work: Workload, embeddings: Embeddings) -> None:
        self.transformer = transformer
        self.work = work
        self.embeddings = embeddings
        absent: dict[str, Any] = dict.fromkeys(
            ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        )
        self.pipeline: Any = DiffusersPipeline(
            scheduler=make_scheduler(), transformer=transformer, **absent
        )
        self.pipeline.set_progress_bar_config(disable=True)

    def loop(self, steps: int, on_step: Callable[[], None]) -> Tensor:
        """Packed latents [B, N, 64]."""

        def report(*_: Any) -> dict[str, Tensor]:
            on_step()
            return {}

        return self.pipeline(
            prompt_embeds=self.embeddings.prompt,
            pooled_prompt_embeds=self.embeddings.pooled,
            height=self.work.height,
            width=self.work.width,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=make_generators(self.work.batch),
            output_type="latent",
            callback_on_step_end=report,
        ).images


class RuntimeSide:
    """This runtime's latent, timestep and denoising stages, one after the other.

    With ``true_cfg_scale`` above 1 there is classifier-free guidance, for which the embeddings'
    tokens, turned round, stand for a negative prompt. ``guidance`` is what combines the two.
    """

    def __init__(
        self,
        transformer: FluxTransformer2DModel,
        work: Workload,
        embeddings: Embeddings,
        *,
        true_cfg_scale: float = 1.0,
        guidance: ClassifierFreeGuidance | None = None,
    ) -> None:
        self.transformer = transformer
        self.work = work
        self.embeddings = embeddings
        self.true_cfg_scale = true_cfg_scale
        self.graphs: GraphRunner | None = None
        scheduler = make_scheduler()
        self.guidance = ClassifierFreeGuidance() if guidance is None else guidance
        self.stages = (
            LatentPreparationStage(scheduler, transformer),
            TimestepPreparationStage(scheduler),
            DenoisingStage(transformer, scheduler, self.guidance),
        )
        self.args = ServerArgs.from_flat(
            device=embeddings.prompt.device.type, pipeline_config=FluxPipelineConfig()
        )

    def use_graphs(self, groups: Sequence[Group] = ()) -> None:
        """Record from now on, as `--enable-cuda-graph` does; on the CPU nothing changes."""
        device = self.embeddings.prompt.device
        if device.type == "cuda":
            self.graphs = GraphRunner(CudaGraphs(device, groups))
            self.guidance.call = self.graphs

    def use_compiled_blocks(self, mode: str = "default") -> CompileCounters:
        """Compile from now on, as `--enable-torch-compile` does; returns what counts it."""
        keep_compiled_code()
        compiled = CompiledBlocks(mode)
        compiled.add(self.transformer)
        return compiled.counters

    def graph_facts(self) -> dict[str, float]:
        """What the recordings did and took; empty without any."""
        if self.graphs is None:
            return {}
        backend = self.graphs.backend
        assert isinstance(backend, CudaGraphs)
        return asdict(self.graphs.counters) | {"pool_gib": backend.pool_bytes / 2**30}

    @torch.inference_mode()
    def loop(self, steps: int, on_step: Callable[[], None]) -> Tensor:
        """Latents [B, 16, h, w]."""

        def report(event: ProgressEvent) -> None:
            if event.phase == "denoise" and event.done > 0:
                on_step()

        batch = self._request(steps, RequestControl(listener=report))
        for stage in self.stages:
            batch = stage(batch, self.args)
        return batch.latents

    def _request(self, steps: int, control: RequestControl) -> Req:
        prompts = ["a benchmark"] * self.work.batch
        batch = Req(
            request=FluxSamplingParams(prompt=prompts),
            request_id="benchmark",
            prompt=prompts,
            negative_prompt=None,
            seeds=[FIRST_SEED + index for index in range(self.work.batch)],
            height=self.work.height,
            width=self.work.width,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            true_cfg_scale=self.true_cfg_scale,
            do_classifier_free_guidance=self.true_cfg_scale > 1,
            control=control,
        )
        batch.generator = make_generators(self.work.batch)
        batch.prompt_embeds = [self.embeddings.prompt]
        batch.pooled_embeds = [self.embeddings.pooled]
        if batch.do_classifier_free_guidance:
            batch.negative_prompt_embeds = [self.embeddings.prompt.flip(1)]
            batch.neg_pooled_embeds = [-self.embeddings.pooled]
        return batch


def make_sides(
    work: Workload, device: torch.device, dtype: torch.dtype
) -> tuple[DiffusersSide, RuntimeSide]:
    """Both sides on one set of random weights, made on the device and shared, never copied."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        reference = DiffusersFlux(**work.config).eval()
        ours = FluxTransformer2DModel(**work.config).eval()
    nn.Module.to(reference, dtype)
    reference.to_empty(device=device)
    fill(reference, generator)
    ours.load_state_dict(reference.state_dict(), assign=True)
    _refuse_meta(ours)
    if device.type == "cuda":
        pack_linears(ours)  # as the loader does
        reference.load_state_dict(ours.state_dict(), assign=True)
    ours.requires_grad_(False)
    reference.requires_grad_(False)
    embeddings = Embeddings(
        torch.randn(
            (work.batch, work.text_tokens, work.config["joint_attention_dim"]),
            generator=generator, device=device, dtype=dtype,
        ),
        torch.randn(
            (work.batch, work.config["pooled_projection_dim"]),
            generator=generator, device=device, dtype=dtype,
        ),
    )  # fmt: skip
    return DiffusersSide(reference, work, embeddings), RuntimeSide(ours, work, embeddings)


def same_weights(side: RuntimeSide) -> RuntimeSide:
    """A side with modules of its own, on the same tensors."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(**side.work.config).eval()
    model.load_state_dict(side.transformer.state_dict(), assign=True)
    model.requires_grad_(False)
    return RuntimeSide(model, side.work, side.embeddings)


def quantized_side(side: RuntimeSide, name: str) -> RuntimeSide:
    """A side on the same weights as the loader holds them under ``--quantization NAME``."""
    quantized = same_weights(side)
    model = quantized.transformer
    quantize_linears(model, METHODS[name], ignored=FluxPipelineConfig().quantization_ignored_layers)
    if side.embeddings.prompt.is_cuda:
        pack_linears(model)
    return quantized


def first_prediction(side: Side) -> Tensor:
    """What the denoiser of `side` says in the first of two steps, float32 on the CPU."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        if outputs:
            return  # a later call may be one that is recorded: nothing may wait for the GPU in it
        value = output if isinstance(output, Tensor) else output[0]
        outputs.append(value.detach().float().cpu())

    handle = side.transformer.register_forward_hook(keep)
    try:
        side.loop(2, lambda: None)
    finally:
        handle.remove()
    return outputs[0]


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's schedule."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def make_generators(count: int) -> list[torch.Generator]:
    """One on the CPU for each image, as both sides want them."""
    return [torch.Generator().manual_seed(FIRST_SEED + index) for index in range(count)]


def _refuse_meta(module: nn.Module) -> None:
    left = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if left:
        raise RuntimeError(f"tensors of this runtime's model that no weight fills: {left}")
