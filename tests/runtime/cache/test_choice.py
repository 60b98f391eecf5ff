"""When a denoiser's work is recorded, and what is said."""

from __future__ import annotations

import pytest
from torch import nn

from sglang.multimodal_gen.runtime.cache.choice import HEADROOM, ON, wants_graphs
from sglang.multimodal_gen.runtime.layers.attention.backends.flex import FlexAttention
from sglang.multimodal_gen.runtime.memory.plan import Placement, Residency, ResidencyPlan
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

ROOM = MemoryFacts(0, 10 * HEADROOM, 0)
STREAMED = ResidencyPlan({"transformer": Placement(Residency.LAYERWISE)})
SHARDED = ResidencyPlan(sharded=frozenset({"transformer"}))


class Safe(nn.Module):
    graph_safe = True


def choose(wish=None, denoiser=None, plan=None, memory=ROOM, **more):
    denoiser, plan = denoiser or Safe(), plan or ResidencyPlan()
    return wants_graphs(wish, denoiser, "transformer", plan, memory, **{"device": "cuda", **more})


def test_left_open_it_is_on_where_it_can_be():
    assert choose() == (True, ON)
    assert choose(False) == (False, None)
    assert choose(device="cpu") == (False, None)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"denoiser": nn.Linear(1, 1)}, "graph_safe"),
        ({"plan": STREAMED}, "layerwise-offload"),
        ({"plan": SHARDED}, "spread over ranks"),
        ({"check_stages": True}, "check_stages"),
        ({"attention": FlexAttention()}, "attention_backend=flex goes by the values of masks"),
        ({"memory": MemoryFacts(0, HEADROOM - 1, 0)}, "8 GiB"),
    ],
)
def test_left_open_it_says_why_it_is_off(facts, words):
    wanted, note = choose(**facts)
    assert not wanted
    assert words in note


def test_a_wish_is_met_or_refused():
    assert choose(True, denoiser=nn.Linear(1, 1)) == (True, None)
    for facts, words in (({"plan": STREAMED}, "move"), ({"device": "cpu"}, "CUDA GPU")):
        with pytest.raises(InvalidArgument, match=words):
            choose(True, **facts)
