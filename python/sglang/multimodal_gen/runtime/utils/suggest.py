"""Nearest-name hints for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known name, or an empty string.

    >>> did_you_mean("guidence_scale", ["guidance_scale", "seed"])
    " Did you mean 'guidance_scale'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
