"""Architecture names to model classes: built in, or registered from outside.

A file under ``runtime/models`` offers its classes by name, ``EntryClass = MyModel`` or a list or
tuple of them; a class may list further names in ``_aliases``. The files are parsed, not imported,
when the registry is first asked; a model's module is imported when that model is resolved.
"""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


class RegistrationError(PipelineDefinitionError, ValueError):
    """A registration of a model that breaks the porters' contract."""


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A class that is not imported yet."""

    module: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.class_name}"

    def load(self) -> type:
        """The class. What the import raises is the caller's to see: nothing is swallowed."""
        found = getattr(importlib.import_module(self.module), self.class_name, None)
        if not isinstance(found, type):
            raise RegistrationError(
                f"{self} was registered as a model, but there is no such class."
            )
        return found


class _ModelRegistry:
    """The table behind ``ModelRegistry``.

    Args:
        root: the folder whose Python files are scanned, at any depth.
        package: the import name of that folder.
    """

    def __init__(self, root: Path, package: str) -> None:
        self._root = root
        self._package = package
        self._models: dict[str, type | _Lazy] = {}
        self._aliases: dict[str, str] = {}
        self._scanned = False
        self._lock = threading.RLock()

    def register_model(
        self, model_arch: str, model_cls: type | str, overwrite: bool = False
    ) -> None:
        """Offer a class under an architecture name.

        Args:
            model_arch: the name that checkpoints use (``_class_name``).
            model_cls: the class, or ``"<module>:<class>"`` to import it when it is first needed.
            overwrite: replace a model that is already registered under this name.

        Raises:
            RegistrationError: (a ValueError and a TypeError) for a taken name or a bad class.
        """
        if isinstance(model_cls, str):
            module, colon, class_name = model_cls.partition(":")
            if not (module and colon and class_name) or ":" in class_name:
                raise RegistrationError(
                    "Expected a string in the format `<module>:<class>`, "
                    f"not {model_cls!r} (model {model_arch!r})."
                )
            entry: type | _Lazy = _Lazy(module, class_name)
        elif isinstance(model_cls, type):
            entry = model_cls
        else:
            raise RegistrationError(
                f"Model {model_arch!r}: expected a class or `<module>:<class>`, not {model_cls!r}."
            )
        with self._lock:
            self._scan()
            if not overwrite and self._has(model_arch):
                raise RegistrationError(
                    f"Model {model_arch!r} is already registered ({self._origin(model_arch)}); "
                    "pass overwrite=True to replace it."
                )
            self._aliases.pop(model_arch, None)
            self._models[model_arch] = entry

    def resolve_model_cls(self, architectures: str | Iterable[str]) -> tuple[type, str]:
        """The class of the first registered architecture, and the name it is registered under.

        Raises:
            CheckpointError: if none is registered.
            RegistrationError: if the registered module has no such class.
            Exception: whatever importing the class's module raises, unchanged.
        """
        wanted = [architectures] if isinstance(architectures, str) else list(architectures)
        self._complete()
        for name in wanted:
            arch = self._aliases.get(name, name)
            entry = self._models.get(arch)
            if entry is not None:
                found = entry.load() if isinstance(entry, _Lazy) else entry
                return found, arch
        known = self.get_supported_archs()
        hint = did_you_mean(wanted[0], known) if wanted else ""
        raise CheckpointError(
            f"Unsupported model architecture: {', '.join(wanted) or 'none given'}.{hint} "
            f"Registered architectures: {known}"
        )

    def knows(self, architecture: str) -> bool:
        """Whether a name is registered; imports no model."""
        self._complete()
        return self._has(architecture)

    def get_supported_archs(self) -> list[str]:
        """All registered names, sorted, without aliases."""
        self._complete()
        return sorted(self._models)

    def _has(self, architecture: str) -> bool:
        return architecture in self._models or architecture in self._aliases

    def _origin(self, name: str) -> str:
        entry = self._models[self._aliases.get(name, name)]
        if isinstance(entry, _Lazy):
            return str(entry)
        return f"{entry.__module__}:{entry.__qualname__}"

    def _complete(self) -> None:
        """Before a look-up: the built-in models, then those of external packages."""
        self._scan()
        load_external_packages()

    def _scan(self) -> None:
        """Fill in the built-in models, once."""
        with self._lock:
            if self._scanned:
                return
            models: dict[str, type | _Lazy] = {}
            aliases: dict[str, str] = {}
            for file in sorted(self._root.rglob("*.py")):
                parts = file.relative_to(self._root).with_suffix("").parts
                module = ".".join((self._package, *parts)).removesuffix(".__init__")
                for class_name, other_names in _entry_classes(file):
                    for name in (class_name, *other_names):
                        if name in models or name in aliases:
                            first = models[aliases.get(name, name)]
                            raise RegistrationError(
                                f"Model {name!r} is offered twice: by {first} and by {module}."
                            )
                        if name == class_name:
                            models[name] = _Lazy(module, class_name)
                        else:
                            aliases[name] = class_name
            self._models, self._aliases, self._scanned = models, aliases, True


def _entry_classes(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Each class that a file offers, with its aliases; reads the source, imports nothing."""
    source = file.read_text(encoding="utf-8")
    if "EntryClass" not in source:
        return
    tree = ast.parse(source, filename=str(file))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for value in _values_of("EntryClass", tree.body):
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for item in items:
            if not isinstance(item, ast.Name):
                raise RegistrationError(
                    f"{file}: EntryClass must be a class of this file, or a list or tuple of them."
                )
            node = classes.get(item.id)
            yield item.id, _strings("_aliases", node.body, file) if node else []


def _strings(name: str, body: list[ast.stmt], file: Path) -> list[str]:
    strings: list[str] = []
    for value in _values_of(name, body):
        items = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for item in items:
            if not (isinstance(item, ast.Constant) and isinstance(item.value, str)):
                raise RegistrationError(f"{file}: {name} must be a list of literal strings.")
            strings.append(item.value)
    return strings


def _values_of(name: str, body: list[ast.stmt]) -> Iterator[ast.expr]:
    """The values assigned to a name at the top of a module or class body."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None:
                yield value


ModelRegistry = _ModelRegistry(
    Path(__file__).resolve().parent, "sglang.multimodal_gen.runtime.models"
)
