"""Blocks stream through the ring: the same numbers, no block too early, no memory beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.multimodal_gen.runtime.memory.block_stream import StreamCounters
from sglang.multimodal_gen.runtime.memory.layerwise import streamed_blocks
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane

from .lanes import LateLane
from .toy import Toy, block_bytes, layerwise

CPU = torch.device("cpu")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()


def blocks_of(model: Toy) -> list[Any]:
    return list(streamed_blocks(model).values())


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("lane_type", [CopyLane, LateLane])
def test_a_streamed_model_computes_the_same_to_the_bit(slots, lane_type):
    component = layerwise(lane_type(CPU), slots)
    with torch.inference_mode():
        want = Toy()(X)
        assert not torch.equal(want, Toy()(X + 1)), "the input must matter"
        for _ in range(2):
            component.begin_use()
            assert all(torch.equal(component.module(X), want) for _ in range(3))
            component.end_use()


@pytest.mark.parametrize(("slots", "streamed_each_pass"), [(1, 5), (2, 5), (4, 5)])
def test_a_pass_moves_every_block_once_and_finds_it_on_its_way(slots, streamed_each_pass):
    component = layerwise(CopyLane(CPU), slots)
    sizes = [block_bytes(block) for block in blocks_of(Toy())]
    assert len(set(sizes)) == 5, "blocks of one size would prove less"
    component.begin_use()
    for _ in range(3):
        component.module(X)
    counters = component.stream_counters
    assert counters.misses == 0
    assert counters.hits == 3 * streamed_each_pass
    # Three passes, and the blocks that the ring fetched for a fourth.
    assert counters.bytes == 3 * sum(sizes) + sum(sizes[:slots])


def test_a_ring_that_holds_all_blocks_is_filled_once():
    component = layerwise(CopyLane(CPU), slots=9)
    component.begin_use()
    for _ in range(3):
        component.module(X)
    sizes = [block_bytes(block) for block in blocks_of(Toy())]
    assert component.stream_counters == StreamCounters(hits=15, misses=0, bytes=sum(sizes))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_device_memory_is_the_ring_and_what_is_outside_blocks(slots):
    lane = CopyLane(CPU)
    component = layerwise(lane, slots)
    assert lane.held == 0, "loading takes nothing of the device"
    ring = slots * max(block_bytes(block) for block in blocks_of(Toy()))
    component.begin_use()
    component.module(X)
    assert component.rest is not None
    assert lane.peak == lane.held == ring + component.rest.nbytes == component.device_bytes
    component.end_use()
    assert lane.held == 0


def test_between_uses_the_weights_are_in_host_memory():
    component = layerwise(CopyLane(CPU))
    home = {name: p.data_ptr() for name, p in component.module.named_parameters()}
    start = component.host.data.data_ptr()
    assert all(start <= address < start + component.host.nbytes for address in home.values())
    component.begin_use()
    inside = component.module.inward.weight.data_ptr()
    assert not start <= inside < start + component.host.nbytes
    component.module(X)
    component.end_use()
    assert {name: p.data_ptr() for name, p in component.module.named_parameters()} == home
    assert component.module.outward.weight is component.module.inward.weight, "still tied"


def test_leading_blocks_may_stay():
    lane = LateLane(CPU)
    component = layerwise(lane, resident_layers=2)
    start, stop = component.host.data.data_ptr(), 0
    stop = start + component.host.nbytes
    for index, block in enumerate(blocks_of(component.module)):
        assert (start <= block.up.weight.data_ptr() < stop) is (index >= 2)
    component.begin_use()
    assert torch.equal(component.module(X), Toy()(X))
    assert component.stream_counters.hits == 3


def test_the_stream_learns_the_order_in_which_blocks_run():
    """A VAE's decoder never runs the encoder's blocks: after one pass it is all hits."""
    component = layerwise(LateLane(CPU), slots=2)
    want = Toy().second.blocks(X)
    component.begin_use()
    assert torch.equal(component.module.second.blocks(X), want)
    first = component.stream_counters.misses
    assert first == 1
    for _ in range(3):
        assert torch.equal(component.module.second.blocks(X), want)
    assert component.stream_counters.misses == first + 1, "once more, where the round closes"
    component.end_use()
    component.begin_use()
    assert torch.equal(component.module.second.blocks(X), want)
    assert component.stream_counters.misses == first + 1


def test_a_block_that_fails_leaves_nothing_behind():
    lane = LateLane(CPU)
    component = layerwise(lane)
    failing = component.module.second.blocks[1]

    def fail(*_):
        raise RuntimeError("boom")

    hook = failing.up.register_forward_pre_hook(fail)
    component.begin_use()
    with pytest.raises(RuntimeError, match="boom"):
        component.module(X)
    component.end_use()
    hook.remove()
    assert lane.held == 0
    component.begin_use()
    assert torch.equal(component.module(X), Toy()(X))


def test_after_a_failed_block_the_same_use_goes_on():
    component = layerwise(LateLane(CPU), slots=1)
    hook = component.module.first[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    component.begin_use()
    with pytest.raises(ZeroDivisionError):
        component.module(X)
    hook.remove()
    assert torch.equal(component.module(X), Toy()(X))


def test_a_change_of_a_weight_at_rest_is_seen():
    """Adapters are merged into the host's copy: the next use has them."""
    component = layerwise(LateLane(CPU))
    plain = Toy()
    component.begin_use()
    component.module(X)
    component.end_use()
    with torch.no_grad():
        for model in (component.module, plain):
            model.second.blocks[1].up.weight.mul_(0.5)
    component.begin_use()
    assert torch.equal(component.module(X), plain(X))
    assert not torch.equal(plain(X), Toy()(X))
