"""Command-line flags generated from the fields of a dataclass.

A flag cannot disagree with its field: spelling, type, choices, default and help all come from it.
A field may say more in its metadata, which :func:`flag` writes and any dataclass may carry:

``help``     the sentence that ``--help`` prints;
``flag``     another spelling, or False for a field without a flag;
``aliases``  further spellings;
``choices``  the values allowed, where the annotation does not list them.

==================  =====================================================
annotation          flag
==================  =====================================================
``bool``            ``--name`` and ``--no-name``
``int float str``   ``--name VALUE``
``Literal``, enum   ``--name {a,b}``
``tuple list``      ``--name VALUE [VALUE ...]``, may be given repeatedly
``dict[str, str]``  ``--name.KEY VALUE``, one for each key
another ``dict``    ``--name JSON``
==================  =====================================================

Fields that text cannot express (tensors, callables) get no flag.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from sglang.multimodal_gen.runtime.server_args.values import ValueType, value_type
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

_FIELDS = "__dataclass_fields__"


def flag(
    default: object = MISSING,
    *,
    help: str,
    default_factory: Callable[[], object] | None = None,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[object, ...] = (),
) -> Any:
    """A dataclass field that is also a command-line flag."""
    metadata = {"help": help, "flag": name, "aliases": aliases, "choices": choices}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of a dataclass, as a command line or a config file names it."""

    name: str
    spelling: str
    value: ValueType
    help: str
    default: object
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The flag's name in a config file and in a parsed namespace: ``guidance_scale``."""
        return flag_key(self.spelling)

    @property
    def keys(self) -> tuple[str, ...]:
        """All names that a config file may use."""
        return (self.key, *map(flag_key, self.aliases))

    def parse(self, text: str | list[str] | Mapping[str, str]) -> object:
        """The value of command-line text; raises InvalidArgument with this flag's spelling."""
        try:
            return self.value.parse(text)
        except ValueError as error:
            shown = text[0] if isinstance(text, list) and len(text) == 1 else text
            raise InvalidArgument(self.spelling, shown, str(error)) from None

    def accept(self, value: object) -> object:
        """The value as the field stores it; raises InvalidArgument with the field's name."""
        try:
            return self.value.accept(value)
        except ValueError as error:
            raise InvalidArgument(self.name, value, str(error)) from None


def flags_of(cls: type, *, without: Iterable[str] = ()) -> tuple[Flag, ...]:
    """The flags of a dataclass in the order of its fields, except the fields in ``without``."""
    skipped = frozenset(without)
    found = []
    for field in dataclasses.fields(cls):
        metadata = _metadata(cls, field.name)
        spelling = metadata.get("flag")
        private = field.name.startswith("_") or not field.init
        if field.name in skipped or private or spelling is False:
            continue
        value = value_type(_annotation(cls, field), tuple(metadata.get("choices") or ()))
        if value is None:
            continue
        found.append(
            Flag(
                name=field.name,
                spelling=spelling or "--" + field.name.replace("_", "-"),
                value=value,
                help=str(metadata.get("help", "")),
                default=_default(field),
                aliases=tuple(metadata.get("aliases") or ()),
            )
        )
    return tuple(found)


def flag_key(spelling: str) -> str:
    """A flag's spelling as a config file's key: dashes and underscores are the same."""
    return spelling.removeprefix("--").replace("-", "_")


def check_fields(record: Any) -> None:
    """Refuse a record whose fields hold a value of another type or outside their choices.

    A choice in another case than its own is stored in its own.
    """
    for spec in flags_of(type(record)):
        given = getattr(record, spec.name)
        accepted = spec.accept(given)
        if spec.value.choices and isinstance(accepted, (str, dict)) and accepted != given:
            object.__setattr__(record, spec.name, accepted)  # it may be frozen


def to_argv(flags: Iterable[Flag], values: Mapping[str, object]) -> list[str]:
    """The command line that parses back into ``values`` (by field name); defaults are left out."""
    argv: list[str] = []
    for spec in flags:
        value = values.get(spec.name, spec.default)
        if value == spec.default or value is None:
            continue
        if isinstance(value, bool) and spec.value.arity == "one":
            argv.append(spec.spelling if value else "--no-" + spec.spelling.removeprefix("--"))
        elif spec.value.arity == "mapping":
            assert isinstance(value, Mapping)
            for key, part in value.items():
                argv.append(f"{spec.spelling}.{key}={spec.value.render(part)[0]}")
        else:
            argv += [f"{spec.spelling}={text}" for text in spec.value.render(value)]
    return argv


def _metadata(cls: type, name: str) -> Mapping[str, Any]:
    """What a field and its namesakes in base classes say; a family that only sets another default
    keeps the base's help."""
    said: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        field = vars(base).get(_FIELDS, {}).get(name)
        if field is not None:
            said |= field.metadata
    return said


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _annotation(cls: type, field: dataclasses.Field[Any]) -> object:
    """The field's annotation, or None where it names a type that exists only for type checkers.

    Evaluated field by field, since ``typing.get_type_hints`` fails for a whole class when one field
    cannot be evaluated, and that one must not take the flags of the others away.
    """
    if not isinstance(field.type, str):
        return field.type
    # Subclasses inherit the very Field object, so the topmost class that has it wrote it.
    owners = [base for base in cls.__mro__ if vars(base).get(_FIELDS, {}).get(field.name) is field]
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    names = vars(sys.modules[owners[-1].__module__])
    try:
        return typing.get_type_hints(holder, names, dict(vars(owners[-1])))[field.name]
    except NameError:
        return None
