"""SGLang-Diffusion, rebuilt: images, video and actions from diffusion models.

>>> from sglang.multimodal_gen import DiffGenerator
>>> with DiffGenerator.from_pretrained(model_path="demo") as generator:
...     result = generator.generate(prompt="a red circle on a white background", seed=1)
>>> result.images[0].image.save("circle.png")

Importing this package is cheap: torch is imported when `DiffGenerator` is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import (
        DiffGenerator,
        GenerationResult,
    )
    from sglang.multimodal_gen.runtime.entrypoints.generated import GeneratedImage, GeneratedVideo
    from sglang.multimodal_gen.runtime.utils.errors import Cancelled, DiffusionError
    from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

__all__ = [
    "Cancelled",
    "DiffGenerator",
    "DiffusionError",
    "GeneratedImage",
    "GeneratedVideo",
    "GenerationResult",
    "ProgressEvent",
]

__version__ = "0.1.0"


_HOMES = {
    "Cancelled": "runtime.utils.errors",
    "DiffusionError": "runtime.utils.errors",
    "GeneratedImage": "runtime.entrypoints.generated",
    "GeneratedVideo": "runtime.entrypoints.generated",
    "ProgressEvent": "runtime.utils.progress",
}


def __getattr__(name: str) -> object:
    if name in __all__:
        home = _HOMES.get(name, "runtime.entrypoints.diffusion_generator")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
