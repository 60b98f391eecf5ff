"""All ranks of a replica stop at one place, or none does."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.managers.ranks.agreement import Agreement, SharedControl
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, InternalError


def _steps(rank: int, wish_at: dict[int, int]) -> tuple[int | None, int, int]:
    """The step at which this rank stopped, its reports, and messages sent through the group."""
    control_group = ParallelState.create(ParallelLayout(tp=2), "cpu").control
    control = SharedControl(agreement=Agreement(control_group))
    for step in range(10):
        if step == wish_at.get(rank):
            control.cancelled.set()
        try:
            control.report("denoise", step, 10, "denoising")
        except Cancelled:
            return step, control.agreement.reports, control_group.traffic["broadcast_later"]
    return None, control.agreement.reports, control_group.traffic["broadcast_later"]


def test_the_leads_wish_stops_all_at_the_next_step():
    assert run_ranks(2, _steps, {0: 4}) == [(5, 6, 5), (5, 6, 5)]


def test_only_the_leads_wish_counts_and_without_one_nobody_stops():
    assert run_ranks(2, _steps, {1: 4}) == [(None, 10, 10), (None, 10, 10)]


def _uneven(rank: int) -> str:
    control = ParallelState.create(ParallelLayout(tp=2), "cpu").control
    agreement = Agreement(control)
    if rank == 0:
        agreement.stop(False, "decode", 0, 1)
    try:
        for step in range(3):
            agreement.stop(False, "denoise", step, 3)
    except InternalError as error:
        return str(error)
    except RuntimeError:
        return "the other rank is gone"
    return ""


def test_a_stage_that_reports_on_one_rank_only_is_told():
    _, message = run_ranks(2, _uneven)
    assert message.startswith("rank 1 reported denoise 0 of 3 while its lead reported decode 0")


def test_a_rank_alone_stops_at_once_and_sends_nothing():
    agreement = Agreement(Group("control"))
    control = SharedControl(agreement=agreement)
    control.report("denoise", 0, 2, "denoising")
    control.cancelled.set()
    with pytest.raises(Cancelled, match="denoising, 1 of 2"):
        control.report("denoise", 1, 2, "denoising")
    assert not agreement.group.traffic


def test_progress_is_heard_from_the_lead():
    events = []
    control = SharedControl(events.append)
    control.report("decode", 1, 2, "decoding")
    assert [(e.phase, e.done, e.total, e.label) for e in events] == [("decode", 1, 2, "decoding")]


def test_a_broadcast_for_later_needs_more_than_one_rank():
    assert Group("tp").broadcast_later(torch.ones(1)) is None
