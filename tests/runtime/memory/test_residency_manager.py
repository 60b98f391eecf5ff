"""Components come before their stage and go after it, whatever happens."""

from __future__ import annotations

import pytest
import torch

from sglang.multimodal_gen.runtime.memory.residency_manager import ResidencyManager
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane

from .toy import layerwise, whole

USES = {"check": (), "encode": ("text",), "noise": (), "denoise": ("dit",), "decode": ("vae",)}


@pytest.fixture
def components():
    lane = CopyLane(torch.device("cpu"))
    return {"text": whole(lane), "dit": layerwise(lane), "vae": whole(lane)}


def run(manager, fail_in=None):
    seen = {}
    with manager.request():
        for name in USES:
            with manager.stage(name):
                parts = manager.components.items()
                seen[name] = (
                    [n for n, part in parts if part.in_use],
                    [n for n, part in parts if not part.is_home],
                )
                if name == fail_in:
                    raise RuntimeError("boom")
    return seen


def test_without_room_only_what_runs_is_on_the_device(components):
    seen = run(ResidencyManager(components, USES))
    assert seen == {
        "check": ([], []),
        "encode": (["text"], ["text"]),
        "noise": ([], []),
        "denoise": (["dit"], ["dit"]),
        "decode": (["vae"], ["vae"]),
    }
    lane = components["text"].lane
    assert lane.peak == max(part.device_bytes for part in components.values())
    assert lane.held == 0


def test_with_room_the_next_ones_come_meanwhile(components):
    seen = run(ResidencyManager(components, USES, overlap=True))
    assert seen == {
        "check": ([], ["text"]),
        "encode": (["text"], ["text", "dit"]),
        "noise": ([], ["dit"]),
        "denoise": (["dit"], ["dit", "vae"]),
        "decode": (["vae"], ["vae"]),
    }
    assert all(part.counters.prefetched == 1 for part in components.values())
    assert components["text"].lane.held == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", list(USES))
def test_after_a_failure_everything_is_at_home(components, overlap, stage):
    manager = ResidencyManager(components, USES, overlap=overlap)
    with pytest.raises(RuntimeError, match="boom"):
        run(manager, fail_in=stage)
    assert all(part.is_home and not part.in_use for part in components.values())
    assert components["text"].lane.held == 0
    before = components["text"].lane.bytes_copied
    run(manager)
    first = components["text"].lane.bytes_copied - before
    run(manager)
    assert components["text"].lane.bytes_copied - before == 2 * first


@pytest.mark.parametrize("overlap", [False, True])
def test_a_component_of_two_stages_in_a_row_stays_between_them(components, overlap):
    uses = {"encode": ("vae",), "decode": ("vae",), "again": ("vae", "text")}
    manager = ResidencyManager(components, uses, overlap=overlap)
    with manager.request():
        for stage in uses:
            with manager.stage(stage):
                assert components["vae"].in_use
    assert components["vae"].counters.uses == 1


def test_resident_components_need_no_care():
    manager = ResidencyManager({}, USES)
    assert run(manager) == {name: ([], []) for name in USES}


def test_a_caller_outside_stages_asks_for_what_it_needs(components):
    manager = ResidencyManager(components, USES)
    with manager.use("dit", "scheduler"):
        assert components["dit"].in_use
    assert components["dit"].is_home
