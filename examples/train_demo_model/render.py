"""The renderer: layouts to pictures, by signed distances, antialiased, in batches on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from examples.train_demo_model.layout import CANVAS, Layout
from examples.train_demo_model.scenes import PALETTE

PALETTE_RGB = np.array(list(PALETTE.values()), dtype=np.uint8)


def distances(x: Tensor, y: Tensor) -> list[Tensor]:
    """Signed distance to each kind of shape of scale 1 with its centroid at 0, negative inside.

    Order of ``KINDS``; y points down. Exact at the edges, an underestimate beyond corners.
    """
    circle = torch.hypot(x, y) - 1.0
    square = torch.maximum(x.abs(), y.abs()) - 0.9

    # Isosceles triangle, base 2.3, height 2.0: the two slanted sides mirror each other.
    slope = math.hypot(2.0, 1.15)
    triangle = torch.maximum(y - 2.0 / 3, (2.0 * x.abs() - 1.15 * (y + 4.0 / 3)) / slope)

    # Five-pointed star, outer radius 1.2: fold the plane into one half of one spike, where the
    # edge is a straight line from the tip (angle 0) to the inner corner (angle 36 degrees).
    outer, inner = 1.2, 0.55
    turn = torch.atan2(x, -y)
    fold = (torch.remainder(turn + math.pi / 5, 2 * math.pi / 5) - math.pi / 5).abs()
    radius = torch.hypot(x, y)
    along, across = radius * fold.cos(), radius * fold.sin()
    corner_x, corner_y = inner * math.cos(math.pi / 5), inner * math.sin(math.pi / 5)
    edge = math.hypot(outer - corner_x, corner_y)
    star = ((along - outer) * corner_y + across * (outer - corner_x)) / edge

    longer = torch.maximum(x.abs(), y.abs())
    shorter = torch.minimum(x.abs(), y.abs())
    cross = torch.maximum(longer - 1.1, shorter - 0.42)
    return [circle, square, triangle, star, cross]


def coverage(kind: Tensor, scale: Tensor, centre: Tensor, size: int = CANVAS) -> Tensor:
    """How much of each pixel a shape covers, 0..1: [..., size, size] for kinds of any shape [...].

    ``kind`` -1 covers nothing. ``centre`` [..., 2] holds x and y in pixels.
    """
    grid = torch.arange(size, device=scale.device, dtype=torch.float32) + 0.5
    unit = scale.clamp(min=1e-3)[..., None, None]
    x = (grid - centre[..., 0, None, None]) / unit
    y = (grid[:, None] - centre[..., 1, None, None]) / unit
    x, y = torch.broadcast_tensors(x, y)
    result = torch.zeros_like(x)
    for index, distance in enumerate(distances(x, y)):
        covered = (0.5 - distance * unit).clamp(0, 1)
        result = torch.where((kind == index)[..., None, None], covered, result)
    return result


def to_device(layout: Layout, device: torch.device | str) -> list[Tensor]:
    """A layout's fields as tensors on a device, in the order of :class:`Layout`."""
    return [torch.from_numpy(field).to(device) for field in layout]


def render(layout: Layout, device: torch.device | str = "cpu") -> Tensor:
    """Pictures of the layouts, float32 [B, 3, 128, 128] in -1..1."""
    return draw(to_device(layout, device), palette_on(device))


def palette_on(device: torch.device | str) -> Tensor:
    """The palette in -1..1, [11, 3]."""
    return torch.from_numpy(PALETTE_RGB).to(device).float() / 127.5 - 1


def draw(fields: Sequence[Tensor], palette: Tensor) -> Tensor:
    """As :func:`render`, of a layout whose fields are on the device already (no copies)."""
    background, kind, colour, scale, centre = fields
    image = palette[background.long()][:, :, None, None].expand(-1, -1, CANVAS, CANVAS)
    for i in range(kind.shape[1]):
        alpha = coverage(kind[:, i], scale[:, i], centre[:, i])[:, None]
        image = torch.lerp(image, palette[colour[:, i].long()][:, :, None, None], alpha)
    return image


def to_uint8(image: Tensor) -> np.ndarray:
    """-1..1 [B, 3, H, W] to uint8 [B, H, W, 3]."""
    scaled = ((image.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
