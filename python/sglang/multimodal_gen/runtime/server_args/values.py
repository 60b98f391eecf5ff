"""What a field takes, read from its annotation: one answer for flags, config files and Python.

A flag brings text, a YAML file brings typed values, Python brings objects. All three must agree on
what ``height: int | None`` accepts, so they share one :class:`ValueType`.
"""

from __future__ import annotations

import collections.abc
import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

Arity = Literal["one", "many", "one_or_many", "mapping"]

_SEQUENCES = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)
_SCALARS = (bool, int, float, str, Path)
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NOUNS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    dict: "a JSON object",
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values one field accepts.

    ``item`` is ``bool``, ``int``, ``float``, ``str``, ``Path``, ``dict`` (free JSON) or an
    ``Enum``; ``arity`` says how many of them; ``length`` fixes the number for ``tuple[int, int]``.

    :meth:`parse` and :meth:`accept` raise ``ValueError`` with the problem alone; their callers know
    how the user spelled the field and put the name in front.
    """

    item: type
    arity: Arity = "one"
    optional: bool = False
    choices: tuple[object, ...] = ()
    container: type = tuple
    length: int | None = None

    def parse(self, text: str | list[str] | Mapping[str, str]) -> object:
        """The value that command-line text stands for."""
        if isinstance(text, str):
            item = self._parse_item(text)
            return item if self.arity in ("one", "one_or_many") else self.container((item,))
        if isinstance(text, list):
            return self._gathered([self._parse_item(part) for part in text])
        return _mapped(text, self._parse_item)

    def accept(self, value: object) -> object:
        """The value as the field stores it; nothing is guessed from text."""
        if value is None and self.optional:
            return None
        if self.arity == "mapping":
            if not isinstance(value, Mapping):
                raise ValueError(f"must map names to {_NOUNS.get(self.item, 'values')}")
            return _mapped(value, self._accept_item)
        if self.arity != "one" and isinstance(value, list | tuple):
            return self._gathered([self._accept_item(part) for part in value])
        if self.arity == "many":
            raise ValueError(f"must be a list, each item {self._noun()}")
        return self._accept_item(value)

    def render(self, value: object) -> list[str]:
        """The texts that :meth:`parse` turns back into ``value``, one for each item."""
        if isinstance(value, list | tuple):
            return [_shown(part) for part in value]
        return [_shown(value)]

    def metavar(self) -> str:
        """The placeholder that ``--help`` prints for one item."""
        if self.choices:
            return "{" + ",".join(_shown(choice) for choice in self.choices) + "}"
        names = {int: "N", float: "X", Path: "PATH", dict: "JSON", bool: "{true,false}"}
        return names.get(self.item, "TEXT")

    def _gathered(self, items: list[Any]) -> object:
        if self.length is not None and len(items) != self.length:
            raise ValueError(f"takes {self.length} values, not {len(items)}")
        if self.arity == "one_or_many" and len(items) == 1:
            return items[0]
        return self.container(items)

    def _noun(self) -> str:
        return _NOUNS.get(self.item, "one of " + ", ".join(map(_shown, self.choices)))

    def _parse_item(self, text: str) -> object:
        if self.item in (int, float) and not self.choices:
            return self._accept_item(_number(text, self.item))
        if self.item is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError("must be true or false")
            return text.lower() == "true"
        if self.item is dict:
            return _json_object(text)
        for choice in self.choices:
            if not isinstance(choice, str) and _shown(choice) == text:
                return choice
        if self.choices and self.item is int:
            raise ValueError(self._choice_problem(text))
        return self._accept_item(text)

    def _accept_item(self, value: object) -> object:
        if issubclass(self.item, enum.Enum):
            return self._enum_member(value)
        kept = _as_type(value, self.item)
        if kept is None:
            raise ValueError(f"must be {self._noun()}, not {type(value).__name__}")
        if self.choices and isinstance(kept, str):  # names in any case, as enums' are
            folded = {c.lower(): c for c in self.choices if isinstance(c, str)}
            kept = folded.get(kept.strip().lower(), kept)
        if self.choices and kept not in self.choices:
            raise ValueError(self._choice_problem(str(kept)))
        return kept

    def _enum_member(self, value: object) -> object:
        for member in self.choices:
            assert isinstance(member, enum.Enum)
            if value is member:
                return member
            if isinstance(value, str) and value.strip().lower() in (
                member.name.lower(),
                str(member.value).lower(),
            ):
                return member
        raise ValueError(self._choice_problem(str(value)))

    def _choice_problem(self, given: str) -> str:
        known = [_shown(choice) for choice in self.choices]
        return f"choose one of {', '.join(known)}.{did_you_mean(given, known)}"


def value_type(annotation: object, choices: tuple[object, ...] = ()) -> ValueType | None:
    """The :class:`ValueType` of an annotation, or None where text cannot express it.

    ``choices`` narrows an annotation that does not list them itself.
    """
    members, optional = _union_members(annotation)
    sequences = [member for member in members if _origin(member) in _SEQUENCES]
    scalars = [member for member in members if _origin(member) not in _SEQUENCES]
    if len(sequences) > 1:
        return None
    if not sequences:
        return _scalar_or_mapping(scalars, optional, choices)
    container, inner, length = _sequence_parts(sequences[0])
    item = _scalar_or_mapping([inner], optional, choices)
    if item is None or item.arity != "one" or item.item is dict:
        return None
    if scalars and (_scalar_or_mapping(scalars, optional, choices) != item):
        return None
    arity: Arity = "one_or_many" if scalars else "many"
    return ValueType(item.item, arity, optional, item.choices, container, length)


def _scalar_or_mapping(
    members: list[object], optional: bool, choices: tuple[object, ...]
) -> ValueType | None:
    """The type of a union without sequences."""
    if len(members) == 1 and _origin(members[0]) in _MAPPINGS:
        return _mapping_type(members[0], optional, choices)
    if len(members) == 1 and typing.get_origin(members[0]) is Literal:
        listed = typing.get_args(members[0])
        return ValueType(type(listed[0]), optional=optional, choices=choices or listed)
    enums = [m for m in members if isinstance(m, type) and issubclass(m, enum.Enum)]
    if len(enums) == 1 and all(m in (enums[0], str) for m in members):
        return ValueType(enums[0], optional=optional, choices=choices or tuple(enums[0]))
    if not members or any(member not in _SCALARS for member in members):
        return None
    # `float | int` and `float | bool` are numbers; `str | Path` is a path.
    for widest in (float, Path, str, int, bool):
        if widest in members:
            mixed = widest is str and len(members) > 1
            return None if mixed else ValueType(widest, optional=optional, choices=choices)
    return None


def _mapping_type(
    annotation: object, optional: bool, choices: tuple[object, ...]
) -> ValueType | None:
    arguments = typing.get_args(annotation)
    if len(arguments) == 2 and arguments[0] is str:
        item = value_type(arguments[1], choices)
        if item is not None and item.arity == "one" and item.item is not dict:
            return ValueType(item.item, "mapping", optional, item.choices)
    return ValueType(dict, optional=optional)


def _sequence_parts(annotation: object) -> tuple[type, object, int | None]:
    """Container, item and fixed length of ``list[X]``, ``tuple[X, ...]`` or ``tuple[X, X]``."""
    container = list if _origin(annotation) is list else tuple
    items = [item for item in typing.get_args(annotation) if item is not Ellipsis] or [str]
    fixed = container is tuple and Ellipsis not in typing.get_args(annotation)
    if any(item != items[0] for item in items):
        return container, object, None
    return container, items[0], len(items) if fixed and _origin(annotation) is tuple else None


def _union_members(annotation: object) -> tuple[list[object], bool]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _union_members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = list(typing.get_args(annotation))
    else:
        members = [annotation]
    kept = [member for member in members if member is not type(None)]
    return kept, len(kept) < len(members)


def _origin(annotation: object) -> object:
    return typing.get_origin(annotation) or annotation


def _as_type(value: object, wanted: type) -> object:
    """``value`` as ``wanted`` where that loses nothing, else None. A bool is no number."""
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return float(value)
    if wanted is int and isinstance(value, bool):
        return None
    if wanted in (str, Path) and isinstance(value, str | Path):
        return wanted(value)
    return value if isinstance(value, wanted) else None


def _number(text: str, wanted: type) -> object:
    try:
        return wanted(text)
    except ValueError:
        raise ValueError(f"must be {_NOUNS[wanted]}") from None


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, such as '{\"name\": 1}'")  # noqa: TRY004
    return value


def _mapped(parts: Mapping[Any, Any], convert: Callable[[Any], object]) -> dict[str, object]:
    """``parts`` with converted values; a problem names the key it belongs to."""
    converted = {}
    for key, part in parts.items():
        try:
            converted[_checked_key(key)] = convert(part)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return converted


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no name: use letters, digits, '_', '-' and '.'")
    return key


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict) else str(value)
