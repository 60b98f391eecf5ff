"""The tables at the end of a model's file that say how it is dealt over ranks."""

from __future__ import annotations

import sys
from typing import Any


def table_of(model_class: type, name: str) -> tuple[Any, type] | None:
    """A table of a model's class, and the class that it stands for; None if there is none.

    It is the class's own attribute ``name``, or its file's; or that of the nearest base with one. A
    file's table holds for the first class of its ``EntryClass``, the denoiser; other classes of the
    file say their own. Without ``EntryClass`` it holds for all of them: an auxiliary class
    there says ``TP_PLAN = {}``, or lives in a file of its own.
    """
    for cls in model_class.__mro__:
        if name in vars(cls):
            return vars(cls)[name], cls
        file = vars(sys.modules.get(cls.__module__) or object)
        if name in file and _first(file.get("EntryClass")) in (None, cls):
            return file[name], cls
    return None


def _first(entry: Any) -> type | None:
    return next(iter(entry), None) if isinstance(entry, list | tuple) else entry
