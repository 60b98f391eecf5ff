"""Config files: the same settings as the flags, as YAML or JSON.

Keys are flag names, with ``-`` or ``_``. A value is what the flag's field takes; ``null`` is the
same as leaving the key out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.entrypoints.cli.text_file import read_text_file
from sglang.multimodal_gen.runtime.server_args.flags import Flag, flag_key
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

_MAX_BYTES = 2**20


class ConfigFile:
    """A config file that was read, and that can say what it holds for some flags.

    Raises:
        UserError: the file is missing, unreadable, no mapping, or says one thing twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = self._by_key(_read(path))

    def check_keys(self, flags: Iterable[Flag]) -> None:
        """Refuse a key that no flag explains, naming the nearest."""
        known = {key for spec in flags for key in spec.keys}
        for key in self._values:
            if key not in known:
                hint = did_you_mean(key, sorted(known))
                raise UserError(f"{self.path}: there is no setting {key!r}.{hint}")

    def values_of(self, flags: Iterable[Flag]) -> dict[str, object]:
        """What the file says for ``flags``, by field name.

        Raises:
            UserError: a value is refused; names file, setting and remedy.
        """
        found: dict[str, object] = {}
        for spec in flags:
            said = [key for key in spec.keys if key in self._values]
            if len(said) > 1:
                raise self._twice(said[1])
            for key in said:
                try:
                    found[spec.name] = spec.accept(self._values[key])
                except InvalidArgument as error:
                    raise UserError(f"{self.path}: {error}") from error
        return found

    def _by_key(self, raw: Mapping[Any, Any]) -> dict[str, Any]:
        """Values by key, with ``component-paths.vae: x`` folded into its mapping."""
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if not isinstance(name, str):
                raise UserError(f"{self.path}: the key {name!r} is no setting's name.")
            if value is None:
                continue
            head, dot, part = name.partition(".")
            key = flag_key(head)
            if dot:
                mapping = values.setdefault(key, {})
                if not isinstance(mapping, dict) or part in mapping:
                    raise self._twice(name)
                mapping[part] = value
            elif isinstance(value, dict) and isinstance(values.get(key), dict):
                if values[key].keys() & value.keys():
                    raise self._twice(name)
                values[key] |= value
            elif key in values:
                raise self._twice(name)
            else:
                values[key] = dict(value) if isinstance(value, dict) else value
        return values

    def _twice(self, name: str) -> UserError:
        return UserError(f"{self.path}: {name!r} is set twice. Keep one of them.")


def _read(path: Path) -> Mapping[Any, Any]:
    text = read_text_file(str(path), "the config file", limit=_MAX_BYTES)
    content = _json(path, text) if path.suffix.lower() == ".json" else _yaml(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: must hold settings such as 'height: 128', not one {type(content).__name__}."
        )
    return content


def _json(path: Path, text: str) -> object:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeats(path, [name for name, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON: {error}.") from error


def _yaml(path: Path, text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key said twice, which YAML forbids and PyYAML lets pass."""

    def once(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        _refuse_repeats(path, [loader.construct_object(key) for key, _ in node.value])
        return loader.construct_mapping(node, deep=True)

    # YAML 1.2 and JSON read 1e-3 as a number; PyYAML, at version 1.1, as text.
    exponent = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, once)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}.") from error


def _refuse_repeats(path: Path, names: Sequence[Any]) -> None:
    seen = set()
    for name in map(str, names):
        if name in seen:
            raise UserError(f"{path}: {name!r} is set twice. Keep one of them.")
        seen.add(name)
