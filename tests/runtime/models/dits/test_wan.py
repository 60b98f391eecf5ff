"""What a block of Wan asks a GPU to do, seen on tensors without values."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.multimodal_gen.runtime.layers.ops.operator import NAMESPACE
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformerBlock

DIM, HEAD_DIM, LENGTH = 64, 16, 50


class Passes(TorchDispatchMode):
    """Counts fused operators, and any float32 result as long as the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: Counter[str] = Counter()
        self.wide: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(NAMESPACE):
            self.fused[name.split(".")[1]] += 1
        results = result if isinstance(result, tuple) else (result,)
        shapes = [x.shape for x in results if isinstance(x, torch.Tensor) and x.dtype.itemsize > 2]
        if (1, LENGTH, DIM) in shapes:
            self.wide.append(name)
        return result


def passes_of_a_block(*, cross_attn_norm: bool = True) -> Passes:
    with torch.device("meta"), torch.no_grad():
        block = WanTransformerBlock(
            DIM, HEAD_DIM, 128, 1e-6, cross_attn_norm=cross_attn_norm, image_dim=None
        )
        block.bfloat16()
        block.scale_shift_table.data = block.scale_shift_table.data.float()
        block.attn2.attend.forward = lambda q, k, v: q  # type: ignore[method-assign]
        block.attn2.norm_q = torch.nn.Identity()  # type: ignore[assignment] # decomposed on meta
        x, text = (torch.empty(1, n, DIM, dtype=torch.bfloat16) for n in (LENGTH, 7))
        time = torch.empty(1, 1, 6, DIM, dtype=torch.bfloat16)
        rotary = Rotary(*(torch.empty(LENGTH, HEAD_DIM // 2) for _ in "cs"))
        with Passes() as passes:
            block(x, text, None, time, rotary)
    return passes


def test_a_block_passes_over_its_tokens_in_fused_operators():
    """Beside products, attention and the cross-attention's norm of q there are five."""
    passes = passes_of_a_block()
    expected = {"norm_modulate": 1, "qk_norm_rotary": 1, "add_gated_norm_modulate": 2}
    assert passes.fused == expected | {"add_gated": 1}
    assert not passes.wide  # nothing of the tokens' size is written in float32
    plain = passes_of_a_block(cross_attn_norm=False)
    assert plain.fused == expected | {"add_gated_norm_modulate": 1, "add_gated": 2}
