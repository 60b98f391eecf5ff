"""Where a denoising loop stands, as something that can be kept and taken up again."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_FORMAT = "sglang-loop-state-1"
# What parsers make of bytes that are cut off, damaged, or of another kind.
_DAMAGE = (SafetensorError, struct.error, ValueError, KeyError, TypeError, RecursionError)


class NotKeepable(ValueError):
    """A value that neither JSON nor safetensors can carry, or bytes that are no loop state."""


@dataclass(frozen=True, slots=True, eq=False)
class LoopState:
    """A denoising loop after ``step`` steps, for B images; all tensors are on the CPU.

    ``latents`` are packed, [B, ...]; ``generators`` are the states of the images' generators, none
    where the loop draws nothing; ``scheduler`` holds the attributes of the scheduler: JSON's
    values, arrays and tensors. ``timesteps`` and ``seeds`` say which loop it is. ``cache`` is what
    a step cache keeps; all its tensors have images first.
    """

    step: int
    seeds: Sequence[int]
    timesteps: Tensor
    latents: Tensor
    generators: Sequence[Tensor]
    scheduler_class: str
    scheduler: dict[str, Any]
    cache: dict[str, Any] = field(default_factory=dict)

    def rows(self, start: int, stop: int) -> LoopState:
        """The same of some of the images alone."""
        shape = self.latents.shape

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[start:stop].clone() if value.shape == shape else value
            if isinstance(value, dict):
                return {key: cut(item) for key, item in value.items()}
            return [cut(item) for item in value] if isinstance(value, list) else value

        def own(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: own(item) for key, item in value.items()}
            return value[start:stop].clone() if isinstance(value, Tensor) else value

        return dataclasses.replace(
            self,
            seeds=list(self.seeds[start:stop]),
            latents=self.latents[start:stop].clone(),
            generators=list(self.generators[start:stop]),
            scheduler=cut(self.scheduler),
            cache=own(self.cache),
        )

    def to_bytes(self) -> bytes:
        """A safetensors file whose metadata is JSON."""
        tensors = {"timesteps": self.timesteps, "latents": self.latents}
        tensors |= {f"generator.{i}": state for i, state in enumerate(self.generators)}
        about = {
            "step": self.step,
            "seeds": list(self.seeds),
            "generators": len(self.generators),
            "scheduler_class": self.scheduler_class,
            "scheduler": _out(self.scheduler, tensors),
            "cache": _out(self.cache, tensors),
        }
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return save(tensors, {_FORMAT: json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes) -> LoopState:
        """What `to_bytes` wrote.

        Raises:
            NotKeepable: the bytes are cut off, damaged, or something else.
        """
        try:
            (length,) = struct.unpack_from("<Q", data)
            metadata = json.loads(data[8 : 8 + length])["__metadata__"]
            about = json.loads(metadata[_FORMAT])
            tensors = load(data)
            return cls(
                step=about["step"],
                seeds=about["seeds"],
                timesteps=tensors["timesteps"],
                latents=tensors["latents"],
                generators=[tensors[f"generator.{i}"] for i in range(about["generators"])],
                scheduler_class=about["scheduler_class"],
                scheduler=_in(about["scheduler"], tensors),
                cache=_in(about.get("cache", {"dict": {}}), tensors),
            )
        except _DAMAGE as error:
            raise NotKeepable(f"no loop state: {type(error).__name__}: {error}") from error


class CheckpointSink(Protocol):
    """Who keeps the states of a running loop; called from the loop, and must not block."""

    def due(self, step: int, total: int) -> bool:
        """Whether the state after ``step`` of ``total`` steps is wanted."""
        ...

    def save(self, state: LoopState) -> None:
        """Keep a state; it is the sink's own copy."""
        ...

    def resumed(self, step: int) -> None:
        """The loop begins after ``step`` steps that were done before."""
        ...


def kept_copy(value: Any) -> Any:
    """A copy of a scheduler's attribute that JSON and safetensors can carry.

    Raises:
        NotKeepable: it holds something else.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return np.array(value, order="C")
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return value
    if isinstance(value, list | tuple):
        return [kept_copy(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: kept_copy(item) for key, item in value.items()}
    raise NotKeepable(f"a {type(value).__name__} cannot be kept")


def restored(kept: Any, device: torch.device | str) -> Any:
    """A kept value on a device; tensors are copies."""
    if isinstance(kept, Tensor):
        return kept.to(device, copy=True)
    if isinstance(kept, np.ndarray):
        return kept.copy()
    if isinstance(kept, list):
        return [restored(item, device) for item in kept]
    if isinstance(kept, dict):
        return {key: restored(item, device) for key, item in kept.items()}
    return kept


def _out(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, its tensors put aside under names of their own."""
    if isinstance(value, Tensor):
        name = f"scheduler.{len(tensors)}"
        tensors[name] = value.clone()  # one memory may stand behind two attributes
        return {"tensor": name}
    if isinstance(value, np.ndarray | np.number):
        name = f"scheduler.{len(tensors)}"
        tensors[name] = torch.from_numpy(np.array(value, order="C"))
        return {"number" if isinstance(value, np.number) else "numpy": name}
    if isinstance(value, list):
        return {"list": [_out(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _out(item, tensors) for key, item in value.items()}}
    return {"value": value}


def _in(value: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("numpy", "number"):
        array = tensors[inner].numpy()
        return array if kind == "numpy" else array[()]
    if kind == "list":
        return [_in(item, tensors) for item in inner]
    return {k: _in(v, tensors) for k, v in inner.items()} if kind == "dict" else inner
