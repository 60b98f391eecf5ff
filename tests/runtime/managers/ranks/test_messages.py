from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

from rank_stubs import script, script_model
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel, channel_pair
from sglang.multimodal_gen.runtime.managers.ranks.meeting import trusted_packages
from sglang.multimodal_gen.runtime.managers.ranks.messages import End, SentError
from sglang.multimodal_gen.runtime.managers.ranks.orders import OrderUnderWay
from sglang.multimodal_gen.runtime.managers.ranks.pixels import packed, sendable, unpacked
from sglang.multimodal_gen.runtime.managers.ranks.watch import Watch
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.utils.errors import (
    CallbackFailed,
    Cancelled,
    DiffusionError,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    WorkerDied,
)


@pytest.fixture
def line():
    packages = trusted_packages(script_model())
    ours, other = channel_pair(packages)
    theirs = Channel(other, packages)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_pixels_travel_raw_and_arrive_as_they_were(line):
    ours, theirs = line
    pixels = torch.rand(2, 3, 5, 7)[:, :, ::2]  # not contiguous
    output = OutputBatch("id", pixels, ["a", "b"], [1, 2], {"x": 0.5}, 10.0, ["careful"])
    ours.send(End(3, packed(output)))
    end = theirs.receive()
    assert isinstance(end.value.output, np.ndarray)
    arrived = unpacked(end.value, [10.0, 30.0])
    assert torch.equal(arrived.output, pixels)
    arrived.output.add_(1)
    assert arrived.peak_memory_mb == 30.0
    assert (arrived.prompt, arrived.seeds, arrived.timings) == (["a", "b"], [1, 2], {"x": 0.5})


def test_a_request_travels_without_its_callers_end(line):
    ours, theirs = line
    batch = script(script_model(), "a fox")[0]
    ours.send(sendable(batch))
    arrived = theirs.receive()
    assert arrived.control is None
    assert batch.control is not None
    assert (arrived.prompt, arrived.seeds, arrived.height) == (["a fox"], [1], 16)
    assert arrived.request == batch.request
    with pytest.raises(AttributeError, match="before any stage wrote it"):
        _ = arrived.latents


def test_the_end_of_a_line_is_noticed(line):
    ours, theirs = line
    theirs.close()
    with pytest.raises((EOFError, OSError)):
        ours.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send("hello")
    ours.close()
    with pytest.raises(OSError, match="closed"):
        ours.send("hello")


def sent(error: Exception, line) -> DiffusionError:
    ours, theirs = line
    with pytest.raises(type(error)) as caught:
        raise error
    ours.send(SentError.of(caught.value))
    return theirs.receive().rebuilt(rank=3)


def test_errors_arrive_as_they_were_raised(line):
    refused = sent(InvalidRequest("height", 17, "must be even"), line)
    assert type(refused) is InvalidRequest
    assert (refused.field, refused.value) == ("height", 17)
    assert str(refused) == "height=17: must be even"
    assert str(refused.__cause__).startswith("on rank 3:\nTraceback")
    assert "must be even" in str(refused.__cause__)
    assert type(sent(OutOfMemory("full"), line)) is OutOfMemory


class Odd(InternalError):
    def __init__(self, a, b, c):
        super().__init__(f"{a}{b}{c}")
        self.lock = threading.Lock()


def test_errors_that_do_not_travel_arrive_with_their_words(line):
    bug = sent(KeyError("x"), line)
    assert type(bug) is InternalError
    assert str(bug) == "KeyError: 'x'"
    odd = sent(Odd(1, 2, 3), line)
    assert str(odd) == "123"
    assert not hasattr(odd, "lock")
    cause = sent(CallbackFailed(ValueError("boom")), line)
    assert str(cause) == "the progress callback raised ValueError('boom')"

    class Local(InternalError):
        pass

    assert str(sent(Local("here"), line)) == "Local: here"


def order(*ends: End) -> OrderUnderWay:
    made = OrderUnderWay(1, "request x", tuple(range(len(ends))), queue.Queue(), Watch(0.0))
    for rank, end in enumerate(ends):
        assert made.end(rank, end) == (rank == len(ends) - 1)
    return made


REFUSED = SentError.of(InvalidRequest("a", 1, "no"))
CANCELLED = SentError.of(Cancelled("stopped"))


def test_what_the_ends_of_an_order_mean_together():
    fine = order(End(1, "a", reports=4), End(1, 2.0, reports=4))
    assert not fine.is_split
    assert fine.values() == {0: "a", 1: 2.0}
    agreed = order(End(1, error=REFUSED, reports=4), End(1, error=REFUSED, reports=4))
    assert not agreed.is_split
    with pytest.raises(InvalidRequest):
        agreed.values()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (End(1, error=REFUSED, reports=4), End(1, "ok", reports=4)),
        (End(1, error=REFUSED, reports=4), End(1, error=CANCELLED, reports=4)),
        (End(1, error=REFUSED, reports=4), End(1, error=REFUSED, reports=5)),
        (End(1, "ok", reports=4), End(1, "ok", reports=5)),
    ],
)
def test_ranks_that_ended_at_different_places_cannot_go_on(one, other):
    split = order(one, other)
    assert split.is_split
    assert isinstance(split.split(), WorkerDied)
    assert "All ranks were ended" in str(split.split())
