"""The tables at the end of a model's file that say how it is dealt over ranks."""

from __future__ import annotations

import sys
from typing import Any


def table_of(model_class: type, name: str) -> tuple[Any, type] | None:
    """A table of a model's class, and the class that it stands for; None if there is none.

    It is the class's own attribute ``name``, or its file's; or that of the nearest base with one.
    """
    for cls in model_class.__mro__:
        for holder in (cls, sys.modules.get(cls.__module__)):
            if name in vars(holder or object):
                return vars(holder)[name], cls
    return None
