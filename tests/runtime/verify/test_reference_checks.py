"""Which tokens of an answer are compared, where it is given at more than the loop follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.multimodal_gen.runtime.verify.reference_checks import _followed


@pytest.mark.parametrize("place", [slice(0, 5), slice(3, 8)], ids=["first", "last"])
@pytest.mark.parametrize("branch", [1.0, -0.5], ids=["positive", "negative"])
def test_those_at_the_end_that_the_loop_follows(place: slice, branch: float) -> None:
    generator = torch.manual_seed(0)
    answer = torch.randn(1, 8, 4, generator=generator)
    own = answer[:, place]
    guided = own + branch * 0.5 * torch.randn(own.shape, generator=generator)
    steps = [SimpleNamespace(prediction=guided)]
    evidence: Any = SimpleNamespace(reference=SimpleNamespace(steps=steps))
    assert torch.equal(_followed(evidence, 0, answer), own)
    assert torch.equal(_followed(evidence, 0, own), own)


def test_an_answer_without_tokens_is_compared_whole() -> None:
    steps = [SimpleNamespace(prediction=torch.zeros(1, 4, 8, 8))]
    evidence: Any = SimpleNamespace(reference=SimpleNamespace(steps=steps))
    answer = torch.ones(1, 4, 8, 8)
    assert _followed(evidence, 0, answer) is answer
