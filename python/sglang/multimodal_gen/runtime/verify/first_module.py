"""Which submodule of two denoisers is the first to say something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.verify.evidence import Cause, Evidence, Failure
from sglang.multimodal_gen.runtime.verify.measure import FORWARD_LIMIT, relative_l2
from sglang.multimodal_gen.runtime.verify.recorder import Attempt


def first_differing_module(evidence: Evidence) -> Cause | None:
    """The first of the modules that both have under one name, in the port's running order.

    Ports keep the names of the checkpoint, so most are comparable; those whose outputs have another
    shape, or that run more than once, are passed over.
    """
    ours = _outputs(evidence.port.attempts, 0)
    theirs = _outputs(evidence.reference.attempts, evidence.reference.order[0])
    agreeing = None
    for name, value in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != value.shape:
            continue
        error = relative_l2(value, other)
        if error > FORWARD_LIMIT:
            before = f", after {agreeing}, which agrees" if agreeing else ""
            because = f"the first module whose output differs is {name} ({error:.0e}){before}"
            return Cause(Failure.NETWORK, because)
        agreeing = name
    return None


def _outputs(attempts: list[Attempt], index: int) -> dict[str, Tensor]:
    """Name -> output, in running order, of the leaves of one forward."""
    if not attempts:
        return {}
    attempt = attempts[min(index, len(attempts) - 1)]
    with torch.inference_mode(), _recorded_leaves(attempt.module) as outputs:
        try:
            attempt.module(*attempt.args, **attempt.kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return outputs
    return outputs


@contextmanager
def _recorded_leaves(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def noting(name: str):  # noqa: ANN202
        def note(_module: nn.Module, _args: object, output: object) -> None:
            if isinstance(output, Tensor) and name not in outputs:
                outputs[name] = output.detach().to("cpu", copy=True)

        return note

    handles = [
        child.register_forward_hook(noting(name))
        for name, child in module.named_modules()
        if name and not list(child.children())
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
