"""Values as bytes for another process of a run, in msgpack: data, and names of what both have.

Reading such bytes runs nothing of whoever wrote them. Numbers, text, containers, arrays and tensors
are data. A record (dataclass), an enum's member, a class or a function is a name and is looked up
where it is read, in packages that the reader trusts and nowhere else; a record's fields are then
set without calling its ``__init__``. Arrays and tensors are raw bytes beside the rest, with their
dtype and shape.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pathlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from sglang.multimodal_gen.runtime.utils.errors import InternalError

OWN_PACKAGES = frozenset({"sglang"})
"""The packages whose names are always understood."""
_SMALL = range(-(2**63), 2**64)
_BAD_BYTES = (
    msgspec.MsgspecError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
_PLAIN = (type(None), bool, float, str, bytes)
_MISSING = object()


class DoesNotTravel(InternalError):
    """A value that cannot be sent to another process, or bytes that cannot be read here."""


def packages_of(classes: Iterable[type]) -> frozenset[str]:
    """The packages, by their top name, that these classes and their bases are from."""
    tops = {base.__module__.partition(".")[0] for cls in classes for base in cls.__mro__}
    return OWN_PACKAGES | (tops - sys.stdlib_module_names)


def name_of(thing: type | types.FunctionType) -> str:
    """The name under which `Reader.named` finds a class or function of a module.

    Raises:
        DoesNotTravel: it is not to be found under a name: a local one, or of ``__main__``.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    if "<" in thing.__qualname__ or thing.__module__ == "__main__":
        raise DoesNotTravel(f"{name} has no name that another process could import")
    return name


def write(value: object) -> tuple[bytes, list[memoryview]]:
    """A value as bytes, and the raw bytes of its arrays and tensors, which are not copied.

    Raises:
        DoesNotTravel: it holds something that is neither data nor has a name.
    """
    writer = _Writer()
    return msgspec.msgpack.encode(writer.node(value)), writer.buffers


def pack(value: object) -> bytes:
    """A value as bytes, its arrays and tensors among them; raises as `write`."""
    body, buffers = write(value)
    return msgspec.msgpack.encode((body, buffers))


def unpack(data: bytes, packages: frozenset[str] = OWN_PACKAGES) -> Any:
    """What `pack` was given.

    Raises:
        DoesNotTravel: the bytes are of another form, or name something outside ``packages``.
    """
    try:
        body, buffers = msgspec.msgpack.decode(data, type=tuple[bytes, list[bytes]])
    except msgspec.MsgspecError as error:
        raise DoesNotTravel(f"these are not bytes of this form: {error}") from error
    return Reader(packages).read(body, [bytearray(buffer) for buffer in buffers])


class _Writer:
    """Turns values into what msgpack knows: plain ones, and lists that start with their kind."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def node(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value in _SMALL else ["int", str(value)]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *map(self.node, value)]
        if kind in (dict, types.MappingProxyType):
            items = [self.node(part) for item in value.items() for part in item]
            return ["dict" if kind is dict else "view", *items]
        if kind is Counter:
            return ["counter", *(self.node(part) for item in value.items() for part in item)]
        return self._by_base(value)

    def _by_base(self, value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, enum.Enum):
            return str(value)  # a caller's own kind of text is text
        if isinstance(value, Mapping) and not isinstance(value, Counter):
            return self.node(dict(value))
        if isinstance(value, enum.Enum):
            return ["enum", name_of(type(value)), value.name]
        if isinstance(value, type | types.FunctionType):
            return ["name", name_of(value)]
        if dataclasses.is_dataclass(value):
            return ["record", name_of(type(value)), *map(self.node, self._state(value))]
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), scalar=isinstance(value, np.generic))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, pathlib.Path):
            return ["path", str(value)]
        raise DoesNotTravel(
            f"a {type(value).__module__}.{type(value).__qualname__} does not travel"
        )

    def _state(self, value: Any) -> list[Any]:
        """Names and values of a record's fields, and of whatever else was set on it."""
        names = dict.fromkeys([f.name for f in dataclasses.fields(value)])
        names |= dict.fromkeys(getattr(value, "__dict__", {}))
        state = [(name, _attribute(value, name)) for name in names]
        return [part for item in state if item[1] is not _MISSING for part in item]

    def _array(self, array: np.ndarray, *, scalar: bool) -> list[Any]:
        if array.dtype.hasobject or array.dtype.fields is not None:
            raise DoesNotTravel(f"an array of {array.dtype} does not travel")
        self.buffers.append(_raw(array))
        return ["scalar" if scalar else "array", array.dtype.str, *array.shape]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise DoesNotTravel("only dense tensors travel")
        held = tensor.detach().cpu().contiguous()
        self.buffers.append(_raw(held.reshape(-1).view(torch.uint8).numpy()))
        return ["tensor", str(tensor.dtype).removeprefix("torch."), *tensor.shape]


class Reader:
    """Reads what `write` wrote, and trusts the names of some packages."""

    def __init__(self, packages: frozenset[str] = OWN_PACKAGES) -> None:
        self.packages = packages

    def read(self, body: bytes, buffers: Sequence[bytearray]) -> Any:
        """The value; arrays and tensors use ``buffers`` as their memory.

        Raises:
            DoesNotTravel: the bytes are of another form, or name something that is not trusted.
        """
        left = iter(buffers)
        try:
            return self._value(msgspec.msgpack.decode(body), left)
        except DoesNotTravel:
            raise
        except _BAD_BYTES as error:
            raise DoesNotTravel(f"these bytes cannot be read here: {error}") from error

    def named(self, name: str) -> Any:
        """The class or function of a name.

        Raises:
            DoesNotTravel: its package is not trusted, or has nothing of that name.
        """
        module, _, path = name.partition(":")
        if module.partition(".")[0] not in self.packages:
            known = ", ".join(sorted(self.packages))
            raise DoesNotTravel(f"{name} is not of a package that a rank may use: {known}")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise DoesNotTravel(f"{name} cannot be imported here: {error}") from error
        # A module may hold others' things too: only what it defines is meant.
        if not isinstance(found, type | types.FunctionType) or found.__module__ != module:
            raise DoesNotTravel(f"{name} is no class or function of that module")
        return found

    def _value(self, node: Any, buffers: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *parts = node
        if kind in ("array", "scalar", "tensor"):
            return _numbers(kind, parts[0], tuple(parts[1:]), next(buffers))
        if kind in _TEXTS:
            return _TEXTS[kind](parts[0])
        if kind == "name":
            return self.named(parts[0])
        if kind == "enum":
            return self._class(parts[0], enum.Enum)[parts[1]]
        if kind == "record":
            cls = self._class(parts[0], object)
            return _record(cls, [self._value(part, buffers) for part in parts[1:]])
        return _CONTAINERS[kind]([self._value(part, buffers) for part in parts])

    def _class(self, name: str, base: type) -> Any:
        cls = self.named(name)
        fits = isinstance(cls, type) and issubclass(cls, base)
        if not fits or (base is object and not dataclasses.is_dataclass(cls)):
            raise DoesNotTravel(f"{name} is not what these bytes say it is")
        return cls


def _record(cls: type, state: list[Any]) -> Any:
    made: Any = object.__new__(cls)
    for name, value in zip(state[::2], state[1::2], strict=True):
        # Past a frozen or sealed record's own refusal; what is no field has no slot.
        object.__setattr__(made, name, value)
    return made


def _numbers(kind: str, dtype: str, shape: tuple[int, ...], data: bytearray) -> Any:
    if kind == "tensor":
        kind_of = _dtype(dtype)
        flat = torch.frombuffer(data, dtype=kind_of) if data else torch.empty(0, dtype=kind_of)
        return flat.reshape(shape)
    array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    return array if kind == "array" else array[()]


def _mapping(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


_CONTAINERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": _mapping,
    "counter": lambda parts: Counter(_mapping(parts)),
    "view": lambda parts: types.MappingProxyType(_mapping(parts)),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DoesNotTravel(f"torch has no dtype {name!r}")
    return found


_TEXTS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "dtype": _dtype,
    "device": torch.device,
    "path": pathlib.Path,
}


def _attribute(record: Any, name: str) -> Any:
    """A field's value; a slot may be empty, and a record may say so in its own words."""
    try:
        return getattr(record, name)
    except AttributeError:
        return _MISSING


def _raw(array: np.ndarray) -> memoryview:
    # A cast, not a type: numpy's stubs know the buffer protocol from Python 3.12 on.
    return memoryview(cast(Any, np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
