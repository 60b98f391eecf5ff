from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.schedulers import scheduling_unipc_multistep as diffusers_unipc
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.schedulers.unipc import UniPCMultistepScheduler

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SHAPE = (2, 4, 3, 5)


def _walk(scheduler: Any, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Samples after each step, from a model that bends the path."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator).to(dtype)
    pull = torch.randn(SHAPE, generator=generator).to(dtype)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    samples = []
    for t in scheduler.timesteps:
        output = torch.sin(x * 3) * pull + x * (t / 1000).to(dtype)
        x = scheduler.step(output, t, x, return_dict=False)[0]
        samples.append(x)
    return samples


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # the reference's, and NumPy 2
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver", ["bh1", "bh2"])
@pytest.mark.parametrize(
    "settings", [FLOW, {"prediction_type": "epsilon"}, {"predict_x0": False}], ids=str
)
def test_every_step_is_the_references(order: int, solver: str, settings: dict[str, Any]) -> None:
    config = {"solver_order": order, "solver_type": solver, **settings}
    expected = _walk(diffusers_unipc.UniPCMultistepScheduler(**config), 8)
    found = _walk(UniPCMultistepScheduler(**config), 8)
    other = _walk(UniPCMultistepScheduler(**config | {"solver_order": order % 3 + 1}), 8)
    assert all(sample.isfinite().all() for sample in expected[:-1])
    if not expected[-1].isfinite().all():  # the reference multiplies nothing by infinity there
        expected.pop()
        if settings.get("predict_x0", True):
            assert found[-1].isfinite().all()
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (other[-2] - expected[-2]).norm() > 1e-3 * expected[-2].norm()


def test_half_precision_stays_half_precision() -> None:
    expected = _walk(diffusers_unipc.UniPCMultistepScheduler(**FLOW), 6, torch.bfloat16)
    found = _walk(UniPCMultistepScheduler(**FLOW), 6, torch.bfloat16)
    assert all(sample.dtype == torch.bfloat16 for sample in found)
    assert (found[-1] - expected[-1]).norm() <= 2e-2 * expected[-1].norm()


class Crossings(TorchDispatchMode):
    """Counts copies from one device to another; a GPU's would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            self.count += source.device != result.device
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].device.type != "cpu"
        return result


def _crossings(scheduler: Any) -> int:
    scheduler.set_timesteps(6)
    scheduler.set_begin_index(0)
    x = torch.empty(SHAPE, device="meta")
    with Crossings() as crossings:
        for t in scheduler.timesteps:
            x = scheduler.step(torch.empty_like(x), t, x, return_dict=False)[0]
    return crossings.count


def test_a_step_copies_nothing_between_devices() -> None:
    assert _crossings(diffusers_unipc.UniPCMultistepScheduler(**FLOW, solver_order=2)) > 6
    assert _crossings(UniPCMultistepScheduler(**FLOW, solver_order=2)) == 0


def test_checkpoints_that_name_the_scheduler_get_this_one() -> None:
    assert ModelRegistry.resolve_model_cls("UniPCMultistepScheduler")[0] is UniPCMultistepScheduler
