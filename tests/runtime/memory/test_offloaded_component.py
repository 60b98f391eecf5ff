from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.memory.host_home import HostHome
from sglang.multimodal_gen.runtime.memory.plan import Placement, Residency
from sglang.multimodal_gen.runtime.memory.weight_group import WeightSpec
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from .lanes import LateLane
from .toy import Toy, layerwise, whole

CPU = torch.device("cpu")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()


def test_a_whole_component_computes_the_same_to_the_bit_again_and_again():
    component = whole(LateLane(CPU))
    for use in range(1, 4):
        component.begin_use()
        assert torch.equal(component.module(X), Toy()(X))
        component.end_use()
        assert component.counters.uses == use
        assert component.counters.bytes == use * component.host.nbytes
    assert component.is_home


def test_a_prefetched_component_is_copied_once_and_home_after_it():
    lane = LateLane(CPU)
    component = whole(lane)
    component.prefetch()
    component.prefetch()
    assert lane.held == component.device_bytes
    component.begin_use()
    component.begin_use()
    assert torch.equal(component.module(X), Toy()(X))
    assert (component.counters.uses, component.counters.prefetched) == (1, 1)
    assert lane.bytes_copied == component.host.nbytes
    component.end_use()
    component.end_use()
    assert lane.held == 0


def test_one_that_was_prefetched_in_vain_leaves_nothing():
    lane = LateLane(CPU)
    component = layerwise(lane)
    component.prefetch()
    component.end_use()
    assert (lane.held, component.counters.uses) == (0, 0)
    assert not lane.pending, "its memory must not be written to later"


class FullLane(LateLane):
    """A device with room for ``pieces`` allocations, and events that must not be None."""

    def __init__(self, pieces):
        super().__init__(CPU)
        self.pieces = pieces

    def allocate(self, nbytes):
        if self.pieces == 0:
            raise torch.OutOfMemoryError("no room")
        self.pieces -= 1
        return super().allocate(nbytes)


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_without_room_it_says_so_and_nothing_stays(pieces):
    lane = FullLane(pieces)
    component = layerwise(lane)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        component.begin_use()
    component.end_use()
    assert (lane.held, component.is_home) == (0, True)
    assert not lane.pending
    lane.pieces = 100
    component.begin_use()
    assert torch.equal(component.module(X), Toy()(X))
    component.end_use()
    assert lane.held == 0


def test_state_is_read_and_loaded_at_rest():
    component = whole(CopyLane(CPU))
    other = Toy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    component.module.load_state_dict(other.state_dict())
    component.begin_use()
    assert torch.equal(component.module(X), other(X))


def test_a_weight_that_is_not_as_laid_out_is_refused():
    model = nn.Linear(2, 3).requires_grad_(False)
    home = HostHome("net", Placement(Residency.COMPONENT), CopyLane(CPU), pin=False)
    home.prepare(model, [WeightSpec(("weight",), torch.Size((3, 2)), torch.float32)])
    with pytest.raises(PipelineDefinitionError, match=r"net: 'weight' was laid out as \(3, 2\)"):
        home.take(("weight",), [torch.ones(3, 1)], 0, torch.float32)
    assert home.take(("weight",), [torch.ones(3, 1), torch.zeros(3, 1)], 1, torch.float32)
    assert torch.equal(model.weight, torch.tensor([[1.0, 0.0]] * 3))
    assert not home.take(("buffer",), [torch.ones(1)], 0, torch.float32)


def test_what_was_noted_on_a_parameter_stays():
    model = nn.Linear(2, 3).requires_grad_(False)
    model.weight.note = "slice 1 of 2"
    component = HostHome("net", Placement(Residency.COMPONENT), CopyLane(CPU), pin=False).adopt(
        model
    )
    component.begin_use()
    assert model.weight.note == "slice 1 of 2"
    component.end_use()
    assert model.weight.note == "slice 1 of 2"
