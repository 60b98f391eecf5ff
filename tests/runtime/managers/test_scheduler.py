"""The scheduler without a model and without HTTP: a clock that is moved, a runner that is told."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from runtime.managers.stubs import Clock, Heard, StubRunner, parts
from sglang.multimodal_gen.runtime.managers.cost_model import CostModel, work_units
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, SchedulingLimits
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    OutOfMemory,
    QueueFull,
    Unavailable,
    WorkerDied,
)


class Bench:
    """A scheduler on a bench: submit by letter, then run."""

    def __init__(self, runner=None, rate=0.0, **limits) -> None:
        self.clock = Clock()
        self.runner = StubRunner() if runner is None else runner
        self.runner.clock = self.clock
        costs = CostModel(rate)
        if rate:
            costs.learn = lambda *_: None
        self.scheduler = Scheduler(
            self.runner, SchedulingLimits(**limits), costs=costs, clock=self.clock
        )
        self.heard: dict[str, Heard] = {}

    def submit(self, name, *, priority=0, timeout=None, **values) -> Heard:
        self.heard[name] = heard = Heard()
        admitted = parts(prompt=name, **values)
        self.scheduler.submit(name, admitted, heard, priority=priority, timeout=timeout)
        return heard

    def run(self) -> list[list[str]]:
        """Run until nothing is left; the prompts of each batch."""
        before = len(self.runner.batches)
        while self.scheduler.run_next():
            pass
        return [batch.prompt for batch in self.runner.batches[before:]]


def test_a_request_is_told_of_start_progress_images_and_end():
    bench = Bench()
    heard = bench.submit("a", seed=[3, 7, 8], num_outputs_per_prompt=3, size=2)
    bench.run()
    assert heard.events == ["started", "made", "made", "ended"]
    assert heard.error is None
    assert heard.seeds == [3, 7, 8]
    assert heard.fractions == sorted(heard.fractions)
    assert 0 < heard.fractions[0] < 0.2
    assert 0.9 < heard.fractions[-1] <= 1


def test_compatible_requests_run_together_and_get_their_own_images_back():
    bench = Bench()
    for name, seed in zip("abc", (10, 20, 30), strict=True):
        bench.submit(name, seed=seed)
    other = bench.submit("x", seed=40, num_inference_steps=2)
    assert bench.run() == [["a", "b", "c"], ["x"]]
    assert [bench.heard[name].seeds for name in "abc"] == [[10], [20], [30]]
    assert other.seeds == [40]


def test_a_batch_is_never_larger_than_allowed_and_images_keep_their_order():
    bench = Bench(max_batch=4)
    bench.submit("a", num_outputs_per_prompt=3, seed=1)
    bench.submit("b", num_outputs_per_prompt=2, seed=11)
    bench.submit("c", seed=21)
    assert bench.run() == [["a", "a", "a", "c"], ["b", "b"]]
    assert bench.heard["a"].seeds == [1, 2, 3]


def test_a_pipeline_may_refuse_to_share():
    bench = Bench(together=False)
    bench.submit("a")
    bench.submit("b")
    assert bench.run() == [["a"], ["b"]]


def test_a_batch_with_room_waits_for_company_as_long_as_told():
    bench = Bench(batching_delay=0.5)
    bench.submit("a")
    assert not bench.scheduler.run_next()
    bench.clock.now += 0.3
    bench.submit("b")
    assert not bench.scheduler.run_next()
    bench.clock.now += 0.2
    assert bench.run() == [["a", "b"]]
    bench.submit("c", num_outputs_per_prompt=4)
    assert bench.run() == [["c"] * 4]  # full: nothing to wait for


def test_a_full_queue_refuses_and_says_when_to_come_again():
    bench = Bench(max_waiting=2, rate=1e-4)
    work = work_units(parts()[0]) * 1e-4
    bench.submit("a")
    bench.submit("b")
    with pytest.raises(QueueFull) as caught:
        bench.submit("c")
    assert caught.value.retry_after == pytest.approx(2 * work)
    bench.run()
    bench.submit("c")


# Who is next (the rule at the top of waiting_line).

LARGE = {"num_inference_steps": 200}
SMALL = {"num_inference_steps": 2}


def rated() -> Bench:
    """A bench on which a small request takes 1 s and a large one 100 s."""
    rate = 1 / work_units(parts(**SMALL)[0])
    bench = Bench(rate=rate)
    bench.runner.seconds = bench.scheduler.costs.seconds
    return bench


def test_small_work_is_served_before_large_that_came_a_little_earlier():
    """CB-081: long jobs must not block short ones."""
    bench = rated()
    bench.submit("L", **LARGE)
    for index in range(5):
        bench.clock.now += 1
        bench.submit(f"s{index}", **SMALL)
    assert [batch[0] for batch in bench.run()] == ["s0", "s4", "L"]  # four smalls share a batch
    waits = {name: heard.events for name, heard in bench.heard.items()}
    assert all(events[-1] == "ended" for events in waits.values())


def test_large_work_is_not_starved_by_small_work_that_keeps_coming():
    bench = rated()
    bench.submit("L", **LARGE)
    served = []
    for index in range(400):
        # Each small one differs, so that none shares a batch: an overloaded server.
        bench.submit(f"s{index}", num_inference_steps=2, guidance_scale=1 + index / 1000)
        bench.scheduler.run_next()
        served.append(bench.runner.batches[-1].prompt[0])
        if served[-1] == "L":
            break
    assert served[-1] == "L"
    assert 90 <= len(served) <= 101  # what came more than L's own 100 s later stands behind it


def test_requests_of_many_batches_let_others_in_between():
    bench = rated()
    bench.submit("L", num_outputs_per_prompt=12, size=4, **SMALL)
    bench.clock.now += 0.5
    bench.submit("s", guidance_scale=2.0, **SMALL)
    assert [batch[0] for batch in bench.run()] == ["s", "L", "L", "L"]


def test_equal_work_is_served_in_order_of_arrival():
    bench = rated()
    for name in "abc":
        bench.submit(name, guidance_scale=1.0 + ord(name), **SMALL)
    assert bench.run() == [["a"], ["b"], ["c"]]


def test_priority_is_a_head_start_and_not_a_right_for_ever():
    bench = rated()
    bench.submit("a", guidance_scale=2.0, **SMALL)
    bench.clock.now += 5
    bench.submit("urgent", priority=1, guidance_scale=3.0, **SMALL)
    assert bench.run() == [["urgent"], ["a"]]
    bench.submit("a", guidance_scale=2.0, **SMALL)
    bench.clock.now += 11
    bench.submit("urgent", priority=1, guidance_scale=3.0, **SMALL)
    assert bench.run() == [["a"], ["urgent"]]


def test_costs_are_learned_from_what_ran():
    bench = Bench()
    bench.runner.seconds = lambda batch: 8.0
    assert bench.scheduler.costs.seconds(parts()[0]) == 0
    bench.submit("a")
    bench.run()
    assert bench.scheduler.costs.seconds(parts()[0]) == pytest.approx(8.0)
    assert bench.scheduler.costs.seconds(parts(num_inference_steps=8)[0]) == pytest.approx(16.0)


# Stopping one request.


def test_a_waiting_request_is_cancelled_at_once_and_the_running_one_is_whole():
    """CB-068: cancelling what waits must not end what runs."""
    bench = Bench()
    a = bench.submit("a", num_inference_steps=50, seed=5)
    b = bench.submit("b")
    bench.runner.on_step = lambda batch, step: step == 10 and bench.scheduler.cancel("b")
    assert bench.run() == [["a"]]
    assert a.error is None
    assert a.seeds == [5]
    assert isinstance(b.error, Cancelled)
    assert b.events == ["ended"]
    assert not bench.scheduler.cancel("b")


def test_a_running_request_stops_within_a_step():
    """CB-030, CB-069: who is gone costs at most one more step."""
    bench = Bench()
    a = bench.submit("a", num_inference_steps=50)
    bench.runner.on_step = lambda batch, step: step == 2 and bench.scheduler.cancel("a")
    bench.run()
    assert isinstance(a.error, Cancelled)
    assert bench.runner.steps == 3  # the third step was at work when it was cancelled
    assert a.events == ["started", "ended"]


def test_a_member_of_a_shared_batch_leaves_alone():
    bench = Bench()
    a, b = bench.submit("a", seed=5), bench.submit("b", seed=6)
    bench.runner.on_step = lambda batch, step: step == 1 and bench.scheduler.cancel("a")
    assert bench.run() == [["a", "b"]]
    assert isinstance(a.error, Cancelled)
    assert a.seeds == []
    assert (b.error, b.seeds) == (None, [6])


def test_a_shared_batch_that_everybody_left_stops():
    bench = Bench()
    bench.submit("a", num_inference_steps=50)
    bench.submit("b", num_inference_steps=50)
    bench.runner.on_step = lambda batch, step: (
        step == 3 and [bench.scheduler.cancel(name) for name in "ab"]
    )
    bench.run()
    assert bench.runner.steps == 4


def test_a_deadline_ends_waiting_and_running_work():
    bench = Bench()
    bench.runner.seconds = lambda batch: 10.0
    a = bench.submit("a", num_inference_steps=10, timeout=3.5)
    b = bench.submit("b", num_inference_steps=9, timeout=2.0)
    c = bench.submit("c", num_inference_steps=8, timeout=1000.0)
    bench.run()
    assert isinstance(a.error, DeadlineExceeded)
    assert "while it ran" in str(a.error)
    assert isinstance(b.error, DeadlineExceeded)
    assert "before it began" in str(b.error)
    assert c.error is None
    assert [batch.prompt for batch in bench.runner.batches] == [["a"], ["c"]]
    assert bench.runner.steps == 4 + 8


# Failing alone.


def test_a_failing_batch_is_run_again_one_by_one():
    """CB-072, and item 5: one bad request never harms its neighbours."""
    bench = Bench()
    a, bad, c = (bench.submit(name) for name in ("a", "bad", "c"))
    bench.runner.fail = lambda b: InternalError("boom") if "bad" in b.prompt else None
    assert bench.run() == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]
    assert (a.error, c.error) == (None, None)
    assert str(bad.error) == "boom"
    assert a.events == ["started", "made", "ended"]  # once each


def test_what_does_not_fit_together_may_fit_alone():
    bench = Bench()
    heard = [bench.submit(name) for name in "abc"]
    bench.runner.fail = lambda b: OutOfMemory("too much") if b.batch_size > 1 else None
    bench.run()
    assert [h.error for h in heard] == [None] * 3


def test_a_request_that_fails_alone_is_not_tried_again():
    bench = Bench()
    a = bench.submit("a")
    bench.runner.fail = lambda b: ValueError("a bug with /a/path")
    assert bench.run() == [["a"]]
    assert isinstance(a.error, InternalError)
    b = bench.submit("b")
    bench.runner.fail = lambda b: None
    bench.run()
    assert b.error is None


def test_a_later_part_is_not_run_when_an_earlier_failed():
    bench = Bench()
    a = bench.submit("a", num_outputs_per_prompt=8, size=4)
    bench.runner.fail = lambda b: InternalError("boom")
    assert bench.run() == [["a"] * 4]
    assert a.events == ["started", "ended"]


@dataclass
class Mortal(StubRunner):
    """Dies of a prompt, and can be brought back."""

    restarts: int = 0
    comes_back: bool = True

    def restart(self) -> None:
        self.restarts += 1
        if not self.comes_back:
            raise InternalError("no memory")


def test_a_dead_worker_is_brought_back_and_only_its_killer_fails():
    bench = Bench(Mortal())
    bench.runner.fail = lambda b: WorkerDied("killed") if "poison" in b.prompt else None
    a, poison, later = (bench.submit(n, num_inference_steps=s)
                        for n, s in (("a", 4), ("poison", 4), ("later", 9)))  # fmt: skip
    assert bench.run() == [["a", "poison"], ["a"], ["poison"], ["later"]]
    assert (a.error, later.error) == (None, None)
    assert isinstance(poison.error, WorkerDied)
    assert bench.runner.restarts == 2
    assert bench.scheduler.status.problem is None


@pytest.mark.parametrize("runner", [StubRunner(), Mortal(comes_back=False)])
def test_a_worker_that_stays_dead_is_said_and_nobody_waits_for_it(runner):
    bench = Bench(runner)
    bench.runner.fail = lambda b: WorkerDied("killed")
    a, b = bench.submit("a"), bench.submit("b", num_inference_steps=9)
    bench.run()
    assert isinstance(a.error, WorkerDied)
    assert isinstance(b.error, Unavailable)
    assert "killed" in bench.scheduler.status.problem
    with pytest.raises(Unavailable, match="killed"):
        bench.submit("c")


# Previews, calls between batches, numbers, the end.


def test_previews_go_to_the_one_whose_image_it_is():
    bench = Bench()
    a = bench.submit("a", seed=5, num_outputs_per_prompt=2)
    b = bench.submit("b", seed=9, previews=1)
    bench.run()
    assert bench.runner.sizes == [3]
    assert a.previews == []
    assert {p.image for p in b.previews} == {0}
    assert {int(p.pixels[0, 0, 0]) for p in b.previews} == {9}


def test_calls_are_answered_between_batches():
    bench = Bench()
    bench.submit("a")
    order = []
    bench.runner.on_step = lambda batch, step: order.append("batch")
    good = bench.scheduler.call(lambda: order.append("call") or 7)
    bad = bench.scheduler.call(lambda: 1 / 0)
    bench.run()
    assert good.result(0) == 7
    assert isinstance(bad.exception(0), ZeroDivisionError)
    assert order[:2] == ["call", "batch"]


def test_what_waits_and_what_runs_is_counted_right():
    """CB-082: waiting requests are counted."""
    bench = Bench(together=False)
    for index in range(10):
        bench.submit(f"r{index}")
    assert (bench.scheduler.status.waiting, bench.scheduler.status.running) == (10, 0)
    seen = []
    bench.runner.on_step = lambda batch, step: seen.append(bench.scheduler.status)
    bench.scheduler.run_next()
    assert {(s.waiting, s.running) for s in seen} == {(9, 1)}
    bench.run()
    assert (bench.scheduler.status.waiting, bench.scheduler.status.running) == (0, 0)
    assert bench.scheduler.status.batches == 10


def test_stopping_hands_back_what_has_not_begun_and_finishes_what_has():
    bench = Bench(together=False)
    a, b = bench.submit("a"), bench.submit("b")

    def stop(batch, step):
        bench.scheduler.close("stopping")
        bench.scheduler.hand_back()

    bench.runner.on_step = stop
    bench.run()
    assert a.error is None
    assert isinstance(b.error, Unavailable)
    assert bench.scheduler.wait_until_idle(0)
    with pytest.raises(Unavailable, match="stopping"):
        bench.submit("c")


def test_many_threads_may_submit_and_cancel_while_it_runs():
    """CB-032: 200 fast jobs all come to an end."""
    bench = Bench(max_waiting=1000)
    stop = threading.Event()

    def work():
        while not stop.is_set() or not bench.scheduler.idle:
            if not bench.scheduler.run_next():
                bench.scheduler.wait_for_work(0.01)

    worker = threading.Thread(target=work)
    worker.start()

    def client(number: int) -> None:
        for index in range(25):
            name = f"{number}-{index}"
            bench.submit(name, num_inference_steps=1)
            if index % 5 == 0:
                bench.scheduler.cancel(name)

    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(10)
    assert bench.scheduler.wait_until_idle(10)
    stop.set()
    worker.join(10)
    assert len(bench.heard) == 200
    for heard in bench.heard.values():
        assert heard.events.count("ended") == 1
        assert heard.error is None or isinstance(heard.error, Cancelled)
    assert bench.runner.batches
    assert max(bench.runner.sizes) <= 4


def test_a_watcher_that_fails_ends_its_own_request_and_no_other():
    """The thread that runs batches must outlive it: without that nothing runs any more."""
    bench = Bench(max_batch=2)
    bad, good = bench.submit("a", seed=1), bench.submit("b", seed=2)

    def made(output):
        raise MemoryError("no room for the pixels")

    bad.made = made
    assert bench.scheduler.run_next()
    assert isinstance(bad.error, InternalError)
    assert (good.events[-2:], good.error) == (["made", "ended"], None)
    later = bench.submit("c")
    assert bench.scheduler.run_next()
    assert later.error is None
