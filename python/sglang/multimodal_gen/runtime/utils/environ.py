"""The environment variables of this project: a typed table, and the one place that reads them.

What the libraries underneath read (``HF_HOME``, ``CUDA_VISIBLE_DEVICES``...) is theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable: its name, how its text becomes a value, and what it is for.

    ``parse`` gets the text, empty where the variable is not set.
    """

    name: str
    parse: Callable[[str], T]
    help: str

    def read(self) -> T:
        """The value now. Whoever needs it for the life of the process keeps it."""
        return self.parse(os.environ.get(self.name, ""))


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names, each once, in order."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


EXTERNAL_MODEL_PACKAGE = Variable(
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    _names,
    "Packages, comma separated, that register models of their own when they are imported.",
)
VARIABLES: tuple[Variable[tuple[str, ...]], ...] = (EXTERNAL_MODEL_PACKAGE,)
"""Every variable that this project reads."""
