from __future__ import annotations

import threading
import time

import pytest

from sglang.multimodal_gen.runtime.managers.ranks.replicas import Replicas
from sglang.multimodal_gen.runtime.utils.errors import WorkerDied


def nothing() -> None:
    return None


def test_a_copy_is_taken_by_one_at_a_time():
    replicas = Replicas([(0, 1), (2, 3)], nothing)
    assert {replicas.take(0.0), replicas.take(0.0)} == {0, 1}
    assert replicas.take(0.01) is None
    threading.Timer(0.05, replicas.free, (1,)).start()
    assert replicas.take(5.0) == 1


def test_all_copies_are_held_once_the_last_is_free():
    replicas = Replicas([(0,), (1,)], nothing)
    assert replicas.take(0.0) == 0
    threading.Timer(0.1, replicas.free, (0,)).start()
    start = time.monotonic()
    with replicas.all():
        assert time.monotonic() - start >= 0.09
        assert replicas.take(0.0) is None
    assert replicas.take(0.0) == 0


def test_two_that_want_all_do_not_wait_for_each_other():
    replicas = Replicas([(0,), (1,)], nothing)
    done = []

    def hold():
        for _ in range(50):
            with replicas.all():
                done.append(1)

    threads = [threading.Thread(target=hold, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(done) == 150


def test_nobody_waits_for_copies_that_are_gone():
    def gone():
        raise WorkerDied("gone")

    replicas = Replicas([(0,)], gone)
    assert replicas.take(0.0) == 0
    with pytest.raises(WorkerDied), replicas.all():
        pass
