from __future__ import annotations

import torch

from sglang.multimodal_gen.runtime.pipelines_core.stages.denoiser_inputs import (
    cast_embeddings,
    in_dtype,
)

from seed_samples.stubs import stub_request


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
