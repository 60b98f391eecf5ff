"""Whether a component that replaces another can do what the stages ask of that one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

_CALLED = ("decode", "encode", "rotary_embedding")
"""Methods that stages and hooks call beside ``forward``."""
_BY_NAME = ("input_ids", "timestep")
"""Arguments that are always handed over, though a class may have a default for them."""


def lacking(actual: type, usual: type) -> Sequence[str]:
    """What the stages call of ``usual`` and ``actual`` does not have; empty if it can stand for it.

    A class with ``decode`` is called by its methods alone; others by ``forward``, of which the
    arguments without a default must be there, and those that every stage hands over.
    """
    if issubclass(actual, usual):
        return ()
    methods = [f"{name}()" for name in _CALLED
               if callable(getattr(usual, name, None)) and not hasattr(actual, name)]  # fmt: skip
    if callable(getattr(usual, "decode", None)):
        return methods
    takes = inspect.signature(actual.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return methods
    wanted = [
        name
        for name, parameter in inspect.signature(usual.forward).parameters.items()
        if name != "self"
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and (parameter.default is parameter.empty or name in _BY_NAME)
    ]
    return [*methods, *(f"forward({name}=)" for name in wanted if name not in takes)]
