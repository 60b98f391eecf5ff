"""Products joined into larger calls give what the single linears give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang.multimodal_gen.runtime.layers import products


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
