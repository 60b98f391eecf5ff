"""Parallel linears, embeddings and norms on real ranks against the whole ones."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.multimodal_gen.runtime.layers.norm_across_heads import NormAcrossHeads
from sglang.multimodal_gen.runtime.layers.parallel_embedding import (
    ColumnParallelEmbedding,
    VocabParallelEmbedding,
)
from sglang.multimodal_gen.runtime.layers.shard import Shard

LIMIT = 1e-6


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def linear(inputs: int, outputs: int, seed: int, **changes: Any) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, **changes).requires_grad_(False)


def mine(x: Tensor, group: Group) -> Tensor:
    return Shard(x.ndim - 1, (x.shape[-1],), group.rank, group.size).of(x)


def two_linears(group: Group, dtype: torch.dtype, bias: float = 0) -> tuple[Tensor, Tensor]:
    up, down = linear(12, 32, 1).to(dtype), linear(32, 12, 2).to(dtype)
    down.bias += bias
    x = torch.randn(2, 5, 12).to(dtype)
    column, row = ColumnParallelLinear(up, group), RowParallelLinear(down, group)
    assert column.weight.shape == (32 // group.size, 12)
    assert row.weight.shape == (12, 32 // group.size)
    return row(F.gelu(column(x))), down(F.gelu(up(x)))


def gathered(group: Group) -> tuple[Tensor, Tensor]:
    whole = linear(12, 24, 3)
    x = torch.randn(5, 12)
    return ColumnParallelLinear(whole, group, gather_output=True)(x), whole(x)


def gated(group: Group) -> tuple[Tensor, Tensor]:
    """Value and gate in one linear, split by position."""
    whole, down = linear(12, 32, 4), linear(16, 12, 5, bias=False)
    x = torch.randn(3, 12)

    def forward(first: nn.Module, second: nn.Module) -> Tensor:
        value, gate = first(x).chunk(2, -1)
        return second(value * F.silu(gate))

    column = ColumnParallelLinear(whole, group, blocks=(16, 16))
    assert column.bias.shape == (32 // group.size,)
    return forward(column, RowParallelLinear(down, group)), forward(whole, down)


def packed(group: Group) -> tuple[Tensor, Tensor]:
    """Two sharded outputs, concatenated."""
    whole = linear(8 + 24, 12, 6)
    a, b = torch.randn(3, 8), torch.randn(3, 24)
    row = RowParallelLinear(whole, group, blocks=(8, 24))
    ours = row(torch.cat((mine(a, group), mine(b, group)), -1))
    return ours, whole(torch.cat((a, b), -1))


def packed_as_one(group: Group) -> tuple[Tensor, Tensor]:
    """The mistake that blocks are there for."""
    with patch.object(Shard, "pieces", property(_as_one)):
        return packed(group)


def _as_one(shard: Shard) -> tuple[tuple[int, int], ...]:
    width = sum(shard.blocks) // shard.size
    return ((shard.rank * width, (shard.rank + 1) * width),)


def vocabulary(group: Group) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    whole = nn.Embedding(23, 6).requires_grad_(False)
    table = VocabParallelEmbedding(whole, group)
    with pytest.raises(IndexError, match="vocabulary of 23"):
        table(torch.tensor([23]))
    ids = torch.arange(23).view(1, 23)
    return table(ids), whole(ids)


def columns(group: Group) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    whole = nn.Embedding(9, 8).requires_grad_(False)
    ids = torch.randint(0, 9, (4, 4))
    return ColumnParallelEmbedding(whole, group)(ids), mine(whole(ids), group)


def norm(group: Group, whole: Any, shift: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    for parameter in whole.requires_grad_(False).parameters():
        parameter.copy_(torch.rand_like(parameter) + 0.5)
    whole = whole.to(dtype)
    x = (torch.randn(2, 5, 16) * torch.linspace(0.1, 3, 16) + shift).to(dtype)
    return NormAcrossHeads(whole, group)(mine(x, group)), mine(whole(x), group)


F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "two linears": (lambda g: two_linears(g, F32), LIMIT, {"all_reduce": 1}),
    "a large bias, added once": (lambda g: two_linears(g, F32, 100), LIMIT, {"all_reduce": 1}),
    "two linears in bf16": (lambda g: two_linears(g, BF16), 1e-2, {"all_reduce": 1}),
    "gathered": (gathered, LIMIT, {"all_gather": 1}),
    "gated": (gated, LIMIT, {"all_reduce": 1}),
    "packed": (packed, LIMIT, {"all_reduce": 1}),
    "vocabulary": (vocabulary, 0.0, {"all_reduce": 1}),
    "columns": (columns, 0.0, {}),
    "rms norm": (lambda g: norm(g, nn.RMSNorm(16), 0.3, F32), LIMIT, {"all_reduce": 1}),
    "rms norm without weight": (
        lambda g: norm(g, nn.RMSNorm(16, 1e-5, False), 0.3, F32), LIMIT, {"all_reduce": 1}
    ),
    "layer norm": (lambda g: norm(g, nn.LayerNorm(16), 0.3, F32), LIMIT, {"all_gather": 1}),
    "layer norm with a large mean": (
        lambda g: norm(g, nn.LayerNorm(16), 1e3, F32), 1e-4, {"all_gather": 1}
    ),
    "rms norm in bf16": (lambda g: norm(g, nn.RMSNorm(16), 0.3, BF16), 1e-2, {"all_reduce": 1}),
}  # fmt: skip
# What goes wrong without the mechanism, or with half of it.
SENSITIVE = ["two linears", "gated", "packed", "vocabulary", "rms norm"]


def _measure(_rank: int, size: int) -> dict[str, Any]:
    group = ParallelState.create(ParallelLayout(tp=size), "cpu").tp
    found: dict[str, Any] = {}
    for name, (case, _, _) in CASES.items():
        group.traffic.clear()
        torch.manual_seed(0)
        ours, whole = case(group)
        assert ours.shape == whole.shape
        assert ours.dtype == whole.dtype
        found[name] = (relative(ours, whole), dict(group.traffic))
    for name in SENSITIVE:
        with patch.object(Group, "all_reduce", lambda _, x: x):
            found[f"{name}, not reduced"] = relative(*CASES[name][0](group))
    found["packed as one block"] = relative(*packed_as_one(group))
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def measured(request):
    return run_ranks(request.param, _measure, request.param)


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_the_whole(measured, name):
    _, limit, traffic = CASES[name]
    for rank in measured:
        assert rank[name][0] <= limit
        assert rank[name][1] == traffic


@pytest.mark.parametrize("name", [*(f"{name}, not reduced" for name in SENSITIVE),
                                  "packed as one block"])  # fmt: skip
def test_without_the_mechanism_they_do_not(measured, name):
    assert max(rank[name] for rank in measured) > 1e-2


def test_a_gathered_output_is_one_block():
    with pytest.raises(ValueError, match="one block"):
        ColumnParallelLinear(linear(4, 8, 0), Group("tp", 0, (0, 1)), blocks=(4, 4),
                             gather_output=True)  # fmt: skip


def test_widths_are_the_wholes_and_the_text_says_which_rank():
    row = RowParallelLinear(linear(8, 4, 0), Group("tp", 1, (0, 1)))
    assert (row.in_features, row.out_features, row.weight.shape) == (8, 4, (4, 4))
    assert "in_features=8, out_features=4, bias=True, rank 1 of 2" in repr(row)
