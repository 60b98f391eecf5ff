"""Classes that checkpoints name, looked up in the two libraries that they refer to."""

from __future__ import annotations

import importlib
from typing import Any

from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

LIBRARIES = ("diffusers", "transformers")
"""A checkpoint is data from a stranger: these are the modules that it may name."""


def library_class(component: str, library: str | None, name: str) -> Any:
    """A class by name from ``diffusers`` or ``transformers``.

    Raises:
        CheckpointError: the library is another one, or has no such class.
    """
    if library not in LIBRARIES:
        raise CheckpointError(
            f"component {component!r}: class {name} of library {library!r} is not registered, and "
            f"only {' and '.join(LIBRARIES)} are searched; register it with ModelRegistry"
        )
    module = importlib.import_module(library)
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"component {component!r}: {library} {module.__version__} has no class {name}; a newer "
            "one may"
        )
    return cls
