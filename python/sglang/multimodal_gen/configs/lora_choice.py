"""Which LoRA adapters a request asks for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

_KEYS = ("name", "path", "weight")


@dataclass(frozen=True, slots=True)
class LoRAChoice:
    """One adapter of a request: a loaded one by its name, or a file by its path; and its weight.

    ``weight`` multiplies the adapter's own scaling; 0 is the same as leaving it out, and it may be
    negative.
    """

    adapter: str
    is_path: bool
    weight: float = 1.0

    def as_setting(self) -> dict[str, Any]:
        """The choice as a request writes it, for records."""
        return {"path" if self.is_path else "name": self.adapter, "weight": self.weight}


def parse_lora_choices(value: Any) -> tuple[LoRAChoice, ...] | None:
    """The choices that a request's ``lora`` stands for; None where it leaves them to the server.

    Each entry is a mapping (``name`` or ``path``, and ``weight``) or a text: ``name``,
    ``name=0.5``. A text with a slash, or that ends with ``.safetensors``, is a path.

    Raises:
        InvalidRequest: an entry is neither, or its weight is not a finite number.
    """
    if value is None:
        return None
    entries = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_choice(entry) for entry in entries)


def nickname_problem(name: object) -> str | None:
    """What is wrong with a name for an adapter; None if nothing.

    A request must be able to choose it by its name alone.
    """
    if not isinstance(name, str) or not name.strip():
        return "must be text that is not blank"
    try:
        choice = _from_text(name)
    except InvalidRequest:
        choice = None
    if choice is None or choice.is_path or choice.adapter != name:
        return (
            "a request could not choose it by this name: what has a slash or ends with "
            ".safetensors is a path, and a number after '=' is a weight. Use another name"
        )
    return None


def _choice(entry: Any) -> LoRAChoice:
    if isinstance(entry, LoRAChoice):
        return entry
    if isinstance(entry, str):
        return _from_text(entry)
    if not isinstance(entry, Mapping):
        raise InvalidRequest("lora", entry, "must be a name, 'name=0.5', or a mapping with a name")
    for key in entry:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            raise InvalidRequest("lora", entry, f"takes {', '.join(_KEYS)}, not {key!r}.{hint}")
    given = [key for key in ("name", "path") if entry.get(key) is not None]
    if len(given) != 1:
        raise InvalidRequest("lora", entry, "must have either a name or a path")
    adapter = entry[given[0]]
    if not isinstance(adapter, (str, os.PathLike)) or not os.fspath(adapter).strip():
        raise InvalidRequest("lora", entry, f"{given[0]} must be text that is not blank")
    return LoRAChoice(os.fspath(adapter), given[0] == "path", _weight(entry.get("weight", 1.0)))


def _from_text(text: str) -> LoRAChoice:
    """``name`` or ``name=weight``; what follows the last ``=`` counts only if it is a number."""
    adapter, weight = text, 1.0
    head, equals, tail = text.rpartition("=")
    if equals:
        try:
            adapter, weight = head, float(tail)
        except ValueError:
            adapter, weight = text, 1.0
    if not adapter.strip():
        raise InvalidRequest("lora", text, "names no adapter")
    is_path = "/" in adapter or os.sep in adapter or adapter.endswith(".safetensors")
    return LoRAChoice(adapter, is_path, _weight(weight))


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidRequest("lora.weight", value, "must be a finite number")
    return float(value)
