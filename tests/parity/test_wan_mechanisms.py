"""Wan's weights in host memory, experts that take turns, tiles, batches, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.managers.batch_merging import join, part_of, signature
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.verify.verification import Wish, verify

from parity.compare import compare
from parity.harness import MOVED, checkpoint_folder
from parity.oracle import load_oracle, trace_of
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_adapters import Adapter
from parity.tiny_wan import TinyWan
from parity.wan_families import TEXT as FAMILY
from parity.wan_requests import EXPERTS, IMAGE, SMALL, TEXT, request


def frames(generator: Any, values: dict[str, Any]) -> torch.Tensor:
    result = generator.generate(**values)
    return torch.stack([torch.from_numpy(clip.frames.copy()) for clip in result.videos])


@pytest.mark.parametrize("tiny", [EXPERTS, SMALL, IMAGE], ids=lambda tiny: tiny.name)
def test_streamed_by_layers_it_is_bit_equal(checkpoints: Path, tiny: TinyWan) -> None:
    root, values = checkpoint_folder(tiny, checkpoints), request(tiny, checkpoints)
    with opened_runtime(root) as generator:
        resident = frames(generator, values)
    with opened_runtime(root, layerwise_offload_components=["all"]) as generator:
        streamed = frames(generator, values)
        parts = generator.pipeline._offloaded
        neural = {n for n, m in generator.pipeline.modules.items() if isinstance(m, nn.Module)}
        assert parts.keys() == neural
        for name, component in parts.items():
            assert component.stream_counters.bytes > 0, f"{name} was not streamed"
    assert torch.equal(streamed, resident)


def test_experts_take_turns_on_the_device(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkpoint_folder(EXPERTS, checkpoints)
    values = request(EXPERTS, checkpoints, num_inference_steps=4)
    with opened_runtime(root) as generator:
        resident = frames(generator, values)
        assert generator.pipeline.plan.note is None
    with opened_runtime(root, cpu_offload_components=["dit"]) as generator:
        parts = generator.pipeline._offloaded
        assert set(parts) == {"transformer", "transformer_2"}
        begin, events = OffloadedComponent.begin_use, []

        def watched(component: OffloadedComponent) -> None:
            events.append(component.name)
            begin(component)
            assert [p.name for p in parts.values() if p.in_use] == [component.name]

        monkeypatch.setattr(OffloadedComponent, "begin_use", watched)
        for _ in range(2):
            events.clear()
            assert torch.equal(frames(generator, values), resident)
            assert events == ["transformer", "transformer_2"]
        assert all(part.is_home for part in parts.values())
        sizes = [sum(p.nbytes for p in generator.pipeline.modules[n].parameters()) for n in parts]
        assert generator.pipeline.plan.host_bytes == sum(sizes)


def test_a_boundary_of_the_request_moves_the_switch(checkpoints: Path) -> None:
    root = checkpoint_folder(EXPERTS, checkpoints)
    values = request(EXPERTS, checkpoints, num_inference_steps=4)
    calls: list[str] = []
    with opened_runtime(root) as generator:
        for name in ("transformer", "transformer_2"):
            module = generator.pipeline.modules[name]
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for boundary, first in ((None, 2), (0.0, 4), (1.0, 0), (0.6, 3)):
            calls.clear()
            generator.generate(**values, boundary_ratio=boundary)
            assert calls == ["transformer"] * 2 * first + ["transformer_2"] * 2 * (4 - first)


def test_tiles_change_the_clip_a_little(checkpoints: Path) -> None:
    root = checkpoint_folder(IMAGE, checkpoints)
    values = request(IMAGE, checkpoints)
    with opened_runtime(root) as generator:
        whole = frames(generator, values)
    with opened_runtime(root, vae_mode="tiled", vae_tile_size=32) as generator:
        tiled = frames(generator, values)
        vae = generator.pipeline.modules["vae"]
        assert (vae.tiling.height, vae.tiling.stride_height) == (32, 24)
    assert not torch.equal(tiled, whole)
    assert tiled.shape == whole.shape


def test_requests_that_share_a_batch_are_what_they_are_alone(checkpoints: Path) -> None:
    root = checkpoint_folder(IMAGE, checkpoints)
    first = request(IMAGE, checkpoints)
    other = request(IMAGE, checkpoints, prompt="zzz", negative_prompt="fox", seed=9)
    with opened_runtime(root) as generator:
        model, pipeline = generator._open().model, generator.pipeline  # type: ignore[union-attr]
        parts = [model.admit(model.sampling_params(v))[0] for v in (first, other)]
        another = model.admit(model.sampling_params({**first, "flow_shift": 9.0}))[0]
        assert signature(parts[0]) == signature(parts[1]) != signature(another)
        batch, rows = join(parts, RequestControl())
        output = pipeline.forward(batch, pipeline.server_args)
        for values, part, own in zip((first, other), parts, rows, strict=True):
            joined = part_of(output, part, own).output.int()
            assert (joined - frames(generator, values).int()).abs().max() <= 1


AUTHORS = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
"""Diffusers' names -> the authors' names, as lightx2v and ComfyUI write them."""
DOWN_UP = (".lora_down.weight", ".lora_up.weight")
STYLES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "diffusers": ("transformer.", False, {}),
    "comfy": ("diffusion_model.", True, {}),
    "lightx2v": ("diffusion_model.", True, {"parts": DOWN_UP, "alpha": 8.0}),
}


@pytest.mark.parametrize("style", STYLES)
def test_adapters_by_the_names_of_three_trainers(
    checkpoints: Path, tmp_path: Path, style: str
) -> None:
    """Against Diffusers' pipeline, with the change added to its weights by hand."""
    root = checkpoint_folder(TEXT, checkpoints)
    prefix, by_authors, more = STYLES[style]
    pipeline = load_oracle(root, FAMILY.reference)
    adapter = Adapter(pipeline.transformer, 3, strength=0.3)
    for index in range(2):
        for path, name in AUTHORS.items():
            spelled = f"{prefix}blocks.{index}.{name if by_authors else path}"
            adapter.add((f"blocks.{index}.{path}",), spelled, **more)
    file = adapter.save(tmp_path / "lora.safetensors")
    values = request(TEXT, checkpoints)
    kept = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    try:
        base = trace_of(pipeline, FAMILY, values)
        with torch.no_grad():
            for path, change in adapter.changes.items():
                pipeline.transformer.get_submodule(path).weight += change
        expected = trace_of(pipeline, FAMILY, values)
    finally:
        pipeline.transformer.load_state_dict(kept)
    assert (expected.pixels - base.pixels).abs().max() > MOVED
    with opened_runtime(root) as generator:
        measured = record_runtime(generator, FAMILY, {**values, "lora": [{"path": str(file)}]})
        (adapter_status,) = [generator.list_loras()]
    report = compare(measured, expected)
    assert not report.broken, f"{adapter_status}\n{report}"


WRONG: list[tuple[TinyWan, dict[str, Any], str]] = [
    (TEXT, {"guidance_scale_2": 3.0}, "one denoiser"),
    (TEXT, {"boundary_ratio": 0.5}, "one denoiser"),
    (
        TEXT,
        {"image_path": "x.png"},
        "no task takes an input image here; this pipeline serves T2V, V2V",
    ),
    (TEXT, {"num_frames": 8}, "try 5 or 9"),
    (TEXT, {"width": 40}, "try 32 or 48"),
    (TEXT, {"flow_shift": 0}, "above 0"),
    (TEXT, {"video_path": "x.mp4", "strength": 0.1}, "leaves none"),
    (SMALL, {"height": 48}, "try 32 or 64"),
    (SMALL, {"image_path": ["a.png", "b.png"]}, "takes a first frame"),
    (IMAGE, {"image_path": ["a.png", "b.png"]}, "takes a first frame"),
    (IMAGE, {"image_path": None}, "needs an input image"),
    (TinyWan("wan-both", image="both"), {}, "give two images"),
]


@pytest.mark.parametrize(("tiny", "changes", "message"), WRONG)
def test_what_a_checkpoint_cannot_do_is_refused_by_name(
    checkpoints: Path, tiny: TinyWan, changes: dict[str, Any], message: str
) -> None:
    from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    root = checkpoint_folder(tiny, checkpoints)
    model = ModelDescription.find(ServerArgs.from_flat(model_path=str(root), device="cpu"))
    with pytest.raises(InvalidRequest, match=message):
        model.admit(model.sampling_params({**request(tiny, checkpoints), **changes}))


def test_an_adapter_for_one_expert_leaves_the_other_alone(
    checkpoints: Path, tmp_path: Path
) -> None:
    """As adapters of 2.2 come: a file for each expert."""
    root = checkpoint_folder(EXPERTS, checkpoints)
    values = request(EXPERTS, checkpoints, num_inference_steps=4)
    with opened_runtime(root) as generator:
        adapter = Adapter(generator.pipeline.modules["transformer"], 3, strength=0.3)
        for path in ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2"):
            adapter.add((path,), f"diffusion_model.{path}")
        file = str(adapter.save(tmp_path / "lora.safetensors"))
        plain = frames(generator, values)
        made = {}
        for target in ("transformer", "transformer_2", "all"):
            generator.set_lora("a", file, target=target)
            made[target] = frames(generator, values)
            generator.unset_lora()
        high_only = {**values, "boundary_ratio": 0.0}
        unmoved = frames(generator, high_only)
        generator.set_lora("a", file, target="transformer_2")
        assert torch.equal(frames(generator, high_only), unmoved)
        generator.unset_lora()
        assert torch.equal(frames(generator, values), plain)
    distinct = [plain, *made.values()]
    assert not any(torch.equal(one, two) for i, one in enumerate(distinct) for two in distinct[:i])


def test_verify_puts_an_adapter_on_both_experts(checkpoints: Path) -> None:
    root = checkpoint_folder(EXPERTS, checkpoints)
    args = ServerArgs.from_flat(model_path=str(root), device="cpu", precision="fp32")
    found = verify(args, Wish(checks=("lora",), weights="real"), lambda said: None)
    assert [(row.name, row.verdict) for row in found.rows] == [("lora", "ok")]
