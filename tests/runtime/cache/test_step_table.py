"""Modulations made for several steps at once: the same numbers, fewer readings of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.cache.step_table import (
    StepTable,
    StepTableCalls,
    TableCounters,
    begin_tables,
    step_table,
)
from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import FEW_ROWS
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method
from sglang.multimodal_gen.runtime.layers.quantization.install import quantize_linears
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

IMAGES = 3
SMALL = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 4, 8)}


def flux():
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, joint_attention_dim=16,
        pooled_projection_dim=16, guidance_embeds=True, **SMALL,
    )  # fmt: skip
    rotary = model.rotary_embedding(3, 2, 2)
    text = torch.randn(IMAGES, 3, 16)

    def prepare(x, t_B):
        return {"hidden_states": x, "encoder_hidden_states": text, "rotary": rotary,
                "pooled_projections": text[:, 0], "timestep": t_B / 1000,
                "guidance": torch.tensor([1.0, 3.5, 5.0])}  # fmt: skip

    return model, prepare


def qwen():
    model = QwenImageTransformer2DModel(
        in_channels=16, out_channels=16, patch_size=1, num_layers=2, joint_attention_dim=16, **SMALL
    )
    rotary = model.rotary_embedding(3, (2, 2))
    text = torch.randn(IMAGES, 3, 16)

    def prepare(x, t_B):
        return {"hidden_states": x, "encoder_hidden_states": text, "rotary": rotary,
                "timestep": t_B / 1000}  # fmt: skip

    return model, prepare


def loop(model, prepare, timesteps, start=0):
    """(plain, with tables) predictions of each step, and the counters."""
    counters = TableCounters()
    calls = begin_tables(timesteps, IMAGES, counters)
    assert calls is not None
    pairs = []
    x = torch.randn(IMAGES, 4, 16)
    for step in range(start, len(timesteps)):
        kwargs = prepare(x, timesteps[step].expand(IMAGES))
        given = calls.at(step).given(model, 0, kwargs, lambda t_B: prepare(x, t_B))
        assert given["modulation"].shape == (IMAGES, sum(model.modulation_widths))
        pairs.append((model(**kwargs), model(**given)))
    return pairs, counters


@pytest.mark.parametrize("make", [flux, qwen], ids=["flux", "qwen-image"])
@pytest.mark.parametrize("quantized", [False, True], ids=["fp32", "fp8"])
@torch.inference_mode()
def test_rows_of_a_table_are_what_the_forward_would_make(make, quantized):
    torch.manual_seed(0)
    model, prepare = make()
    fill_with_noise(model, 1)
    if quantized:
        assert quantize_linears(model, Fp8Method())
    timesteps = torch.linspace(999.0, 10.0, 7)
    pairs, counters = loop(model, prepare, timesteps)
    assert (pairs[0][0] - pairs[1][0]).abs().max() > 1e-3, "the time does not matter"
    for plain, with_table in pairs:
        assert torch.equal(with_table, plain), "a row's bits depend on its company"
    # 16 rows have room for five steps of three images: 7 steps are two readings, not seven.
    assert counters == TableCounters(made=2, rows=7 * IMAGES, handed=7)
    _, counters = loop(model, prepare, timesteps, start=6)
    assert counters.rows == 2 * IMAGES, "its window begins where it always does"


def test_linears_are_called_once_a_window_and_a_branch_has_its_own():
    model, prepare = flux()
    fill_with_noise(model, 1)
    seen = []
    for block in model.transformer_blocks:
        block.norm1.linear.register_forward_hook(lambda m, args, out: seen.append(len(args[0])))
    timesteps, x = torch.linspace(999.0, 10.0, 5), torch.randn(IMAGES, 4, 16)
    calls = StepTableCalls(timesteps, IMAGES, TableCounters())
    plain, with_table = [], []
    with torch.inference_mode():
        for step in range(5):
            kwargs = prepare(x, timesteps[step].expand(IMAGES))
            for branch, turned in ((0, 1), (1, -1)):
                own = {**kwargs, "pooled_projections": turned * kwargs["pooled_projections"]}
                given = calls.at(step).given(
                    model, branch, own,
                    lambda t_B, own=own: {**own, "timestep": t_B / 1000},
                )  # fmt: skip
                with_table.append(model(**given))
                plain.append(own)
        # Two blocks, two branches: a product each, among 16 rows; the forwards call none.
        assert seen == [FEW_ROWS] * 4
        for own, made in zip(plain, with_table, strict=True):
            assert torch.equal(model(**own), made)
    assert (with_table[0] - with_table[1]).abs().max() > 1e-3, "branches do not differ"


def test_there_is_none_where_it_saves_nothing_or_weights_are_elsewhere():
    times = torch.linspace(999.0, 10.0, 5)
    assert begin_tables(times, 9, TableCounters()) is None, "16 rows are one step of nine images"
    assert step_table(WanTransformer3DModel) is None
    _, prepare = flux()
    kwargs = prepare(torch.randn(IMAGES, 4, 16), times[:1].expand(IMAGES))
    counters = TableCounters()
    for attribute in ("meta", "replaced"):
        away, _ = flux()
        linear = away.single_transformer_blocks[1].norm.linear
        if attribute == "meta":  # as streamed weights, on another device
            linear.to("meta")
        else:  # as those that are spread over ranks: another kind of tensor
            linear.weight.__class__ = type("Spread", (nn.Parameter,), {})
        calls = StepTableCalls(times, IMAGES, counters)
        assert calls.at(0).given(away, 0, kwargs, lambda t_B: kwargs) is kwargs
    zero, _ = qwen()
    zero.zero_cond_t = True
    calls = StepTableCalls(times, IMAGES, counters)
    assert calls.at(0).given(zero, 0, kwargs, lambda t_B: kwargs) is kwargs
    assert counters == TableCounters()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("modulation", "must be a StepTable"),
        (StepTable("modulation", "rows_of_all"), "no method 'rows_of_all'"),
        (StepTable("rows", "modulation_rows"), "no argument 'rows'"),
    ],
)
def test_a_wrong_table_is_refused(table, problem):
    cls = type("Wrong", (FluxTransformer2DModel,), {"STEP_TABLE": table})
    with pytest.raises(PipelineDefinitionError, match=problem):
        step_table(cls)


def test_the_loop_hands_them_to_the_denoiser_of_both_branches():
    asked = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 2.0,
             "seed": 1, "num_inference_steps": 9, "num_outputs_per_prompt": 2}  # fmt: skip
    with DiffGenerator.from_pretrained("demo", device="cpu") as generator:
        stage = generator.pipeline.get_stage("denoising_stage")
        generator.generate(**asked)
        # Two images: windows of eight steps, two of them, for two branches.
        assert stage.table_counters == TableCounters(made=4, rows=36, handed=18)
