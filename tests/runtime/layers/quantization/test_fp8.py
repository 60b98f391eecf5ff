"""Products in eight bits against float32, and the method on the linears of a tiny FLUX.1."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.wan import WanPipelineConfig
from sglang.multimodal_gen.runtime.layers.linear import MethodLinear
from sglang.multimodal_gen.runtime.layers.lora.adapted_module import AdaptedModule
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.ops import fp8_rows
from sglang.multimodal_gen.runtime.layers.products import (
    concat_linear,
    gelu_linear,
    norm_modulate,
    pack_linears,
)
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import (
    Fp8Method,
    PendingInput,
    carried,
)
from sglang.multimodal_gen.runtime.layers.quantization.install import method_of, quantize_linears
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel
from sglang.multimodal_gen.runtime.utils.errors import UserError
from thread_ranks import run_threads

PRODUCT_LIMIT = 0.045
"""Relative L2 of a product: each operand is rounded to 3 bits (rms 2.6%), independently."""
PREDICTION_LIMIT = 0.1
"""Of a network of random weights, with 20 such products in it."""
IGNORED = FluxPipelineConfig().quantization_ignored_layers


def relative_l2(measured, expected):
    return ((measured - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=48, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    for parameter in model.parameters():
        matrix = parameter.ndim > 1
        nn.init.normal_(parameter, mean=0.0 if matrix else 0.5, std=0.08 if matrix else 0.1)
    return model.eval().requires_grad_(False)


INPUTS = {
    "hidden_states": torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1)),
    "encoder_hidden_states": torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(2)),
    "pooled_projections": torch.randn(1, 48, generator=torch.Generator().manual_seed(3)),
    "timestep": torch.tensor([0.7]),
}


@torch.inference_mode()
def predicted(model):
    return model(**INPUTS, rotary=model.rotary_embedding(20, 4, 6))


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_product_is_within_the_types_rounding(granularity, rows):
    torch.manual_seed(0)
    # Rows and outputs of very different size: what scales are for.
    x = torch.randn(2, rows, 64) * torch.logspace(-1, 1, rows)[:, None]
    linear = nn.Linear(64, 48).requires_grad_(False)
    exact = linear(x)
    holder = nn.Sequential(copy.deepcopy(linear))
    assert quantize_linears(holder, Fp8Method(granularity)) == ("0",)
    assert holder[0].weight.dtype == torch.float8_e4m3fn
    error = relative_l2(holder(x), exact)
    assert 1e-3 < error < PRODUCT_LIMIT
    holder[0].weight_scale.mul_(1.1)
    assert relative_l2(holder(x), exact) > PRODUCT_LIMIT  # a wrong scale is seen
    assert holder(x[0, :0]).shape == (0, 48)


def test_each_row_has_its_own_scale():
    """A row that is a million times larger than another spoils only what has one scale for both."""
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    x[0] *= 1e6
    linear = nn.Linear(64, 48).requires_grad_(False)
    errors = {}
    for granularity in ("row", "tensor"):
        holder = nn.Sequential(copy.deepcopy(linear))
        quantize_linears(holder, Fp8Method(granularity))
        errors[granularity] = relative_l2(holder(x)[1:], linear(x)[1:])
    assert errors["row"] < PRODUCT_LIMIT < errors["tensor"]


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_prediction_stays_near_and_patterns_stay_out(flux, granularity):
    exact = predicted(flux)
    model = copy.deepcopy(flux)
    paths = quantize_linears(model, Fp8Method(granularity), ignored=IGNORED)
    left = {p for p, m in model.named_modules() if type(m) is nn.Linear}
    assert left == {
        "x_embedder", "context_embedder", "norm_out.linear", "proj_out",
        *(f"time_text_embed.{part}_embedder.linear_{n}"
          for part in ("timestep", "text") for n in (1, 2)),
    }  # fmt: skip
    assert len(paths) == 20
    error = relative_l2(predicted(model), exact)
    assert 1e-3 < error < PREDICTION_LIMIT
    model.transformer_blocks[0].ff.net[2].weight_scale.mul_(3)
    assert relative_l2(predicted(model), exact) > 1.5 * error  # a wrong scale is seen


def test_neighbours_are_one_product_with_the_same_result(flux, monkeypatch):
    model = copy.deepcopy(flux)
    quantize_linears(model, Fp8Method(), ignored=IGNORED)
    apart, calls = predicted(model), []
    launch = Fp8Method.into
    monkeypatch.setattr(Fp8Method, "into", lambda *a: (calls.append(1), launch(*a))[1])
    predicted(model)
    before = len(calls)
    assert pack_linears(model) == 3
    calls.clear()
    assert torch.equal(predicted(model), apart)
    assert len(calls) == before - 3 * 2


def test_who_is_named_as_the_reader_gets_quantised_rows(monkeypatch):
    """The norm and the GELU quantise in their own pass; nothing is quantised a second time."""
    torch.manual_seed(0)
    up, down = nn.Linear(32, 64), nn.Linear(96, 32)
    holder = nn.ModuleDict({"up": up, "down": down}).requires_grad_(False)
    x, shift, scale = torch.randn(1, 40, 32), torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def block():
        normed = norm_modulate(x, shift, scale, into=holder["up"])
        mlp = gelu_linear(normed, holder["up"], into=holder["down"])
        return normed, mlp, concat_linear((x, mlp), holder["down"])

    _, _, exact = block()
    quantize_linears(holder, Fp8Method())
    alone = []
    monkeypatch.setattr(
        "sglang.multimodal_gen.runtime.layers.quantization.fp8.quantize_rows",
        lambda *a: alone.append(1),
    )
    normed, mlp, found = block()
    assert carried(normed) is not None
    assert isinstance(mlp, PendingInput)
    assert not alone
    assert relative_l2(found, exact) < 1.5 * PRODUCT_LIMIT  # two products, one after the other
    holder["down"].register_forward_hook(lambda *a: None)  # an adapter needs the whole input
    assert isinstance(gelu_linear(normed, holder["up"], into=holder["down"]), torch.Tensor)


def test_two_ranks_give_what_one_gives_within_the_rounding(flux):
    exact = predicted(flux)
    single = copy.deepcopy(flux)
    quantize_linears(single, Fp8Method(), ignored=IGNORED)

    def rank(group):
        model = copy.deepcopy(flux)
        PlannedModel(model, plan_of(type(model))).apply(group)
        quantize_linears(model, Fp8Method(), ignored=IGNORED)
        column, row = model.transformer_blocks[0].attn.to_q, model.transformer_blocks[0].ff.net[2]
        assert column.weight_scale.shape == (64,)  # of its own rows
        assert row.weight_scale.shape == (128,)  # of all rows, over its own inputs
        assert method_of(column) == Fp8Method()
        out = predicted(model)
        assert group.traffic["all_reduce"] > 0
        return out, column.weight_scale

    (first, top), (second, bottom) = run_threads(2, rank)
    assert torch.equal(first, second)
    whole = single.transformer_blocks[0].attn.to_q.weight_scale
    assert torch.equal(torch.cat((top, bottom)), whole)
    assert relative_l2(first, exact) < PREDICTION_LIMIT
    assert relative_l2(first, predicted(single)) < PREDICTION_LIMIT


def test_adapters_run_live_on_eight_bits_and_are_not_merged(flux):
    model = copy.deepcopy(flux)
    quantize_linears(model, Fp8Method(), ignored=IGNORED)
    base = predicted(model)
    path = "single_transformer_blocks.0.attn.to_q"
    generator = torch.Generator().manual_seed(5)
    down, up = torch.randn(4, 128, generator=generator), torch.randn(128, 4, generator=generator)
    factors = LowRank(0.05 * down, 0.05 * up)
    adapted = AdaptedModule(model)
    assert adapted.runs_live_only
    plain = AdaptedModule(flux).relative_change({path: factors})
    assert adapted.relative_change({path: factors}) == pytest.approx(plain, rel=1e-2)
    x = torch.randn(1, 40, 128, generator=generator)
    linear = model.get_submodule(path)
    before = linear(x)
    adapted.run_live({path: [Term(factors, 1.0)]})
    expected = before + x @ (factors.up @ factors.down).T
    torch.testing.assert_close(linear(x), expected)
    assert relative_l2(predicted(model), base) > 1e-3
    adapted.clear()
    assert torch.equal(predicted(model), base)
    with pytest.raises(UserError, match=r"eight bits.*dynamic"):
        adapted.merge({path: [Term(factors, 1.0)]})
    assert torch.equal(predicted(model), base)


def test_flux_at_full_size_takes_at_most_55_percent():
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    before = sum(p.nbytes for p in model.parameters())
    quantize_linears(model, Fp8Method(), ignored=IGNORED)
    after = sum(p.nbytes for p in model.parameters())
    assert before > 23e9
    assert 0.5 < after / before < 0.51


@pytest.mark.parametrize(
    ("model", "config", "left", "share"),
    [(QwenImageTransformer2DModel, QwenImagePipelineConfig,
      {"img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1",
       "time_text_embed.timestep_embedder.linear_2", "norm_out.linear", "proj_out"}, 0.51),
     (WanTransformer3DModel, WanPipelineConfig,
      {"condition_embedder.time_embedder.linear_1", "condition_embedder.time_embedder.linear_2",
       "condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1",
       "condition_embedder.text_embedder.linear_2", "proj_out"}, 0.52)],
)  # fmt: skip
def test_other_families_are_served_by_their_patterns_alone(model, config, left, share):
    with torch.device("meta"):
        made = model().to(torch.bfloat16)
    before = sum(p.nbytes for p in made.parameters())
    quantize_linears(made, Fp8Method(), ignored=config().quantization_ignored_layers)
    assert {p for p, m in made.named_modules() if type(m) is nn.Linear} == left
    assert sum(p.nbytes for p in made.parameters()) < share * before


def test_what_a_gpu_cannot_multiply_stays_as_it_is():
    model = nn.ModuleDict(
        {"odd": nn.Linear(24, 32), "even": nn.Linear(32, 32), "own": _Own(32, 32)}
    )
    model["tied"] = nn.Linear(32, 32)
    model["tie"] = nn.Linear(32, 32)
    model["tie"].weight = model["tied"].weight
    assert quantize_linears(model.requires_grad_(False), Fp8Method()) == ("even",)
    assert isinstance(model["even"], MethodLinear)


class _Own(nn.Linear):
    pass


def test_torchs_compiler_sees_the_product_as_an_operator():
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(32, 48)).requires_grad_(False)
    quantize_linears(holder, Fp8Method())
    x = torch.randn(40, 32)
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.inference_mode():
        expected = holder(x)
        found = torch.compile(holder, backend=look, fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
    assert any("fp8_product" in name for name in seen)
    assert fp8_rows.FEW_ROWS < 40
