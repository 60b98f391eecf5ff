"""The reference half of the parity harness: it repeats itself, and nothing in it is hidden."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.compare import compare
from parity.family import FLUX_DEV, FLUX_SCHNELL
from parity.harness import MOVED, assert_lively, assert_sensitive, checkpoint_folder
from parity.oracle import load_oracle, run_oracle, trace_of
from parity.tiny_checkpoints import flux_dev, flux_schnell
from parity.trace import Trace

REQUEST = {
    "prompt": "a small red circle",
    "seed": 5,
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "guidance_scale": 3.5,
    "max_sequence_length": 48,
}
TRUE_CFG = {**REQUEST, "negative_prompt": "blue", "true_cfg_scale": 3.0}


@pytest.fixture
def root(checkpoints: Path) -> Path:
    return checkpoint_folder(flux_dev(), checkpoints)


def test_reference_repeats_itself(root: Path) -> None:
    report = compare(run_oracle(root, FLUX_DEV, TRUE_CFG), run_oracle(root, FLUX_DEV, TRUE_CFG))
    assert {m.measured for m in report.measurements} == {0.0}


def test_checkpoint_is_the_same_every_time(root: Path, tmp_path: Path) -> None:
    flux_dev().write(tmp_path / "again")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert len(files) > 12
    for path in files:
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(root)).read_bytes()


def test_noise_is_one_draw_for_each_image(root: Path) -> None:
    request = {**REQUEST, "num_outputs_per_prompt": 2, "width": 96}
    trace = run_oracle(root, FLUX_DEV, request)
    draws = [torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(s)) for s in (5, 6)]
    packed = torch.cat(draws).unflatten(2, (4, 2)).unflatten(4, (6, 2))
    assert torch.equal(trace.noise, packed.permute(0, 2, 4, 1, 3, 5).reshape(2, 24, 64))


def test_schedule_of_dev_depends_on_the_size(root: Path) -> None:
    request = {**REQUEST, "height": 128, "width": 192, "num_inference_steps": 4}  # 96 tokens
    trace = run_oracle(root, FLUX_DEV, request)
    expected = torch.tensor([1000.0, 828.0014, 616.0738, 348.4871])
    torch.testing.assert_close(trace.timesteps, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(trace.sigmas * 1000, trace.timesteps)
    small = run_oracle(root, FLUX_DEV, {**REQUEST, "num_inference_steps": 4})
    assert (small.timesteps[1:] < trace.timesteps[1:]).all()


def test_trace_holds_each_step_and_branch(root: Path) -> None:
    trace = run_oracle(root, FLUX_DEV, TRUE_CFG)
    assert len(trace.steps) == 3
    for step, time in zip(trace.steps, trace.timesteps, strict=True):
        positive, negative = step.branches
        assert set(positive.inputs) == set(FLUX_DEV.inputs)
        assert not torch.equal(positive.prediction, negative.prediction)
        assert positive.inputs["timestep"].tolist() == [(time / 1000).item()]
        assert positive.inputs["guidance"].tolist() == [3.5]
    guided = _guided(trace, 3.0)
    sigmas = torch.cat((trace.sigmas, torch.zeros(1)))
    last = trace.steps[-1].latents + (sigmas[3] - sigmas[2]) * guided
    grid = last.view(1, 4, 4, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 8, 8)
    torch.testing.assert_close(trace.final_latents, grid / 0.3611 + 0.1159)


def _guided(trace: Trace, scale: float) -> torch.Tensor:
    positive, negative = trace.steps[-1].branches
    return negative.prediction + scale * (positive.prediction - negative.prediction)


@pytest.mark.parametrize("length", [16, 48, 512])
def test_both_text_encoders_move_the_picture(root: Path, length: int) -> None:
    """At 512 almost all of the text is padding: the few words must still be heard through T5."""
    pipeline = load_oracle(root, "FluxPipeline")
    request = {**REQUEST, "max_sequence_length": length, "prompt_2": REQUEST["prompt"]}
    base = trace_of(pipeline, FLUX_DEV, request)
    for name in ("prompt", "prompt_2"):
        other = trace_of(pipeline, FLUX_DEV, {**request, name: "a large green square, above"})
        assert (other.pixels - base.pixels).abs().max() > MOVED, name


def test_true_cfg_moves_the_picture(root: Path) -> None:
    assert_sensitive(root, FLUX_DEV, TRUE_CFG, run_oracle(root, FLUX_DEV, TRUE_CFG))


def test_schnell_ignores_guidance(checkpoints: Path) -> None:
    root = checkpoint_folder(flux_schnell(), checkpoints)
    base = run_oracle(root, FLUX_SCHNELL, REQUEST)
    assert "guidance" not in base.steps[0].branches[0].inputs
    assert base.timesteps.tolist() == pytest.approx([1000.0, 2000 / 3, 1000 / 3])
    assert_sensitive(root, FLUX_SCHNELL, REQUEST, base)
    with pytest.raises(AssertionError, match="guidance_scale moves"):
        assert_sensitive(root, FLUX_DEV, REQUEST, base)


def test_flat_and_clipped_pictures_are_refused(root: Path) -> None:
    trace = run_oracle(root, FLUX_DEV, REQUEST)
    with pytest.raises(AssertionError, match="flat"):
        assert_lively(replace(trace, pixels=torch.full_like(trace.pixels, 0.5)))
    with pytest.raises(AssertionError, match="clipped"):
        assert_lively(replace(trace, pixels=(trace.pixels > 0.5).float()))


def test_published_clip_config_pools_at_the_end_token(checkpoints: Path, root: Path) -> None:
    """``eos_token_id: 2`` means: the highest id. Written truly, it gives the same picture."""
    true = checkpoint_folder(flux_dev("flux-dev-true-eos", clip_eos_token_id=None), checkpoints)
    request = {**REQUEST, "prompt": "## is no end ##"}  # '#' has id 2 unless it ends a word
    assert 2 in load_oracle(root, "FluxPipeline").tokenizer(request["prompt"]).input_ids
    report = compare(run_oracle(root, FLUX_DEV, request), run_oracle(true, FLUX_DEV, request))
    assert not report.broken


COMPONENTS = ("text_encoder", "text_encoder_2", "transformer", "vae")


def _visible_parameters(component: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All that a text-to-image run can show; a VAE's encoder is not part of it.

    Softmax does not see a constant added to all scores of a query, which is what a bias of the keys
    is, unless a norm follows it as in the transformer.
    """
    for name, parameter in module.named_parameters():
        hidden_bias = component != "transformer" and name.endswith(("k_proj.bias", "to_k.bias"))
        unused_half = component == "vae" and name.startswith("encoder.")
        if not (hidden_bias or unused_half):
            yield name, parameter


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_weight_is_seen(root: Path, component: str) -> None:
    """A tensor that is 5% off anywhere is found: no weight of these checkpoints is idle."""
    pipeline = copy.copy(load_oracle(root, "FluxPipeline"))
    request = {**REQUEST, "num_inference_steps": 1, "height": 32, "width": 48}
    base = trace_of(pipeline, FLUX_DEV, request)
    module = getattr(pipeline, component)
    unseen = []
    for name, parameter in _visible_parameters(component, module):
        kept = parameter.detach().clone()
        _set(parameter, kept * 1.05)
        if not compare(trace_of(pipeline, FLUX_DEV, request), base).broken:
            unseen.append(name)
        _set(parameter, kept)
    assert not unseen
    assert not compare(trace_of(pipeline, FLUX_DEV, request), base).broken


@torch.no_grad()
def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.copy_(value)


def test_report_names_the_first_parting(root: Path) -> None:
    pipeline = load_oracle(root, "FluxPipeline")
    base = trace_of(pipeline, FLUX_DEV, REQUEST)
    gate: Any = pipeline.transformer.transformer_blocks[1].norm1.linear.bias
    kept = gate.detach().clone()
    _set(gate[2 * 48 : 3 * 48], gate[2 * 48 : 3 * 48] * 1.01)  # gate of the image's attention
    try:
        report = compare(trace_of(pipeline, FLUX_DEV, REQUEST), base)
    finally:
        _set(gate, kept)
    assert report.broken[0].what == "step 0, positive: prediction"
    assert "OFF step 0, positive: prediction" in str(report)
    assert report.worst("step 0: latents") == 0
