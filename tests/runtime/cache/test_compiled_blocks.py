"""Blocks as compiled code: the same numbers, whole graphs, and few of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.configs.step_cache_choice import StepCacheChoice
from sglang.multimodal_gen.runtime.cache.block_passage import BlockStands
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks
from sglang.multimodal_gen.runtime.cache.graph_runner import GraphRunner
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheRun
from sglang.multimodal_gen.runtime.cache.step_cache_plan import step_cache_plan
from sglang.multimodal_gen.runtime.layers import products, qk_norm
from sglang.multimodal_gen.runtime.layers.lora.lora_linear import LoRALinear
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

SMALL = {"attention_head_dim": 8, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def flux():
    model = FluxTransformer2DModel(
        in_channels=6, num_layers=2, num_single_layers=2, joint_attention_dim=5,
        pooled_projection_dim=4, axes_dims_rope=(2, 2, 4), **SMALL,
    )  # fmt: skip

    def kwargs(images, side, draw):
        return {"hidden_states": torch.randn(images, side * side, 6, generator=draw),
                "encoder_hidden_states": torch.randn(images, 3, 5, generator=draw),
                "pooled_projections": torch.randn(images, 4, generator=draw),
                "timestep": torch.rand(images, generator=draw),
                "rotary": model.rotary_embedding(3, side, side)}  # fmt: skip

    return model, kwargs


def qwen():
    model = QwenImageTransformer2DModel(
        in_channels=6, out_channels=6, patch_size=1, num_layers=2, joint_attention_dim=5,
        axes_dims_rope=(2, 2, 4), zero_cond_t=True, **SMALL,
    )  # fmt: skip

    def kwargs(images, side, draw):
        mask = torch.ones(images, 3, dtype=torch.bool)
        mask[:, -1] = False
        return {"hidden_states": torch.randn(images, side * side + 2, 6, generator=draw),
                "encoder_hidden_states": torch.randn(images, 3, 5, generator=draw),
                "encoder_hidden_states_mask": mask,
                "timestep": torch.rand(images, generator=draw),
                "rotary": model.rotary_embedding(3, (side, side), [(1, 2)])}  # fmt: skip

    return model, kwargs


def wan():
    model = WanTransformer3DModel(
        in_channels=3, out_channels=3, text_dim=5, freq_dim=8, ffn_dim=24, num_layers=2,
        image_dim=5, added_kv_proj_dim=16, **SMALL,
    )  # fmt: skip

    def kwargs(images, side, draw):
        return {"hidden_states": torch.randn(images, 3, 1, 2 * side, 2 * side, generator=draw),
                "encoder_hidden_states": torch.randn(images, 3, 5, generator=draw),
                "encoder_hidden_states_image": torch.randn(images, 2, 5, generator=draw),
                "timestep": 1000 * torch.rand(images, generator=draw),
                "rotary": model.rotary_embedding(1, 2 * side, 2 * side)}  # fmt: skip

    return model, kwargs


FAMILIES = {"flux": flux, "qwen": qwen, "wan": wan}


def opened(family):
    model, kwargs = FAMILIES[family]()
    fill_with_noise(model, seed=1)
    model.requires_grad_(False)

    @torch.inference_mode()
    def predict(images=1, side=2, seed=0):
        return model(**kwargs(images, side, torch.Generator().manual_seed(seed)))

    return model, predict


def total(compiled):
    return sum(compiled.counters.graphs.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_the_same_and_a_third_size_costs_no_compilation(family):
    model, predict = opened(family)
    calls = [(1, 2, 0), (1, 2, 1), (1, 3, 0), (1, 4, 0), (1, 2, 0), (1, 6, 0)]
    want = [predict(*call) for call in calls]
    assert not torch.allclose(want[0], want[1], rtol=1e-2), "the input must matter"
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    kinds = compiled.kinds
    made = []
    for call, expected in zip(calls, want, strict=True):
        torch.testing.assert_close(predict(*call), expected, rtol=1e-5, atol=1e-5)
        made.append(total(compiled))
    assert compiled.counters.blocks == sum(len(model.get_submodule(n)) for n in model.layer_names)
    assert made == [kinds, kinds, *[2 * kinds] * 4]


def test_the_compiler_sees_the_operators_and_packed_products(monkeypatch):
    model, predict = opened("flux")
    want = [predict(side=side) for side in (2, 3)]
    assert pack_linears(model) == 6
    seen = []

    def look(graph, _):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = CompiledBlocks(backend=look)
    compiled.add(model)
    # What a GPU in half precision has.
    monkeypatch.setattr(products, "_mergeable", lambda x: True)
    monkeypatch.setattr(qk_norm, "_has_kernel", lambda x: True)
    for side, expected in zip((2, 3), want, strict=True):
        torch.testing.assert_close(predict(side=side), expected, rtol=1e-5, atol=1e-5)

    def count(graph, name):
        return sum(f"sgl_diffusion.{name}.default" in target for target in graph)

    double, single = seen[:2]
    names = ("joint_products", "shared_product", "concat_product", "qk_norm_rotary_join")
    assert [count(double, name) for name in names] == [1, 0, 0, 1]
    assert [count(single, name) for name in names] == [0, 1, 1, 1]
    norms = ("norm_modulate", "add_gated_norm_modulate", "add_gated")
    assert [count(double, name) for name in norms] == [2, 2, 2]
    assert [count(single, name) for name in norms] == [1, 0, 1]


def test_blocks_with_live_adapters_run_as_they_are_written_until_these_go():
    model, predict = opened("flux")
    want = predict()
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    torch.testing.assert_close(predict(), want)
    linear = model.transformer_blocks[0].attn.to_out[0]
    adapter = LoRALinear(linear)
    draw = torch.Generator().manual_seed(3)
    factors = (torch.randn(shape, generator=draw) for shape in ((2, 16), (16, 2)))
    adapter.run_live([Term(LowRank(*factors, 1.0), 1.0)])
    compiled.refresh()
    assert (compiled.counters.blocks, compiled.counters.direct) == (3, 1)
    adapted = predict()
    compiled.close()
    torch.testing.assert_close(adapted, predict())
    assert not torch.allclose(adapted, want, rtol=1e-2)
    compiled.add(model)
    adapter.clear()
    compiled.refresh()
    assert (compiled.counters.blocks, compiled.counters.direct) == (4, 0)
    made = total(compiled)
    torch.testing.assert_close(predict(), want)
    assert total(compiled) == made, "what was compiled serves again"


def test_changed_weights_are_read_anew():
    model, predict = opened("flux")
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    before = predict()
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_out[0].weight.mul_(2)  # as a merged adapter does
    for block in model.single_transformer_blocks:
        for parameter in block.parameters():
            parameter.data = parameter.data.clone()  # as a stream of blocks does
    made = total(compiled)
    after = predict()
    assert not torch.allclose(before, after, rtol=1e-2)
    assert total(compiled) == made
    compiled.close()
    torch.testing.assert_close(after, predict())


def test_a_step_cache_leaves_compiled_blocks_out():
    model, kwargs = flux()
    fill_with_noise(model, seed=1)
    model.requires_grad_(False)
    steps = [kwargs(2, 2, torch.Generator().manual_seed(0)) for _ in range(3)]

    @torch.inference_mode()
    def drive():
        run = StepCacheRun(StepCacheChoice("first-block", 0.1), 2)
        stands = BlockStands(model, step_cache_plan(type(model)))
        return [run.call(stands, "only", step) for step in steps]

    want = drive()
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    calls = []
    model.single_transformer_blocks[1].register_forward_hook(lambda *_: calls.append(1))
    for found, expected in zip(drive(), want, strict=True):
        torch.testing.assert_close(found, expected)
    assert len(calls) == 1, "the second and third step were left out"
    assert total(compiled) == 2


class Recorder:
    """Replays by calling again."""

    device = torch.device("cpu")

    def record(self, call, what):
        self.call, self.output = call, call()
        return self

    def replay(self):
        with torch.inference_mode():
            self.output = self.call()


def test_what_is_recorded_is_compiled_before():
    model, kwargs = flux()
    fill_with_noise(model, seed=1)
    model.requires_grad_(False)
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    runner, made = GraphRunner(Recorder()), []
    with torch.inference_mode():
        for seed in range(4):
            runner(model, kwargs(1, 2, torch.Generator().manual_seed(seed)))
            made.append(total(compiled))
    assert runner.counters.replays == 3
    assert made[1:] == [made[1]] * 3, "no replay compiles"
    assert made[1] <= 4


def test_beyond_the_limit_it_is_an_error_and_not_a_quiet_fall_back():
    model, predict = opened("flux")
    compiled = CompiledBlocks(backend="eager")
    compiled.add(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        predict(side=2)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            predict(side=3)


class Waiting(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


class Breaks(nn.Module):
    layer_names = ("blocks",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Waiting()])

    def forward(self, x):
        return self.blocks[0](x)


def test_a_block_that_is_no_whole_graph_is_an_error():
    model = Breaks()
    CompiledBlocks(backend="eager").add(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(2))


SECOND_START = """
import torch
from torch._dynamo.utils import counters
from runtime.cache.test_compiled_blocks import opened
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks, keep_compiled_code

keep_compiled_code()
model, predict = opened("flux")
want = predict()
CompiledBlocks().add(model)
torch.testing.assert_close(predict(), want, rtol=1e-5, atol=1e-5)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_compiled(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    told = [
        subprocess.run(
            [sys.executable, "-c", SECOND_START],
            env=environment, capture_output=True, text=True, timeout=300, check=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert told == [["2", "0"], ["0", "2"]]
    assert any((tmp_path / "sglang-diffusion" / "torch-compile").iterdir())
