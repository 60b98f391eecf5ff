"""Products joined into larger calls give what the single linears give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers import products
from sglang.multimodal_gen.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.multimodal_gen.runtime.layers.qk_norm import _joined


class Attention(nn.Module):
    shared_input = (("to_q", "to_k", "to_v"), ("add_q", "add_k"))

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)


def count_products(monkeypatch):
    calls = []
    linear = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, *rest: calls.append(rest[0].shape) or linear(x, *rest)
    )
    return calls


def test_packed_linears_are_one_product(monkeypatch):
    module, x = Attention().requires_grad_(False), torch.randn(2, 3, 8)
    expected = [module.to_q(x), module.to_k(x), module.to_v(x)]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert products.pack_linears(module) == 1
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    calls = count_products(monkeypatch)
    got = products.parallel_linears(x, module.to_q, module.to_k, module.to_v)
    assert calls == [torch.Size([16, 8])]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_no_longer_packed_is_computed_one_by_one(monkeypatch):
    module, x = Attention().requires_grad_(False), torch.randn(2, 3, 8)
    products.pack_linears(module)
    module.to_k.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)
    expected = module.to_k(x)
    calls = count_products(monkeypatch)
    got = products.parallel_linears(x, module.to_q, module.to_k, module.to_v)
    assert len(calls) == 3
    assert torch.equal(got[1], expected)


def test_a_change_of_a_packed_weight_in_place_is_seen():
    module, x = Attention().requires_grad_(False), torch.randn(2, 3, 8)
    products.pack_linears(module)
    module.to_v.weight.add_(1)
    got = products.parallel_linears(x, module.to_q, module.to_k, module.to_v)
    torch.testing.assert_close(got[2], F.linear(x, module.to_v.weight, module.to_v.bias))


def test_a_subclass_is_called_itself(monkeypatch):
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 100

    module, x = Attention().requires_grad_(False), torch.randn(1, 8)
    products.pack_linears(module)
    module.to_q.__class__ = Adapted
    got = products.parallel_linears(x, module.to_q, module.to_k, module.to_v)
    assert (got[0] > 50).all()


def test_concat_and_gelu_are_their_formulas():
    linear, a, b = nn.Linear(12, 5), torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    assert torch.equal(products.concat_linear((a, b), linear), linear(torch.cat((a, b), -1)))
    up = nn.Linear(8, 5)
    assert torch.equal(products.gelu_linear(a, up), F.gelu(up(a), approximate="tanh"))


def group_of_two(rank):
    return Group("tp", rank=rank, ranks=(0, 1))


def dealt(cls, whole, rank, **options):
    with torch.device("meta"):
        linear = cls(whole, group_of_two(rank), **options)
    shard = linear.shard
    linear.weight = nn.Parameter(shard.of(whole.weight).clone(), requires_grad=False)
    bias = shard.of(whole.bias).clone() if cls is ColumnParallelLinear else whole.bias
    linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def test_dealt_linears_are_packed_and_adapted_or_gathered_ones_are_not(monkeypatch):
    module, x = Attention().requires_grad_(False), torch.randn(2, 3, 8)
    for name in ("to_q", "to_k", "to_v"):
        setattr(module, name, dealt(ColumnParallelLinear, getattr(module, name), 1))
    linears = (module.to_q, module.to_k, module.to_v)
    expected = [linear(x) for linear in linears]
    assert products.pack_linears(module) == 1
    calls = count_products(monkeypatch)
    got = products.parallel_linears(x, *linears)
    assert calls == [torch.Size([8, 8])]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    module.to_q.on_product = lambda _x, product: product + 100
    assert (products.parallel_linears(x, *linears)[0] > 50).all()
    module.to_q.on_product, module.to_q.gather_output = None, True
    assert products.pack_linears(module) == 0


def test_a_row_parallel_linears_parts_add_up_to_the_whole_with_one_bias(monkeypatch):
    whole, a, b = nn.Linear(12, 5).requires_grad_(False), torch.randn(3, 8), torch.randn(3, 4)
    monkeypatch.setattr(products, "_mergeable", lambda x: True)
    monkeypatch.setattr(Group, "all_reduce", lambda self, x: x)
    parts = []
    for rank in (0, 1):
        linear = dealt(RowParallelLinear, whole, rank, blocks=(8, 4))
        own = (a[:, 4 * rank :][:, :4], b[:, 2 * rank :][:, :2])
        parts.append(products.concat_linear(own, linear))
    torch.testing.assert_close(parts[0] + parts[1], whole(torch.cat((a, b), -1)))


@torch.inference_mode()
def test_two_streams_of_one_sequence_lie_end_to_end(monkeypatch):
    text, image = Attention().requires_grad_(False), Attention().requires_grad_(False)
    pairs = [(torch.randn(1, length, 8), owner) for length, owner in ((3, text), (5, image))]
    streams = [(x, (owner.to_q, owner.to_k, owner.to_v)) for x, owner in pairs]
    expected = [[linear(x) for linear in linears] for x, linears in streams]
    for owner in (text, image):
        products.pack_linears(owner)
    monkeypatch.setattr(products, "_mergeable", lambda x: True)
    got = products.joint_parallel_linears(*streams)
    for ours, theirs in zip(got, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    values = [result[2].unflatten(-1, (2, -1)) for result in got]
    joined = _joined(values, 8)
    assert joined.data_ptr() == values[0].data_ptr()
    assert torch.equal(joined, torch.cat(values, 1))
    apart = [value.clone() for value in values]
    assert torch.equal(_joined(apart, 8), joined)
    assert torch.equal(_joined([values[1], values[0]], 8), torch.cat(values[::-1], 1))
