"""Sorting forward passes into steps, joining batches, and measures that hide nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.verify.measure import largest_difference, relative_l2
from sglang.multimodal_gen.runtime.verify.recorder import Call, recorded_calls

from parity.compare import compare
from parity.trace import Branch, Step, Trace, joined, steps_of


def _latents(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["x"]


def _call(x: Tensor, text: Tensor, time: Tensor) -> Call:
    return Call({"x": x, "text": text, "time": time}, 2 * x + text)


def _trace(images: int, value: float = 1.0) -> Trace:
    x = torch.full((images, 4), value)
    step = Step(x, (Branch({"x": x}, x + 1),))
    return Trace(x, torch.ones(1), torch.ones(1), (step,), x, x, x)


def test_branches_may_be_calls_or_parts_of_one_batch() -> None:
    x, time = torch.rand(2, 3), torch.tensor(0.5)
    positive, negative = torch.rand(2, 3), torch.rand(2, 3)
    apart = [_call(x, positive, time), _call(x, negative, time)]
    together = [_call(torch.cat((x, x)), torch.cat((positive, negative)), time)]
    for calls in (apart, together):
        (step,) = steps_of(calls, 1, 2, _latents)
        assert torch.equal(step.latents, x)
        assert torch.equal(step.branches[0].inputs["text"], positive)
        assert torch.equal(step.branches[1].prediction, 2 * x + negative)
        assert step.branches[0].inputs["time"].tolist() == [0.5, 0.5]


def test_calls_that_make_no_steps_are_refused() -> None:
    x = torch.rand(1, 3)
    call = _call(x, x, torch.ones(1))
    with pytest.raises(AssertionError, match="never called"):
        steps_of([], 1, 1, _latents)
    with pytest.raises(AssertionError, match="3 forward passes do not make 2"):
        steps_of([call, call, call], 2, 1, _latents)
    with pytest.raises(AssertionError, match="branches of one step differ"):
        steps_of([call, _call(x + 1, x, torch.ones(1))], 1, 1, _latents)


def test_recorder_binds_positions_and_names_and_copies() -> None:
    class Denoiser(nn.Module):
        def forward(self, x: Tensor, time: Tensor, extra: object = None) -> tuple[Tensor]:
            return (x + time,)

    x = torch.zeros(1, 2)
    denoiser = Denoiser()
    with recorded_calls([denoiser], ("x", "time", "absent")) as calls:
        denoiser(x, time=torch.ones(1))
    x += 5  # as a loop that updates its latents in place does
    denoiser(x, torch.ones(1))  # not recorded any more
    assert len(calls) == 1
    assert set(calls[0].inputs) == {"x", "time"}
    assert calls[0].inputs["x"].tolist() == [[0.0, 0.0]]
    assert calls[0].output.tolist() == [[1.0, 1.0]]


def test_batches_are_joined_along_the_images() -> None:
    whole = joined([_trace(2), _trace(1, 3.0)])
    assert whole.noise.shape == (3, 4)
    assert whole.steps[0].branches[0].prediction[:, 0].tolist() == [2.0, 2.0, 4.0]
    with pytest.raises(AssertionError, match="different sigmas"):
        joined([_trace(1), replace(_trace(1), sigmas=torch.zeros(1))])


@pytest.mark.parametrize("measure", [relative_l2, largest_difference])
def test_what_cannot_be_compared_is_infinitely_far(
    measure: Callable[[Tensor, Tensor], float],
) -> None:
    one = torch.ones(2, 2)
    assert measure(one, one) == 0
    assert measure(one, torch.ones(2, 1)) == float("inf")
    assert measure(torch.tensor([[1.0, float("nan")], [1.0, 1.0]]), one) == float("inf")
    assert measure(one, torch.zeros(2, 2)) >= 1


def test_a_missing_input_branch_or_step_is_a_finding() -> None:
    base = _trace(1)
    (step,) = base.steps
    (branch,) = step.branches
    assert not compare(base, base).broken
    fewer_inputs = replace(base, steps=(Step(step.latents, (Branch({}, branch.prediction),)),))
    assert compare(fewer_inputs, base).broken[0].what == "step 0, positive: input x"
    assert compare(base, fewer_inputs).broken[0].what == "step 0, positive: input x"
    guided = replace(base, steps=(Step(step.latents, (branch, branch)),))
    assert compare(base, guided).broken[0].what == "step 0: guidance branches"
    longer = replace(base, steps=(step, step))
    assert compare(base, longer).broken[0].what == "number of steps"
