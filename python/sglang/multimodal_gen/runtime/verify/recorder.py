"""Watching a pipeline from outside: its denoiser, its scheduler, its decoder.

The same code watches the reference and this runtime: hooks on modules and wrappers on methods, for
as long as a context is open. Copies of all tensors are on the CPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.first_tensor import first_tensor


@dataclass(frozen=True)
class Call:
    """One forward pass of the denoiser: the tensors it was given by parameter name, its result."""

    inputs: Mapping[str, Tensor]
    output: Tensor


@dataclass(frozen=True)
class Attempt:
    """A forward pass as it was asked for, whether or not it then succeeded; nothing is copied."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class SchedulerStep:
    """What the scheduler was told to follow, and the latents it made of that."""

    prediction: Tensor
    latents: Tensor


@dataclass
class Decode:
    """What the decoder was given, and its picture (None if it failed)."""

    latents: Tensor
    picture: Tensor | None = None


@contextmanager
def recorded_calls(
    denoisers: Sequence[nn.Module], inputs: Sequence[str] | None = None
) -> Iterator[list[Call]]:
    """Collect every forward pass of `denoisers`, with the tensors among `inputs` (None: all)."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        names = bound if inputs is None else inputs
        given = {name: bound[name] for name in names if isinstance(bound.get(name), Tensor)}
        calls.append(
            Call({name: _copy(given[name]) for name in given}, _copy(first_tensor(output)))
        )

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in denoisers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_attempts(denoisers: Sequence[nn.Module]) -> Iterator[list[Attempt]]:
    """Collect the arguments of every forward pass before it begins."""
    attempts: list[Attempt] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attempts.append(Attempt(module, args, dict(kwargs)))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in denoisers]
    try:
        yield attempts
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_decodes(vae: Any) -> Iterator[list[Decode]]:
    """Collect the latents of every ``vae.decode`` while the context is open, and the pictures."""
    decodes: list[Decode] = []
    decode = vae.decode

    def watched(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        record = Decode(_copy(z))
        decodes.append(record)
        output = decode(z, *args, **kwargs)
        record.picture = _copy(first_tensor(output))
        return output

    with patch.object(vae, "decode", watched):
        yield decodes


@contextmanager
def recorded_steps(scheduler: type) -> Iterator[list[SchedulerStep]]:
    """Collect every ``step`` of all schedulers of a class: pipelines run on copies of theirs."""
    steps: list[SchedulerStep] = []
    step: Any = vars(scheduler).get("step") or scheduler.step  # type: ignore[attr-defined]

    @functools.wraps(step)
    def watched(self: Any, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = step(self, model_output, *args, **kwargs)
        steps.append(SchedulerStep(_copy(model_output), _copy(first_tensor(result))))
        return result

    with patch.object(scheduler, "step", watched):
        yield steps


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
