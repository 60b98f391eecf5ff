"""How large a picture shall be that keeps its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PictureArea:
    """About so many pixels, at the picture's own ratio of width and height.

    Args:
        pixels: the area.
        multiple: edges are rounded to the nearest multiple of this, and are never less.
    """

    pixels: int
    multiple: int = 32

    def size_for(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a picture that was ``width`` x ``height``."""
        ratio = width / height
        wide = math.sqrt(self.pixels * ratio)
        return self._rounded(wide), self._rounded(wide / ratio)

    def _rounded(self, edge: float) -> int:
        return max(1, round(edge / self.multiple)) * self.multiple
