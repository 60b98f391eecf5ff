"""Weights that travel together: one flat stretch of bytes, on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ALIGNMENT = 256
"""Of every weight in the stretch: what the device's libraries want at most, and a multiple of what
torch gives on the CPU, so that kernels choose the same path as for a weight of its own."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight: all its names in the module (several when tied), its shape and dtype."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size without padding."""
        return self.shape.numel() * self.dtype.itemsize


class WeightGroup:
    """Some weights of a module in one stretch of host memory, and how to point the module at them.

    At rest the module's parameters lie in host memory: whoever reads or changes a weight between
    uses (adapters being merged, a checksum) reads and changes the real one. In use they lie in a
    device buffer that was filled with one copy.
    """

    def __init__(self, module: nn.Module, specs: Sequence[WeightSpec]) -> None:
        self.specs = tuple(specs)
        self._places = [_place(module, spec.names) for spec in self.specs]
        self._offsets: list[int] = []
        end = 0
        for spec in self.specs:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            self._offsets.append(start)
            end = start + spec.nbytes
        self.nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.host: Tensor | None = None
        self._said: list[dict[str, object]] = []
        self._at_home: list[nn.Parameter] = []
        self._on_device: dict[int, list[nn.Parameter]] = {}

    def settle(self, host: Tensor) -> Mapping[str, nn.Parameter]:
        """Make parameters without values in ``host`` and put them into the module, for good.

        Returns them by their first names.
        """
        self.host = host
        # What others noted on the parameters (which slice of a weight it is) stays noted.
        self._said = [dict(vars(owners[0][0][owners[0][1]])) for owners in self._places]
        self._at_home = self._parameters(host)
        self._point(self._at_home)
        return dict(zip((spec.names[0] for spec in self.specs), self._at_home, strict=True))

    def enter(self, buffer: Tensor, key: int) -> None:
        """Point the module at a device buffer; ``key`` names the buffer for as long as it lives."""
        if key not in self._on_device:
            self._on_device[key] = self._parameters(buffer)
        self._point(self._on_device[key])

    def leave(self) -> None:
        """Point the module at host memory again."""
        self._point(self._at_home)

    def forget(self) -> None:
        """Let go of all device buffers."""
        self._on_device.clear()

    def _parameters(self, flat: Tensor) -> list[nn.Parameter]:
        # Outside inference mode, or the views would refuse to be changed later.
        with torch.inference_mode(False):
            parameters = [
                nn.Parameter(
                    flat[start : start + spec.nbytes].view(spec.dtype).view(spec.shape),
                    requires_grad=False,
                )
                for spec, start in zip(self.specs, self._offsets, strict=True)
            ]
        for parameter, said in zip(parameters, self._said, strict=True):
            vars(parameter).update(said)
        return parameters

    def _point(self, parameters: Sequence[nn.Parameter]) -> None:
        # Not setattr: its checks and hooks would cost milliseconds a step for FLUX.1's blocks.
        for owners, parameter in zip(self._places, parameters, strict=True):
            for table, leaf in owners:
                table[leaf] = parameter


def _place(
    module: nn.Module, names: Sequence[str]
) -> list[tuple[dict[str, nn.Parameter | None], str]]:
    places = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        places.append((module.get_submodule(path)._parameters, leaf))
    return places
