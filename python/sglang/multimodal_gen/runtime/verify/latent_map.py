"""The affine map between the loop's last latents and what the decoder is given."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.verify.evidence import Evidence
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord

EXACT = 1e-4
"""Residual, relative to the spread, up to which the map counts as found."""

NO_SHIFT = 1e-6
"""A measured shift below this is the rounding of none; latents are of order one."""


@dataclass(frozen=True)
class LatentMap:
    """``decoder's latents = latents / scale + shift``; float64 [1], or [C] by channel."""

    scale: Tensor
    shift: Tensor

    def error(self, expected: LatentMap, spread: float) -> float:
        """The larger of the relative error of the scale and that of the shift in spreads."""
        scale = ((self.scale - expected.scale) / expected.scale).abs().max().item()
        shift = ((self.shift - expected.shift) / spread).abs().max().item()
        return max(scale, shift)

    def __str__(self) -> str:
        if len(self.scale) > 1:
            return f"latents / scale + shift with {len(self.scale)} scales and shifts by channel"
        shift = self.shift.item()
        if abs(shift) < NO_SHIFT:
            return f"latents / {self.scale.item():.6g}"
        return f"latents / {self.scale.item():.6g} {'-' if shift < 0 else '+'} {abs(shift):.6g}"


def measured_map(record: RunRecord, evidence: Evidence) -> LatentMap | None:
    """The map that a run really applied; None if what the decoder got is no such map.

    A scale and a shift for all channels are found whatever the order of the elements, packed or
    not: sorted values stay sorted. By channel, the port's own unpacking is needed.
    """
    if not record.steps or record.latents is None:
        return None
    before, after = record.steps[-1].latents, record.latents
    if before.numel() != after.numel():
        return None
    whole = _fitted(before.flatten().sort().values[None], after.flatten().sort().values[None])
    if whole is not None:
        return whole
    grid = before if before.shape == after.shape else unpacked(before, evidence)
    if grid is None or grid.shape != after.shape or grid.ndim < 3:
        return None
    return _fitted(grid.transpose(0, 1).flatten(1), after.transpose(0, 1).flatten(1))


def declared_map(evidence: Evidence) -> LatentMap:
    """What the port's ``get_decode_scale_and_shift`` says."""
    port = evidence.port_pipeline
    parameter = next(port.decoder.parameters())
    scale, shift = port.config.get_decode_scale_and_shift(
        parameter.device, parameter.dtype, port.decoder
    )
    both = [torch.as_tensor(v).double().flatten().cpu() for v in (scale, shift)]
    return LatentMap(*torch.broadcast_tensors(*both))


def unpacked(latents: Tensor, evidence: Evidence) -> Tensor | None:
    """Latents of the loop as the port's hook unpacks them; None if it cannot."""
    shape = evidence.port.raw_latent_shape
    if shape is None:
        return None
    batch = SimpleNamespace(raw_latent_shape=shape, batch_size=1)
    try:
        return evidence.port_pipeline.config.post_denoising_loop(latents, batch)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None


def _fitted(before_CN: Tensor, after_CN: Tensor) -> LatentMap | None:
    """Least squares in each row; None if the residual is not small."""
    x, y = before_CN.double(), after_CN.double()
    x0, y0 = x.mean(1, keepdim=True), y.mean(1, keepdim=True)
    slope = ((x - x0) * (y - y0)).sum(1) / ((x - x0) ** 2).sum(1)
    residual = (y - y0) - slope[:, None] * (x - x0)
    if not residual.norm() <= EXACT * (y - y0).norm() or not (slope != 0).all():
        return None
    return LatentMap(1 / slope, y0[:, 0] - slope * x0[:, 0])
