"""The loop asks the device for no value: a GPU would have to finish before the host goes on."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl

REQUEST = {
    "prompt": "a",
    "negative_prompt": "b",
    "true_cfg_scale": 2.0,
    "seed": 0,
    "height": 32,
    "width": 32,
    "max_sequence_length": 16,
    "num_inference_steps": 4,
}
READS = {f"torch.Tensor.{name}" for name in ("item", "tolist", "cpu", "numpy", "__bool__")}


class _Below(TorchDispatchMode):
    """Sees values read wherever torch itself reads them."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # In inference mode `item` arrives whole.
        if func._overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item):
            self.seen["a scalar"] += 1
        return func(*args, **(kwargs or {}))


class _Above(TorchFunctionMode):
    """Sees what a program asks a tensor for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = resolve_name(func)
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def waits(generator, in_step=lambda x: None):
    """Reads from the first step's end to the last's; ``in_step`` gets each prediction's input."""
    seen, modes, pipeline = Counter(), [], generator.pipeline
    model = generator._worker.model

    def heard(event):
        if event.phase == "denoise" and event.done == 1:
            modes.extend(mode(seen).__enter__() for mode in (_Below, _Above))
        if event.phase == "denoise" and event.done == event.total:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    denoiser = pipeline.get_module("transformer")
    hook = denoiser.register_forward_pre_hook(
        lambda _module, _args, kwargs: in_step(kwargs["hidden_states"]), with_kwargs=True
    )
    params = model.sampling_params(REQUEST)
    (batch,) = model.admit(params, RequestControl(heard))
    pipeline.forward(batch, pipeline.server_args)
    hook.remove()
    assert len(modes) == 2
    return seen


def test_no_value_is_read_in_a_step(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        assert not waits(generator)

        def peek(x: Tensor) -> None:
            assert x.sum().item() < 1e9
            x.cpu()

        seen = waits(generator, peek)
        forwards = 2 * 3  # guided, after the first step
        assert seen["torch.Tensor.item"] == seen["torch.Tensor.cpu"] == forwards
        assert seen["a scalar"] == forwards
