import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.lora.adapted_module import AdaptedModule
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, PlannedModel, Row


def factors(seed, rank=3, alpha=None, width=8, rows=6):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, width, generator=generator)
    return LowRank(down, torch.randn(rows, rank, generator=generator), alpha)


def made(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(8, 6), "k": nn.Linear(8, 6)}).to(dtype)
    return model.requires_grad_(False)


def dense(term):
    return term.weight * term.factors.scaling * term.factors.up @ term.factors.down


TERMS = [Term(factors(1, alpha=6.0), 0.7), Term(factors(2, rank=2), -0.5)]


@pytest.mark.parametrize("way", ["run_live", "merge"])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8)])
def test_the_sum_of_terms_is_added(way, shape):
    model = made()
    x = torch.randn(shape)
    base = model["q"](x)
    expected = base + x @ sum(dense(term) for term in TERMS).T
    adapted = AdaptedModule(model)
    getattr(adapted, way)({"q": TERMS})
    assert (base - expected).abs().max() > 1
    torch.testing.assert_close(model["q"](x), expected)
    torch.testing.assert_close(model["q"](input=x), expected)
    adapted.clear()
    assert torch.equal(model["q"](x), base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_hundred_cycles_leave_the_base_bit_for_bit(dtype):
    model = made(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storage = model["q"].weight.data_ptr()
    adapted = AdaptedModule(model)
    for cycle in range(100):
        adapted.merge({"q": [Term(factors(cycle), 1.0)], "k": TERMS})
        assert not torch.equal(model["q"].weight, before["q.weight"])
        if cycle % 3:
            adapted.run_live({"k": TERMS})
        adapted.clear()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert model["q"].weight.data_ptr() == storage
    assert not model["q"]._forward_hooks


def test_merging_rounds_once_from_float32():
    model = made(torch.bfloat16)
    base = model["q"].weight.clone()
    AdaptedModule(model).merge({"q": TERMS})
    expected = base.float() + sum(dense(term) for term in TERMS)
    assert torch.equal(model["q"].weight, expected.bfloat16())


def test_live_terms_leave_the_weight_alone():
    model = made()
    base = model["q"].weight.clone()
    adapted = AdaptedModule(model)
    adapted.run_live({"q": TERMS})
    assert torch.equal(model["q"].weight, base)
    assert list(model.state_dict()) == ["q.weight", "q.bias", "k.weight", "k.bias"]


def test_what_rounding_takes_is_measured():
    model = made(torch.bfloat16)
    adapted = AdaptedModule(model)
    assert adapted.merge({"q": [Term(factors(1), 1.0)]}) < 0.05
    assert adapted.merge({"q": [Term(factors(1), 1e-5)]}) > 0.5


def test_a_failure_in_the_middle_leaves_the_base():
    model = made()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = AdaptedModule(model)
    for act in (adapted.merge, adapted.run_live):
        with pytest.raises(RuntimeError):
            act({"q": TERMS, "k": [Term(factors(1), 1.0), Term(factors(1, width=9), 1.0)]})
        assert all(torch.equal(model.state_dict()[name], base[name]) for name in base)
        assert not model["q"]._forward_hooks


def test_the_relative_change_is_that_of_the_dense_change_on_the_base():
    model = made()
    adapted = AdaptedModule(model)
    layers = {"q": factors(1, alpha=6.0), "k": factors(2)}
    change = sum(dense(Term(part, 1.0)).square().sum() for part in layers.values())
    base = sum(model[name].weight.square().sum() for name in layers)
    expected = (change / base).sqrt().item()
    assert adapted.relative_change(layers) == pytest.approx(expected, rel=1e-4)
    adapted.merge({"q": TERMS})
    assert adapted.relative_change(layers) == pytest.approx(expected, rel=1e-4)


CUTS = {"q": Column(), "k": Column(gather_output=True), "o": Row(blocks=(1, 3))}


def whole_and_parts(dtype=torch.float32):
    """A model, and its slices on two ranks."""
    models = []
    for rank in (None, 0, 1):
        torch.manual_seed(0)
        linears = {"q": nn.Linear(8, 6), "k": nn.Linear(8, 6), "o": nn.Linear(8, 6)}
        model = nn.ModuleDict(linears).to(dtype).requires_grad_(False)
        if rank is not None:
            PlannedModel(model, CUTS).apply(Group("tp", rank, (0, 1)))
        models.append(model)
    return models


@pytest.mark.parametrize("name", list(CUTS))
def test_a_slice_is_merged_as_the_whole_is(name, monkeypatch):
    monkeypatch.setattr(Group, "all_reduce", lambda _, x: x)
    whole, *parts = whole_and_parts()
    before = whole[name].weight.clone()
    AdaptedModule(whole).merge({name: TERMS})
    for part in parts:
        linear, base = part[name], part[name].weight.clone()
        adapted = AdaptedModule(part)
        adapted.merge({name: TERMS})
        assert not torch.equal(linear.weight, base)
        torch.testing.assert_close(linear.weight, linear.shard.of(whole[name].weight))
        adapted.clear()
        assert torch.equal(linear.weight, linear.shard.of(before))
        assert linear.on_product is None


def test_a_row_adds_its_part_before_the_sum(monkeypatch):
    whole, *parts = whole_and_parts()
    x = torch.randn(5, 8)
    AdaptedModule(whole).run_live({"o": TERMS})
    products = []
    monkeypatch.setattr(Group, "all_reduce", lambda _, y: products.append(y.clone()) or y)
    for part in parts:
        AdaptedModule(part).run_live({"o": TERMS})
        part["o"](x[:, columns(part["o"])])
    torch.testing.assert_close(sum(products) + whole["o"].bias, whole["o"](x))
    assert len(products) == 2


def columns(linear):
    return torch.cat([torch.arange(start, stop) for start, stop in linear.shard.pieces])


def test_figures_are_those_of_all_ranks(monkeypatch):
    """Two ranks, one after the other: each sum that they would send is kept and added."""
    whole, *parts = whole_and_parts(torch.bfloat16)
    terms = dict.fromkeys(CUTS, TERMS)
    layers = dict.fromkeys(CUTS, TERMS[0].factors)
    sums = []
    monkeypatch.setattr(Group, "all_reduce", lambda _, x: sums.append(x.clone()) or x)
    for part in parts:
        adapted = AdaptedModule(part)
        adapted.relative_change(layers)
        adapted.merge(terms)
    totals = {0: sums[0] + sums[2], 1: sums[1] + sums[3]}
    calls = iter((0, 1))
    monkeypatch.setattr(Group, "all_reduce", lambda _, x: totals[next(calls)])
    adapted = AdaptedModule(whole)
    ours = AdaptedModule(whole_and_parts(torch.bfloat16)[1])
    assert ours.relative_change(layers) == pytest.approx(adapted.relative_change(layers), rel=1e-6)
    assert ours.merge(terms) == pytest.approx(adapted.merge(terms), rel=1e-4)
    assert adapted.merge(terms) > 0
