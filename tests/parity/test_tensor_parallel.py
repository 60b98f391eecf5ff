"""Tensor parallelism against one rank: denoiser, encoders, whole pipelines, adapters.

Each run of processes measures everything that its layout has to show; the tests read what it saw.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

from parity.harness import checkpoint_folder
from parity.tiny_adapters import Adapter, authors_adapter
from parity.tiny_checkpoints import flux_for_ranks

LIMIT = 1e-5
VISIBLE = 1e-2
REQUEST: dict[str, Any] = {
    "prompt": "a small red circle above the fox",
    "seed": 5,
    "height": 64,
    "width": 96,
    "num_inference_steps": 2,
    "guidance_scale": 3.5,
    "max_sequence_length": 33,
}
TEXT, HEIGHT, WIDTH = 7, 4, 6
DENOISER_TRAFFIC = {"all_reduce": 4 * 2 + 2, "all_gather": 2 * 2 + 2}
"""Two double blocks, two single ones: output projections; modulations."""
ENCODER_TRAFFIC = {"all_reduce": 1 + 2 * 2}
"""The embedding; two layers of attention and feed-forward."""


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def describe(path: str, precision: str = "fp32") -> ModelDescription:
    args = ServerArgs.from_flat(model_path=path, device="cpu", precision=precision)
    return ModelDescription.find(resolve(args, device_facts()).args)


def latents(model: ModelDescription, pipeline: Any, **changes: Any) -> Tensor:
    """The latents at the end of the loop."""
    (batch,) = model.admit(model.sampling_params({**REQUEST, **changes}))
    stage, seen = pipeline.stages["decoding_stage"], []
    decode = stage.forward

    def watched(batch: Any, server_args: Any) -> Any:
        seen.append(batch.latents.clone())
        return decode(batch, server_args)

    with patch.object(stage, "forward", watched):
        pipeline.forward(batch, pipeline.server_args)
    return torch.cat(seen)


@torch.no_grad()
def velocity(model: nn.Module) -> Tensor:
    """One forward of the denoiser on fixed inputs."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return model(
        hidden_states=noise(2, HEIGHT * WIDTH, model.x_embedder.in_features),
        encoder_hidden_states=noise(2, TEXT, model.context_embedder.in_features),
        pooled_projections=noise(2, model.time_text_embed.text_embedder.linear_1.in_features),
        timestep=torch.tensor([0.3, 0.7]),
        guidance=torch.tensor([3.5, 2.0]),
        rotary=model.rotary_embedding(TEXT, HEIGHT, WIDTH),
    )


@torch.no_grad()
def embedding(model: nn.Module) -> Tensor:
    """Hidden states, and the pooled ones where there are any."""
    ids = torch.arange(5, 5 + 2 * 11).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    out = model(input_ids=ids, attention_mask=mask)
    pooled = getattr(out, "pooler_output", None)
    parts = [out.last_hidden_state] if pooled is None else [out.last_hidden_state, pooled]
    return torch.cat([part.flatten() for part in parts])


def compared(function: Any, many: nn.Module, one: nn.Module, group: Group) -> dict[str, Any]:
    """How far ranks are from one, what they sent, and how far they are if sums are left out."""
    whole = function(one)
    group.traffic.clear()
    found = {"off": relative(function(many), whole), "traffic": dict(group.traffic)}
    with patch.object(Group, "all_reduce", lambda _, x: x):
        found["unreduced"] = relative(function(many), whole)
    with patch.object(Group, "all_gather", lambda g, x, dim=0: torch.cat([x] * g.size, dim)):
        found["ungathered"] = relative(function(many), whole)
    return found


def _measure(_rank: int, layout: ParallelLayout, path: str, lora: str) -> dict[str, Any]:
    parallel = ParallelState.create(layout, "cpu")
    model = describe(path)
    one, many = model.open_pipeline(), model.open_pipeline(parallel=parallel)
    found: dict[str, Any] = {}
    for name in ("text_encoder", "text_encoder_2"):
        modules = (many.modules[name], one.modules[name])
        found[name] = compared(embedding, *modules, group=parallel.weights)
    modules = (many.modules["transformer"], one.modules["transformer"])
    found["transformer"] = compared(velocity, *modules, group=parallel.tp)
    whole = latents(model, one)
    found["latents"] = relative(latents(model, many), whole)
    found["another seed"] = relative(latents(model, many, seed=6), whole)
    found["lora"] = _measure_lora(one, many, lora)
    model = describe(path, "bf16")
    half = [
        model.open_pipeline(parallel=state).modules["transformer"] for state in (parallel, None)
    ]
    found["bf16"] = relative(*(velocity(module) for module in half))
    return found


def _measure_lora(one: Any, many: Any, path: str) -> dict[str, Any]:
    """An adapter on one rank and on many: live, merged, and taken off again."""
    parts = ("transformer", "text_encoder")
    functions = {"transformer": velocity, "text_encoder": embedding}
    base = {part: functions[part](one.modules[part]) for part in parts}
    stored = {part: _copied(many.modules[part]) for part in parts}
    receipts = [pipeline.load_lora_adapter(path, "a") for pipeline in (one, many)]
    found: dict[str, Any] = {"receipts": receipts}
    for mode in ("dynamic", "merge", "auto"):
        for pipeline in (one, many):
            pipeline.set_lora("a", strength=0.8, merge_mode=mode)
        for part in parts:
            whole = functions[part](one.modules[part])
            ours = functions[part](many.modules[part])
            found[f"{mode} {part}"] = (relative(ours, whole), relative(whole, base[part]))
        found[f"{mode} status"] = [p.get_lora_status()["active"] for p in (one, many)]
    for pipeline in (one, many):
        pipeline.unset_lora()
    for part in parts:
        after = _copied(many.modules[part])
        found[f"restored {part}"] = all(torch.equal(after[n], stored[part][n]) for n in after)
        found[f"restored {part}"] &= not any(
            getattr(module, "on_product", None) for module in many.modules[part].modules()
        )
    return found


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def root(checkpoints: Path) -> Path:
    return checkpoint_folder(flux_for_ranks(), checkpoints)


@pytest.fixture(scope="module")
def lora(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On every linear of the blocks by the authors' fused names, and on CLIP."""
    pipeline = describe(str(root)).open_pipeline()
    adapter = authors_adapter(pipeline.modules["transformer"], 3, kohya=False, alpha=2.0)
    clip = Adapter(pipeline.modules["text_encoder"], 4, strength=2.0)
    for path in clip.linears:
        clip.add((path,), f"text_encoder.{path}")
    adapter.tensors |= clip.tensors
    return str(adapter.save(tmp_path_factory.mktemp("lora") / "lora.safetensors"))


@pytest.fixture(scope="module", params=[2, 4], ids=["tp=2", "tp=4"])
def measured(request: pytest.FixtureRequest, root: Path, lora: str) -> list[dict[str, Any]]:
    layout = ParallelLayout(tp=request.param)
    return run_ranks(request.param, _measure, layout, str(root), lora, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "text_encoder", "text_encoder_2"])
def test_a_component_equals_that_of_one_rank(measured, name):
    traffic = DENOISER_TRAFFIC if name == "transformer" else ENCODER_TRAFFIC
    for rank in measured:
        assert rank[name]["off"] <= LIMIT
        assert rank[name]["traffic"] == traffic
        assert rank[name]["unreduced"] > VISIBLE
    gathered = max(rank["transformer"]["ungathered"] for rank in measured)
    assert gathered > VISIBLE


@pytest.mark.slow
def test_latents_equal_those_of_one_rank(measured):
    for rank in measured:
        assert rank["latents"] <= LIMIT
        assert rank["another seed"] > VISIBLE


@pytest.mark.slow
def test_half_precision_is_as_good_as_it_is(measured):
    assert all(rank["bf16"] < 3e-2 for rank in measured)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize("mode", ["dynamic", "merge", "auto"])
def test_an_adapter_equals_that_of_one_rank(measured, mode, part):
    for rank in measured:
        off, moved = rank["lora"][f"{mode} {part}"]
        assert off <= LIMIT
        assert moved > VISIBLE
        assert rank["lora"][f"restored {part}"]


@pytest.mark.slow
def test_receipts_and_status_of_an_adapter_are_those_of_one_rank(measured):
    for rank in measured:
        one, many = rank["lora"]["receipts"]
        assert many.relative_change == pytest.approx(one.relative_change, rel=1e-6)
        assert set(one.modules) == {"transformer", "text_encoder"}
        assert dataclasses.replace(many, relative_change=one.relative_change) == one
        for mode in ("dynamic", "merge", "auto"):
            alone, together = rank["lora"][f"{mode} status"]
            assert together == alone


def _measure_encoders(
    _rank: int, layout: ParallelLayout, path: str, request: dict[str, Any]
) -> dict[str, Any]:
    parallel = ParallelState.create(layout, "cpu")
    model = describe(path)
    one, many = model.open_pipeline(), model.open_pipeline(parallel=parallel)
    found: dict[str, Any] = {}
    for name in ("text_encoder", "text_encoder_2"):
        for group in parallel.spreads:
            group.traffic.clear()
        found[name] = relative(embedding(many.modules[name]), embedding(one.modules[name]))
        found[f"{name} groups"] = {g.name: dict(g.traffic) for g in parallel.spreads if g.traffic}
        shards = {shard_of(p) for p in many.modules[name].parameters()} - {None}
        found[f"{name} ranks"] = {shard.size for shard in shards}
    found["latents"] = relative(latents(model, many, **request), latents(model, one, **request))
    return found


@pytest.mark.slow
def test_encoders_are_spread_over_ranks_of_both_kinds(checkpoints):
    """T5's four heads over TP x SP; CLIP's two over the ranks of TP alone."""
    checkpoint = flux_for_ranks("flux-two-clip-heads", clip={"num_attention_heads": 2})
    folder = checkpoint_folder(checkpoint, checkpoints)
    layout = ParallelLayout(ulysses=2, tp=2)
    found = run_ranks(4, _measure_encoders, layout, str(folder), {}, timeout=300)
    for rank in found:
        assert rank["text_encoder"] <= LIMIT
        assert rank["text_encoder_2"] <= LIMIT
        assert rank["latents"] <= LIMIT
        assert rank["text_encoder ranks"] == {2}
        assert rank["text_encoder_2 ranks"] == {4}
        assert rank["text_encoder groups"] == {"tp": {"all_reduce": 5}}
        assert rank["text_encoder_2 groups"] == {"weights": {"all_reduce": 5}}


@pytest.mark.slow
def test_the_bundled_models_encoders_are_spread_over_the_ranks_of_a_sequence():
    request = {"prompt": "a red circle", "height": 128, "width": 128, "guidance_scale": 1.0}
    found = run_ranks(2, _measure_encoders, ParallelLayout(ring=2), "demo", request, timeout=300)
    for rank in found:
        assert rank["text_encoder"] <= LIMIT
        assert rank["text_encoder_2"] <= LIMIT
        assert rank["latents"] <= LIMIT
        assert rank["text_encoder ranks"] == rank["text_encoder_2 ranks"] == {2}


@pytest.mark.parametrize(("path", "heads", "size"), [("demo", 5, 2), ("six", 6, 4)])
def test_heads_that_do_not_divide_are_refused_by_name(checkpoints, path, heads, size):
    if path == "six":
        checkpoint = flux_for_ranks("six-heads", transformer={"num_attention_heads": 6})
        path = str(checkpoint_folder(checkpoint, checkpoints))
    group = Group("tp", 0, tuple(range(size)))
    parallel = dataclasses.replace(ParallelState.single(), tp=group)
    said = (
        f"num_attention_heads={heads} of FluxTransformer2DModel does not divide over tp_size={size}"
    )
    with pytest.raises(InvalidArgument, match=said):
        describe(path).open_pipeline(parallel=parallel)
