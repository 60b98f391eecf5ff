"""The table, met with a model: what is put where, and what is refused. No rank is needed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.multimodal_gen.runtime.layers.norm_across_heads import NormAcrossHeads
from sglang.multimodal_gen.runtime.layers.parallel_embedding import (
    ColumnParallelEmbedding,
    VocabParallelEmbedding,
)
from sglang.multimodal_gen.runtime.layers.shard import Shard, shard_of
from sglang.multimodal_gen.runtime.layers.tensor_parallel import (
    Column,
    Divided,
    NormAcross,
    PlannedModel,
    Row,
    Vocab,
    plan_of,
)
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

SECOND = Group("tp", 1, (0, 1))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.norm_q = nn.RMSNorm(dim)
        self.norm_2d = nn.LayerNorm((2, dim))
        self.mlp = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(5 * dim, dim)
        self.bias = nn.Embedding(8, heads)


class Net(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        dim = 4 * heads
        self.heads = heads
        self.embed = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Attention(dim, heads) for _ in range(2))
        self.head = nn.Linear(dim, 11, bias=False)


PLAN: dict[str, Any] = {
    "embed": Vocab(),
    "blocks.*.to_[qkv]": Column(heads="heads"),
    "blocks.*.norm_q": NormAcross(heads="heads"),
    "blocks.*.mlp": Column(),
    "blocks.*.out": Row(blocks=("to_v", "mlp")),
    "blocks.*.bias": Column(heads="heads"),
    "blocks.*": Divided("n_heads"),
}
# The last pattern crosses dots, so it would match all of them.
PLAN["blocks.[01]"] = PLAN.pop("blocks.*")


def test_a_table_puts_parallel_modules_in_place():
    net = Net()
    whole = {name: value.clone() for name, value in net.state_dict().items()}
    PlannedModel(net, PLAN).apply(SECOND)
    block = net.blocks[1]
    assert type(net.embed) is VocabParallelEmbedding
    assert type(block.to_q) is ColumnParallelLinear
    assert type(block.mlp) is ColumnParallelLinear
    assert type(block.out) is RowParallelLinear
    assert type(block.norm_q) is NormAcrossHeads
    assert type(block.bias) is ColumnParallelEmbedding
    assert type(net.head) is nn.Linear
    assert block.n_heads == 2
    assert list(net.state_dict()) == list(whole)
    packed = shard_of(block.out.weight)
    assert packed == Shard(1, (16, 64), 1, 2)
    for name, parameter in net.named_parameters():
        shard = shard_of(parameter)
        assert torch.equal(parameter, whole[name] if shard is None else shard.of(whole[name]))
    whole_ones = {name for name, p in net.named_parameters() if shard_of(p) is None}
    assert whole_ones == {"head.weight", *(f"blocks.{i}.{n}" for i in (0, 1) for n in (
        "norm_2d.weight", "norm_2d.bias", "out.bias"))}  # fmt: skip


def test_one_rank_replaces_nothing():
    net = Net()
    before = dict(net.named_modules())
    PlannedModel(net, PLAN).apply(Group("tp"))
    assert all(before[name] is module for name, module in net.named_modules())
    assert net.blocks[0].n_heads == 4


def test_heads_are_told_by_name():
    planned = PlannedModel(Net(heads=6), PLAN)
    assert planned.misfit(3) == ""
    assert planned.misfit(4) == "heads=6 of Net"
    with pytest.raises(ValueError, match="heads=6 of Net does not divide over 4 ranks"):
        planned.apply(Group("tp", 0, (0, 1, 2, 3)))


def test_widths_are_told_by_place():
    assert PlannedModel(Net(), {"head": Column()}).misfit(2) == "11 outputs of head"
    assert PlannedModel(Net(), {"head": Row()}).misfit(3) == "16 inputs of head"
    packed = {"blocks.*.out": Row(blocks=("to_v", "mlp"))}
    assert PlannedModel(Net(1), packed).misfit(8) == "4 inputs of blocks.0.out"
    assert PlannedModel(Net(), {"blocks.1": Divided("n_heads")}).misfit(3) == (
        "n_heads=4 of blocks.1"
    )
    assert PlannedModel(Net(), {"*.norm_q": NormAcross()}).misfit(3) == (
        "16 channels of blocks.0.norm_q"
    )


def test_heads_may_stand_in_the_config():
    net = Net()
    net.config = type("Config", (), {"num_heads": 5})()
    assert PlannedModel(net, {"*.to_q": Column(heads="num_heads")}).misfit(2) == (
        "num_heads=5 of Net"
    )


def test_relative_blocks_make_up_a_width():
    net = Net()
    PlannedModel(net, {"*.mlp": Column(blocks=(1, 1, 2))}).apply(SECOND)
    assert shard_of(net.blocks[0].mlp.bias) == Shard(0, (16, 16, 32), 1, 2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"blocks.*.to_w": Column()}, r"'blocks\.\*\.to_w' matches no module"),
        ({"*.to_q": Column(), "*.to_[qk]": Row()}, r"'\*\.to_\[qk\]' and '\*\.to_q' match .*to_q"),
        ({"embed": Row()}, r"'embed' matches embed, a Embedding: not for Row"),
        ({"head": Vocab()}, r"a Linear: not for Vocab"),
        ({"embed": Column(gather_output=True)}, r"a Embedding: not for Column"),
        ({"*.norm_2d": NormAcross()}, r"a LayerNorm: not for NormAcross"),
        ({"*.to_q": Divided("n_heads")}, r"a Linear: not for Divided\('n_heads',\)"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_the_porters_fault(plan, said):
    with pytest.raises(PipelineDefinitionError, match=f"TP_PLAN of Net: .*{said}"):
        PlannedModel(Net(), plan)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Row(blocks=("to_v", "missing")), "blocks.0.out has a block 'missing'"),
        (Row(blocks=("to_v", "norm_q")), "'norm_q', which is no linear beside it"),
        (Row(blocks=("to_v", "to_k")), r"width of 80, which .*\(16 \+ 16\) do not make up"),
        (Row(blocks=(3, 4)), r"width of 80, which .*\(3 \+ 4\) do not make up"),
        (Column(heads="n_heads"), "counts 'n_heads', which is no whole number of the model"),
    ],
)
def test_a_row_that_cannot_be_counted_is_the_porters_fault(entry, said):
    with pytest.raises(PipelineDefinitionError, match=said):
        PlannedModel(Net(), {"blocks.*.out": entry}).misfit(2)


def test_packed_and_gathered_exclude_each_other():
    with pytest.raises(PipelineDefinitionError, match="leave out blocks"):
        Column(blocks=(1, 1), gather_output=True)


def test_a_subclass_has_a_forward_of_its_own():
    class Scaled(nn.Linear):
        pass

    net = Net()
    net.head = Scaled(16, 11)
    with pytest.raises(PipelineDefinitionError, match="a Scaled: not for Column"):
        PlannedModel(net, {"head": Column()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.again.weight = self.embed.weight


def test_ties_stay_ties():
    net = Tied()
    PlannedModel(net, {"embed": Vocab(), "again": Vocab()}).apply(SECOND)
    assert net.again.weight is net.embed.weight
    assert net.embed.weight.shape == (3, 4)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"embed": Vocab()}, "cuts embed, but not again, its tie"),
        ({"embed": Vocab(), "again": Column()}, "ties weight to a tensor that is cut otherwise"),
    ],
)
def test_a_tie_that_is_cut_once_is_the_porters_fault(plan, said):
    with pytest.raises(PipelineDefinitionError, match=said):
        PlannedModel(Tied(), plan).apply(SECOND)


def test_a_table_is_the_classs_or_its_files(monkeypatch):
    assert plan_of(Net) is None
    module = ModuleType("a_model")
    module.TP_PLAN = PLAN
    monkeypatch.setitem(sys.modules, "a_model", module)
    filed = type("Filed", (nn.Module,), {"__module__": "a_model"})
    assert plan_of(filed) is PLAN
    assert plan_of(type("Heir", (filed,), {"__module__": __name__})) is PLAN
    own: dict[str, Any] = {}
    assert plan_of(type("Own", (filed,), {"__module__": __name__, "TP_PLAN": own})) is own


def test_a_files_table_holds_for_the_first_class_that_it_offers(monkeypatch):
    module = ModuleType("a_model")
    module.TP_PLAN = PLAN
    monkeypatch.setitem(sys.modules, "a_model", module)

    def filed(name, *bases, **attributes):
        return type(name, bases or (nn.Module,), {"__module__": "a_model", **attributes})

    model, auxiliary = filed("Model"), filed("Auxiliary")
    heir, own = filed("Heir", model), filed("Own", TP_PLAN={})
    module.Model = model
    for entry in (model, [model, auxiliary, heir, own], (model,)):
        module.EntryClass = entry
        assert plan_of(model) is PLAN
        assert plan_of(auxiliary) is None
        assert plan_of(heir) is PLAN
        assert plan_of(own) == {}
