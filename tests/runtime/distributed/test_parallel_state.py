"""Groups say who works with whom; their verbs move tensors as they say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState

NAMES = ("tp", "ulysses", "ring", "sp", "cfg", "weights", "replica", "control")


def _members(_rank: int, layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    state = ParallelState.create(layout, "cpu")
    found = {name: getattr(state, name).ranks for name in NAMES}
    assert state.spreads == () or state.spreads[0] is state.weights
    return found | {f"spread over {group.name}": group.ranks for group in state.spreads}


def test_groups_follow_the_layout():
    found = run_ranks(4, _members, ParallelLayout(ulysses=2, tp=2))
    assert found[0]["tp"] == (0, 1)
    assert found[3]["tp"] == (2, 3)
    assert found[0]["ulysses"] == found[0]["sp"] == (0, 2)
    assert found[3]["sp"] == (1, 3)
    assert found[2]["ring"] == found[2]["cfg"] == (2,)
    assert all(row["weights"] == row["replica"] == (0, 1, 2, 3) for row in found)
    spreads = {name: ranks for name, ranks in found[1].items() if name.startswith("spread")}
    assert list(spreads.items()) == [
        ("spread over weights", (0, 1, 2, 3)),
        ("spread over tp", (0, 1)),
        ("spread over ulysses", (1, 3)),
    ]


def test_branches_of_guidance_share_no_weights_group():
    found = run_ranks(4, _members, ParallelLayout(cfg=2, ring=2))
    assert found[0]["cfg"] == (0, 2)
    assert found[1]["cfg"] == (1, 3)
    assert found[0]["weights"] == (0, 1)
    assert found[2]["weights"] == (2, 3)
    assert found[0]["replica"] == (0, 1, 2, 3)
    assert [name for name in found[0] if name.startswith("spread")] == ["spread over weights"]


def test_weights_can_be_spread_over_any_choice_of_dimensions(monkeypatch):
    make = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: make(ranks))  # no gloo here
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())  # sends nothing
    try:
        found = _members(5, ParallelLayout(ring=2, ulysses=2, tp=2))
    finally:
        dist.destroy_process_group()
    spreads = {name[12:]: ranks for name, ranks in found.items() if name.startswith("spread")}
    assert spreads == {
        "weights": (0, 1, 2, 3, 4, 5, 6, 7),
        "ulysses x tp": (4, 5, 6, 7),
        "ring x tp": (0, 1, 4, 5),
        "sp": (1, 3, 5, 7),
        "tp": (4, 5),
        "ulysses": (5, 7),
        "ring": (1, 5),
    }
    order = [len(ranks) for ranks in spreads.values()]
    assert order == sorted(order, reverse=True)
    assert list(spreads)[1:3] == ["ring x tp", "ulysses x tp"]


def test_copies_of_the_model_share_nothing():
    found = run_ranks(2, _members, ParallelLayout(dp=2))
    assert [row["replica"] for row in found] == [(0,), (1,)]


def _verbs(rank: int) -> dict[str, object]:
    group = ParallelState.create(ParallelLayout(tp=2), "cpu").tp
    base = torch.arange(24.0).view(2, 4, 3)
    x = base + 100 * rank
    halo = torch.empty(1)
    for job in group.exchange({1 - rank: torch.tensor([float(rank)])}, {1 - rank: halo}):
        job.wait()
    back = group.all_to_all(group.all_to_all(x, scatter=1, gather=0), scatter=0, gather=1)
    return {
        "sum": group.all_reduce(x.clone()),
        "gathered": group.all_gather(x, dim=1),
        "swapped": group.all_to_all(x, scatter=1, gather=2),
        "back": torch.equal(back, x),
        "sent": group.broadcast(x.clone(), source=1),
        "halo": halo.item(),
        "traffic": dict(group.traffic),
    }


def test_verbs():
    first, second = run_ranks(2, _verbs)
    zero = torch.arange(24.0).view(2, 4, 3)
    one = zero + 100
    assert torch.equal(first["sum"], zero + one)
    assert torch.equal(second["sum"], zero + one)
    assert torch.equal(first["gathered"], torch.cat((zero, one), 1))
    assert torch.equal(first["swapped"], torch.cat((zero[:, :2], one[:, :2]), 2))
    assert torch.equal(second["swapped"], torch.cat((zero[:, 2:], one[:, 2:]), 2))
    assert first["back"]
    assert second["back"]
    assert torch.equal(first["sent"], one)
    assert (first["halo"], second["halo"]) == (1.0, 0.0)
    assert first["traffic"] == {
        "exchange": 1, "all_to_all": 3, "all_reduce": 1, "all_gather": 1, "broadcast": 1
    }  # fmt: skip


def test_a_group_of_one_sends_nothing():
    group = Group("tp")
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.all_to_all(x, scatter=0, gather=1) is x
    assert group.broadcast(x) is x
    assert group.exchange({}, {}) == []
    assert not group.traffic


def _wrong_size(_rank: int) -> None:
    ParallelState.create(ParallelLayout(tp=3), "cpu")


def test_a_layout_must_have_as_many_ranks_as_the_run():
    with pytest.raises(AssertionError, match="3 ranks, but 2 were started"):
        run_ranks(2, _wrong_size)
