"""Recorded steps of a tiny FLUX on a GPU equal direct ones bit for bit."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from sglang.multimodal_gen.runtime.cache.cuda_graphs import CudaGraphs
from sglang.multimodal_gen.runtime.cache.graph_runner import GraphRunner, call_plainly
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    made = made.to(DEVICE, torch.bfloat16).requires_grad_(False).eval()
    pack_linears(made)
    return made


def arguments(model, seed, size=(8, 8), text=16):
    torch.manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)

    return {
        "hidden_states": random(1, size[0] * size[1], 16),
        "encoder_hidden_states": random(1, text, 32),
        "pooled_projections": random(1, 24),
        "timestep": torch.rand(1, device=DEVICE).to(torch.bfloat16),
        "guidance": 3.5 + torch.rand(1, device=DEVICE),
        "rotary": model.rotary_embedding(text, *size),
    }


@torch.inference_mode()
def test_replays_equal_direct_calls_over_sizes_and_values(model):
    runner = GraphRunner(CudaGraphs(DEVICE), limit=2)
    shapes = [((8, 8), 16), ((8, 12), 16), ((8, 8), 24)]
    results = []
    for seed in range(12):
        size, text = shapes[seed // 4]
        given = arguments(model, seed, size, text)
        results.append((runner(model, given), call_plainly(model, given)))
    assert all(torch.equal(a, b) for a, b in results)
    assert not torch.equal(results[2][0], results[3][0])
    counters = runner.counters
    assert (counters.direct, counters.captures, counters.replays) == (3, 3, 9)
    assert len(runner) == 2
    given = arguments(model, 50, (8, 12), 16)  # recorded after another one left, and still right
    assert torch.equal(runner(model, given), call_plainly(model, given))
    assert counters.captures == 3


@torch.inference_mode()
def test_weights_changed_after_drop_are_seen_and_memory_comes_back(model):
    runner = GraphRunner(CudaGraphs(DEVICE), limit=1)
    for seed in range(3):
        runner(model, arguments(model, seed))
    runner.drop()
    held = torch.cuda.memory_allocated(DEVICE)
    given = None
    for round_ in range(4):
        for seed in range(3):
            given = arguments(model, seed, (8, 8 + 4 * (round_ % 2)))
            assert torch.equal(runner(model, given), call_plainly(model, given))
    runner.drop()
    del given
    assert len(runner) == 0
    assert torch.cuda.memory_allocated(DEVICE) <= held + 2**20


def test_what_cannot_be_recorded_is_told_with_the_switch():
    class Waits(torch.nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    runner, waits, x = GraphRunner(CudaGraphs(DEVICE)), Waits(), torch.ones(4, device=DEVICE)
    runner(waits, {"x": x})
    with pytest.raises(PipelineDefinitionError, match="--enable-cuda-graph false"):
        runner(waits, {"x": x})
    torch.cuda.synchronize()
    assert torch.ones(2, device=DEVICE).sum().item() == 2
