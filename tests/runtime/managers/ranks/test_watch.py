from __future__ import annotations

import threading

import pytest
import torch

from sglang.multimodal_gen.runtime.distributed import group as group_module
from sglang.multimodal_gen.runtime.managers.ranks.heartbeat import (
    Heartbeat,
    IdleClock,
    waits_for_ranks,
)
from sglang.multimodal_gen.runtime.managers.ranks.messages import Beat
from sglang.multimodal_gen.runtime.managers.ranks.watch import Patience, Watch

BUSY, QUIET, WAITING = "busy", "quiet", "waiting"


def judged(states: list[tuple[str, ...]], ended: tuple[int, ...] = (), start: float = 0.0):
    """The first verdict, and its second, when ranks are in ``states[t]`` at second t."""
    watch = Watch(start)
    idle = [0.0] * len(states[0])
    for second, row in enumerate(states, start=1):
        now = start + second
        working = [rank for rank in range(len(row)) if rank not in ended]
        for rank in working:
            if row[rank] == "mute":
                continue
            idle[rank] = 0.0 if row[rank] == BUSY else idle[rank] + 1
            watch.hear(rank, Beat(1, idle[rank], row[rank] == WAITING, f"stack {rank}"), now)
        verdict = watch.verdict(working, ended, now)
        if verdict is not None:
            return verdict, second, watch
    return None, len(states), watch


def test_work_and_short_waits_are_no_hang():
    assert judged([(BUSY, WAITING)] * 60)[0] is None
    assert judged([(BUSY, BUSY)] * 60)[0] is None
    rows = [(QUIET, WAITING)] * 5 + [(BUSY, BUSY)]
    assert judged(rows * 10)[0] is None


def test_a_wait_for_something_outside_is_no_hang_while_all_do_it():
    assert judged([(QUIET, QUIET)] * 60)[0] is None
    # One is served a little later than the other.
    assert judged([(QUIET, QUIET)] * 30 + [(BUSY, QUIET)] * 3 + [(BUSY, BUSY)] * 10)[0] is None


@pytest.mark.parametrize("others", [BUSY, WAITING])
def test_a_rank_that_does_nothing_while_others_go_on_is_blamed(others):
    verdict, second, watch = judged([(others, QUIET, others)] * 60)
    assert verdict.ranks == (1,)
    assert second <= 9
    assert watch.stacks(verdict.ranks) == {1: "stack 1"}


def test_a_rank_that_does_nothing_when_others_have_finished_is_blamed():
    assert judged([(QUIET, QUIET)] * 60, ended=(0,))[0].ranks == (1,)
    assert judged([(QUIET, WAITING)] * 60, ended=(0,))[0].ranks == (1,)


def test_ranks_that_all_wait_for_each_other_are_stuck():
    verdict, second, _ = judged([(WAITING, WAITING)] * 60)
    assert verdict.ranks == (0, 1)
    assert second <= 6


def test_a_long_wait_whose_other_side_has_just_ended_is_over():
    """The last beat of the one that waited is of before; a wait that goes on is in vain."""
    watch = Watch(0.0)
    for second in range(1, 10):
        watch.hear(0, Beat(1, float(second), True, ""), second)
        watch.hear(1, Beat(1, 0.0, False, ""), second)
        assert watch.verdict([0, 1], [], second) is None
    assert watch.verdict([0], [1], 9.5) is None
    assert watch.verdict([0], [1], 11.0) is None
    assert watch.verdict([0], [1], 12.5).ranks == (0,)


def test_a_rank_without_a_sign_of_life_is_blamed():
    verdict, second, _ = judged([(WAITING, "mute")] * 4 + [(BUSY, "mute")] * 60)
    assert verdict.ranks == (1,)
    assert second == 9
    patient = Watch(0.0, Patience(silent=100.0))
    assert patient.verdict([0], [], 99.0) is None
    assert patient.verdict([0], [], 101.0).ranks == (0,)


def test_the_idle_clock_counts_spans_without_work():
    wall = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    used = iter([0.0, 0.001, 0.002, 0.5, 0.5])
    clock = IdleClock(lambda: next(wall), lambda: next(used))
    assert [clock.seconds() for _ in range(4)] == [1.0, 2.0, 0.0, 1.0]


def test_a_wait_for_ranks_is_known_by_its_stack(monkeypatch):
    frames = {}

    class Handle:
        def __call__(self, *_, **__):
            import sys

            frames["here"] = sys._getframe()

    handle = Handle()
    handle()
    assert not waits_for_ranks(frames["here"])
    assert not waits_for_ranks(None)
    monkeypatch.setattr(group_module.dist, "all_reduce", handle)
    group_module.Group("tp", 0, (0, 1)).all_reduce(torch.ones(1))
    assert waits_for_ranks(frames["here"])


def test_a_heart_beats_only_while_an_order_runs(monkeypatch):
    monkeypatch.setattr("sglang.multimodal_gen.runtime.managers.ranks.heartbeat.BEAT_SECONDS", 0.02)
    beats = []
    arrived = threading.Event()

    def send(beat):
        beats.append(beat)
        if len(beats) >= 3:
            arrived.set()
        if beat.order == 2:
            raise BrokenPipeError  # the front is gone: the thread ends

    heart = Heartbeat(send)
    assert not beats
    with heart.during(1):
        assert arrived.wait(5)
    with heart.during(2):
        deadline = threading.Event()
        while not any(beat.order == 2 for beat in beats):
            deadline.wait(0.01)
    assert {beat.order for beat in beats} == {1, 2}
