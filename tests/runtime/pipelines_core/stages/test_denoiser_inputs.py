from __future__ import annotations

import torch
from torch import nn

from sglang.multimodal_gen.runtime.pipelines_core.stages.denoiser_inputs import (
    cast_embeddings,
    computing_dtype,
    in_dtype,
)

from seed_samples.stubs import stub_request


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


def test_what_has_the_dtype_is_the_same_object():
    batch = stub_request()
    batch.prompt_embeds = [torch.zeros(1, 2), torch.zeros(1, 2).bfloat16()]
    batch.pooled_embeds = pooled = [torch.zeros(1).bfloat16()]
    whole, half = batch.prompt_embeds
    cast_embeddings(batch, torch.bfloat16)
    assert batch.pooled_embeds is pooled
    assert batch.prompt_embeds[1] is half
    assert batch.prompt_embeds[0].dtype == torch.bfloat16 != whole.dtype
    cast_embeddings(batch, None)
    mask = torch.ones(2, dtype=torch.int64)
    assert in_dtype(mask, torch.bfloat16) is mask
    assert in_dtype(None, torch.bfloat16) is None
