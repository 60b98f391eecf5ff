from __future__ import annotations

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import TorchSDPA
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.computing_dtype import computing_dtype
from sglang.multimodal_gen.runtime.loader.denoiser_split import give_attention
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel


def test_islands_and_quantised_weights_do_not_decide():
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].bfloat16()
    module[2].bfloat16()
    assert next(module.parameters()).dtype == torch.float32
    assert computing_dtype(module) == torch.bfloat16
    for name in range(3):
        module.register_parameter(
            f"q{name}", nn.Parameter(torch.zeros(9, dtype=torch.int8), requires_grad=False)
        )
    assert computing_dtype(module) == torch.bfloat16
    assert computing_dtype(nn.Identity()) is None


def test_a_kernel_of_half_precision_takes_a_denoiser_with_islands_of_float32():
    """Found on a GPU: Wan's first parameter is one of those that stay in float32."""
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=8, freq_dim=8, ffn_dim=16,
        num_layers=1,
    ).bfloat16()  # fmt: skip
    model.scale_shift_table.data = model.scale_shift_table.data.float()
    assert next(model.parameters()).dtype == torch.float32
    half = TorchSDPA("a half-precision kernel", None, (torch.bfloat16,))
    give_attention({"transformer": model}, {"transformer": "WanTransformer3DModel"}, half, "fa3")
    layers = [m for m in model.modules() if isinstance(m, USPAttention)]
    assert layers
    assert all(layer.backend is half for layer in layers)
