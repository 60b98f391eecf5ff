"""A server's start: what is asked meanwhile is answered at once."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.managers.stubs import StubRunner
from sglang.multimodal_gen.runtime.managers import lifecycle
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.utils.errors import Unavailable


@pytest.fixture
def slow_keeper(monkeypatch):
    """Takes up interrupted jobs until it is let go."""
    entered, go = threading.Event(), threading.Event()

    class Keeper:
        def __init__(self, service: Any) -> None:
            self.closed = False

        def start(self) -> None:
            entered.set()
            assert go.wait(10)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(lifecycle, "JobKeeper", Keeper)
    yield entered, go
    go.set()


def opened() -> Lifecycle:
    service = SimpleNamespace(
        scheduler=Scheduler(StubRunner()), served_name="tiny", observe=lambda observer: None,
        keeping=SimpleNamespace(close=lambda seconds: True),
    )  # fmt: skip
    return Lifecycle(lambda progress: cast(Any, service))


def test_who_asks_while_interrupted_jobs_are_taken_up_is_told_so_at_once(slow_keeper):
    """Their inputs may come from afar; the event loop asks for the service meanwhile."""
    entered, go = slow_keeper
    life = opened()
    life.start()
    assert entered.wait(5)
    answers = []

    def ask():
        with pytest.raises(Unavailable, match="loading"):
            _ = life.service
        answers.append(life.phase)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2)
    assert answers == ["loading"]
    go.set()
    deadline = time.monotonic() + 5
    while life.phase == "loading":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert life.service.served_name == "tiny"
    assert life.finish(2.0)


def test_a_stop_while_interrupted_jobs_are_taken_up_is_heeded(slow_keeper):
    entered, go = slow_keeper
    life = opened()
    life.start()
    assert entered.wait(5)
    stopping = threading.Thread(target=life.stop_taking, daemon=True)
    stopping.start()
    stopping.join(2)
    assert not stopping.is_alive()
    go.set()
    assert life.finish(2.0)
    assert life.phase == "stopped"
