"""Architecture names to model classes.

Built-in models are found by parsing the files of this folder for ``EntryClass``; nothing is
imported until a class is asked for, so that a name can be looked up without torch.
"""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Iterable
from pathlib import Path

from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

_PACKAGE = "sglang.multimodal_gen.runtime.models"


class _ModelRegistry:
    """Maps architecture names to classes, or to where a class is."""

    def __init__(self) -> None:
        self._entries: dict[str, type | str] = {}
        self._built_ins_found = False
        self._lock = threading.RLock()

    def register_model(
        self, model_arch: str, model_cls: type | str, *, overwrite: bool = False
    ) -> None:
        """Make a model of an installed package known.

        ``model_cls`` is the class, or ``"package.module:Class"``, which is imported when the
        architecture is first asked for.

        Raises:
            ValueError: the text form is not ``<module>:<class>``.
            PipelineDefinitionError: the name is taken and ``overwrite`` is not set.
        """
        if isinstance(model_cls, str) and (
            model_cls.count(":") != 1 or not all(model_cls.split(":"))
        ):
            raise ValueError(
                f"Expected a string in the format `<module>:<class>`, not {model_cls!r}"
            )
        self._find_built_ins()
        with self._lock:
            if model_arch in self._entries and not overwrite:
                raise PipelineDefinitionError(
                    f"Model architecture {model_arch!r} is already registered; pass "
                    "overwrite=True to replace it"
                )
            self._entries[model_arch] = model_cls

    def resolve_model_cls(self, architectures: str | Iterable[str]) -> tuple[type, str]:
        """The class of the first known architecture, and that architecture's name.

        Raises:
            CheckpointError: none is known; the nearest name is offered.
            ImportError: its module cannot be imported.
        """
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        self._find_built_ins()
        for name in names:
            entry = self._entries.get(name)
            if entry is not None:
                return self._load(name, entry), name
        known = self.get_supported_archs()
        raise CheckpointError(
            f"Unsupported model architecture: {', '.join(names)}."
            f"{did_you_mean(names[0], known) if names else ''} Registered architectures: "
            f"{', '.join(known)}"
        )

    def get_supported_archs(self) -> list[str]:
        """All known architecture names, sorted."""
        self._find_built_ins()
        return sorted(self._entries)

    def knows(self, architecture: str) -> bool:
        """Whether a name is registered."""
        self._find_built_ins()
        return architecture in self._entries

    def _load(self, name: str, entry: type | str) -> type:
        if isinstance(entry, type):
            return entry
        module, class_name = entry.split(":")
        cls = getattr(importlib.import_module(module), class_name, None)
        if not isinstance(cls, type):
            raise PipelineDefinitionError(f"{module} has no class {class_name} (for {name!r})")
        with self._lock:
            self._entries[name] = cls
        return cls

    def _find_built_ins(self) -> None:
        with self._lock:
            if self._built_ins_found:
                return
            self._built_ins_found = True
            root = Path(__file__).parent
            for path in sorted(root.rglob("*.py")):
                module = ".".join((_PACKAGE, *path.relative_to(root).with_suffix("").parts))
                for class_name, names in _entry_classes(path).items():
                    for name in names:
                        self._entries.setdefault(name, f"{module}:{class_name}")


def _entry_classes(path: Path) -> dict[str, list[str]]:
    """Class name -> architecture names (its own and its ``_aliases``), read without importing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    entries: list[str] = []
    aliases: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            aliases[node.name] = _assigned_strings(node.body, "_aliases")
        elif isinstance(node, ast.Assign) and _assigns(node, "EntryClass"):
            entries = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
    return {name: [name, *aliases.get(name, [])] for name in entries}


def _assigned_strings(body: list[ast.stmt], name: str) -> list[str]:
    for node in body:
        if isinstance(node, ast.Assign) and _assigns(node, name):
            return [n.value for n in ast.walk(node.value)
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)]  # fmt: skip
    return []


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


ModelRegistry = _ModelRegistry()
"""The registry of this process."""
