from __future__ import annotations

import threading

import pytest
import torch

from sglang.multimodal_gen.runtime.managers.storage.blob_folder import BlobFolder
from sglang.multimodal_gen.runtime.managers.storage.checkpoints import CheckpointStore
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.utils.errors import OutputError


def state(step: int) -> LoopState:
    return LoopState(
        step=step,
        seeds=[1],
        timesteps=torch.arange(4.0),
        latents=torch.full((1, 3), float(step)),
        generators=[],
        scheduler_class="S",
        scheduler={},
    )


class SlowFolder(BlobFolder):
    """Writes when told to."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.go = threading.Event()
        self.began = threading.Event()
        self.full = False

    def write(self, name, data):
        self.began.set()
        assert self.go.wait(10)
        if self.full:
            raise OutputError("disk full")
        super().write(name, data)


@pytest.fixture
def folder(tmp_path):
    return SlowFolder(str(tmp_path))


@pytest.fixture
def store(folder):
    store = CheckpointStore(folder)
    yield store
    folder.go.set()
    store.close()
    assert not store._thread.is_alive()


def test_saving_does_not_wait_and_only_the_last_is_written(store, folder):
    store.save("a", 0, state(1))
    assert folder.began.wait(10)
    for step in range(2, 50):
        store.save("a", 0, state(step))  # returns although the disk hangs
    assert store.load("a", 0) is None
    folder.go.set()
    assert store.flush()
    assert store.written == 2  # the first, and the last
    assert store.load("a", 0).step == 49


def test_what_is_dropped_while_it_is_written_does_not_come_back(store, folder):
    store.save("a", 0, state(1))
    assert folder.began.wait(10)
    store.save("a", 1, state(1))
    store.drop("a", range(2))
    folder.go.set()
    assert store.flush()
    assert folder.names() == []


def test_a_full_disk_costs_the_state_alone(store, folder):
    """CB-076"""
    folder.full = True
    folder.go.set()
    store.save("a", 0, state(1))
    assert store.flush()
    assert store.load("a", 0) is None
    folder.full = False
    store.save("a", 0, state(2))
    assert store.flush()
    assert store.load("a", 0).step == 2


DAMAGE = [
    lambda d: d[:-5],
    lambda d: b"",
    lambda d: b"\xff" * 99,
    lambda d: d[:20] + bytes(20) + d[40:],
    lambda d: d[8:],
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_none(store, folder, damage):
    folder.go.set()
    folder.write("a-0.safetensors", damage(state(3).to_bytes()))
    assert store.load("a", 0) is None


def test_states_of_work_that_has_ended_are_removed(store, folder):
    folder.go.set()
    for name in ("a", "b", "c"):
        store.save(name, 0, state(1))
    assert store.flush()
    assert store.remove_orphans(lambda: {"b", "x"}) == 2
    assert folder.names() == ["b-0.safetensors"]
