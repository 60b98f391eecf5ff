"""The checks of what a port can do beside running plainly: each against the one-rank, resident run.

Rows that start the same ranks stand together, so that each layout is started once.

A check is one `Mechanism`: its name, whether the pipeline supports it (or why not), a run that
measures, and a bound. To add one, add an entry to `MECHANISMS` with a ``run``; from then on the
command runs it wherever ``unsupported`` finds nothing against it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.model_table import table_of
from sglang.multimodal_gen.runtime.memory.layerwise import streams
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import ParallelTiledVAE
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.component_roles import DENOISER
from sglang.multimodal_gen.runtime.verify.baseline import Baseline
from sglang.multimodal_gen.runtime.verify.evidence import Finding
from sglang.multimodal_gen.runtime.verify.measure import (
    FINAL_LIMIT,
    FORWARD_LIMIT,
    relative_l2,
)
from sglang.multimodal_gen.runtime.verify.mechanism_runs import (
    run_cfg_parallel,
    run_dit_tp,
    run_encoder_tp,
    run_layerwise_offload,
    run_sp,
    run_spatial_shard,
    run_tiled,
    run_tp_sp,
)
from sglang.multimodal_gen.runtime.verify.port import Port, kind_of
from sglang.multimodal_gen.runtime.verify.request import Request

RANK = 4
STRENGTH = 0.5
MOVED = 1e-2


@dataclass(frozen=True)
class Mechanism:
    """One check of a mechanism.

    ``unsupported`` gives the reason why this pipeline cannot do it, None if it can; ``run`` returns
    the error against the baseline, and is only called where it can.
    """

    name: str
    title: str
    unsupported: Callable[[Port], str | None]
    run: Callable[[Port, Baseline], Finding]
    bound: float = FINAL_LIMIT


DECLARED: Mapping[str, tuple[str, str]] = {
    "encoder-tp": ("text_encoder", "TP_PLAN"),
    "dit-tp": (DENOISER, "TP_PLAN"),
    "sp": (DENOISER, "SP_PLAN"),
    "tp-sp": (DENOISER, "SP_PLAN"),
}
"""Mechanism -> the role whose class declares it, and in which attribute."""


def declares(component: nn.Module | type, attribute: str) -> bool:
    """Whether a component's class, or the file that the class is in, declares a mechanism."""
    found = table_of(component if isinstance(component, type) else type(component), attribute)
    return found is not None and bool(found[0])


def _components(pipeline: ComposedPipelineBase, role: str) -> list[nn.Module]:
    cls = type(pipeline)
    found = [m for name, m in pipeline.modules.items() if kind_of(name, cls) == role]
    return [m for m in found if isinstance(m, nn.Module)]


def _needs(name: str, flag: str) -> Callable[[Port], str | None]:
    """Why a mechanism that a flag turns on, and a component declares, cannot be had."""

    def unsupported(port: Port) -> str | None:
        if flag not in {spec.spelling for spec in server_flags()}:
            return f"this build has no {flag}"
        role, attribute = DECLARED.get(name, (None, None))
        if role is None or attribute is None:
            return None
        bare = [m for m in _components(port.pipeline, role) if not declares(m, attribute)]
        return f"{type(bare[0]).__name__} has no {attribute}" if bare else None

    return unsupported


def _no_bands(port: Port) -> str | None:
    if isinstance(port.decoder, ParallelTiledVAE):
        return None
    return f"{type(port.decoder).__name__} is no ParallelTiledVAE: it works at once, on one rank"


def _no_blocks(port: Port) -> str | None:
    if any(map(streams, port.pipeline.modules.values())):
        return None
    return f"no component of {type(port.pipeline).__name__} lists its blocks (layer_names)"


def _no_lora(port: Port) -> str | None:
    if not isinstance(port.pipeline, LoRAPipeline):
        return f"{type(port.pipeline).__name__} does not derive from LoRAPipeline"
    return None


def _lora(port: Port, baseline: Baseline) -> Finding:
    """Live and merged against weights changed by hand; afterwards the base, bit for bit."""
    pipeline = port.pipeline
    assert isinstance(pipeline, LoRAPipeline)
    # Experts are changed alike; the file has keys of each, for "transformer." means that one alone.
    targets = [name for name in pipeline.lora_targets if name in pipeline.modules]
    changed = [pipeline.modules[name] for name in targets]
    factors = _factors(changed[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verify.safetensors"
        save_file(
            {
                f"{name}.{linear}.lora_{part}.weight": tensor.clone()
                for name in targets
                for linear, (down, up) in factors.items()
                for part, tensor in (("A", down), ("B", up))
            },
            path,
        )
        live = port.picture(baseline.request, lora=[{"path": str(path), "weight": 1.0}])
        pipeline.set_lora("verify", str(path), merge_mode="merge")
        try:
            merged = port.picture(baseline.request)
        finally:
            pipeline.unset_lora()
            pipeline.unload_lora_adapter("verify")
    after = port.picture(baseline.request)
    by_hand = _by_hand(port, changed, factors, baseline.request)
    if relative_l2(by_hand, baseline.picture) < MOVED:
        return Finding(0.0, skipped="proves nothing: a random adapter does not move the picture")
    if not torch.equal(after, baseline.picture):
        return Finding(float("inf"), "taken off again, the adapter leaves a trace in the picture")
    errors = {"live": relative_l2(live, by_hand), "merged": relative_l2(merged, by_hand)}
    what = max(errors, key=lambda key: errors[key])
    return Finding(errors[what], f"{what}, {len(factors)} linears")


def _factors(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every linear, drawn from a seeded generator."""
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for path, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            rows, width = linear.weight.shape
            down = torch.randn(RANK, width, generator=generator) / width**0.5
            up = torch.randn(rows, RANK, generator=generator) * STRENGTH / RANK**0.5
            factors[path] = (down, up)
    return factors


def _by_hand(
    port: Port,
    modules: Sequence[nn.Module],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    request: Request,
) -> Tensor:
    """The picture with ``W + B A`` in the place of W."""
    kept: list[tuple[Any, Tensor]] = []
    try:
        with torch.no_grad():
            for module in modules:
                for path, (down, up) in factors.items():
                    weight: Any = module.get_submodule(path).weight
                    kept.append((weight, weight.detach().clone()))
                    weight += (up @ down).to(weight)
        return port.picture(request)
    finally:
        with torch.no_grad():
            for weight, before in kept:
                weight.copy_(before)


MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism("vae-tiled", "VAE decode, tiled", _no_bands, run_tiled, FORWARD_LIMIT),
    Mechanism(
        "vae-spatial-shard", "VAE decode, spatial_shard",
        _no_bands, run_spatial_shard, FORWARD_LIMIT,
    ),
    Mechanism(
        "cfg-parallel", "CFG parallel",
        _needs("cfg-parallel", "--enable-cfg-parallel"), run_cfg_parallel, FORWARD_LIMIT,
    ),
    Mechanism(
        "encoder-tp", "encoder TP", _needs("encoder-tp", "--tp-size"), run_encoder_tp, FORWARD_LIMIT
    ),
    Mechanism("dit-tp", "denoiser TP", _needs("dit-tp", "--tp-size"), run_dit_tp, FORWARD_LIMIT),
    Mechanism("sp", "SP", _needs("sp", "--sp-degree"), run_sp, FORWARD_LIMIT),
    Mechanism("tp-sp", "TP x SP", _needs("tp-sp", "--sp-degree"), run_tp_sp, FORWARD_LIMIT),
    Mechanism(
        "layerwise-offload", "layerwise offload",
        _no_blocks, run_layerwise_offload, 0.0,
    ),
    Mechanism("lora", "LoRA: live, merged, off", _no_lora, _lora),
)  # fmt: skip
