from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.loader.meta_build import (
    build_on_meta,
    default_dtype,
    parameters_on_meta,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(2, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("computed", torch.arange(3.0), persistent=False)
        self.register_parameter("absent", None)
        self.marked = nn.Parameter(torch.zeros(2))
        self.list = nn.ParameterList([nn.Parameter(torch.zeros(2))])


def test_parameters_have_no_memory_and_buffers_have_values() -> None:
    net = build_on_meta(Net)
    assert all(parameter.is_meta for parameter in net.parameters())
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert net.absent is None
    for name in ("kept", "computed"):
        assert torch.equal(net.get_buffer(name), torch.arange(3.0))


def test_a_tie_stays_a_tie() -> None:
    net = build_on_meta(Net)
    assert net.first.weight is net.second.weight


def test_attributes_of_a_parameter_are_kept() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.zeros(2))
            weight.is_special = True  # pyright: ignore[reportAttributeAccessIssue]
            self.weight = weight

    assert build_on_meta(Marked).weight.is_special  # pyright: ignore[reportAttributeAccessIssue]


def test_large_modules_cost_nothing() -> None:
    layers = build_on_meta(lambda: nn.ModuleList(nn.Linear(10_000, 10_000) for _ in range(100)))
    assert sum(parameter.nbytes for parameter in layers.parameters()) > 40 * 10**9


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def draws() -> nn.Module:
        torch.rand(7)
        return Net()

    build_on_meta(draws)
    assert torch.equal(torch.rand(2), expected)


def test_nothing_lasts_after_the_context_even_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), parameters_on_meta():
        raise ValueError("stop")
    assert not nn.Linear(1, 1).weight.is_meta


def test_another_thread_builds_as_usual() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: built.append(Net()))
        thread.start()
        thread.join()
        assert nn.Linear(1, 1).weight.is_meta
    assert not any(parameter.is_meta for parameter in built[0].parameters())


def test_the_default_dtype_is_set_and_restored() -> None:
    with default_dtype(torch.bfloat16):
        assert torch.ones(1).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="stop"), default_dtype(torch.bfloat16):
        raise ValueError("stop")
    assert torch.ones(1).dtype == torch.float32
