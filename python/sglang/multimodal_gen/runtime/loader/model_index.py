"""``model_index.json``: the pipeline and the components that a checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

MODEL_INDEX = "model_index.json"
SAMPLING_DEFAULTS = "sampling_params.json"


def read_model_index(root: Path) -> dict[str, Any]:
    """The checked content of a checkpoint's ``model_index.json``.

    Raises:
        CheckpointError: it is absent, no object, names no pipeline, or has a malformed entry.
    """
    index = read_json_object(root / MODEL_INDEX)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or not class_name:
        raise CheckpointError(
            f"{root / MODEL_INDEX}: _class_name must be the name of a pipeline, not {class_name!r}"
        )
    components_of(index, root)
    return index


def components_of(index: Mapping[str, Any], root: Path | None) -> dict[str, tuple[str, str]]:
    """Component name -> (library, class name), for those that are present.

    An absent one is ``null`` or ``[null, null]``. What is no list, or a list of numbers, is a
    setting of the pipeline (``"is_distilled": true``). ``root`` is named in error messages.

    Raises:
        CheckpointError: an entry is neither, or its name is no name (``"../vae"``).
    """
    components: dict[str, tuple[str, str]] = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or _is_setting(entry):
            continue
        match entry:
            case [str(library), str(class_name)] if library and class_name and name.isidentifier():
                components[name] = (library, class_name)
            case [None, None]:
                pass
            case _:
                raise CheckpointError(
                    f"{root}/{MODEL_INDEX}: {name!r} must be [library, class] or [null, null], "
                    f"not {entry!r}"
                )
    return components


def _is_setting(entry: list[Any]) -> bool:
    return bool(entry) and all(isinstance(item, int | float) for item in entry)


def class_in_folder(folder: Path) -> tuple[str, str] | tuple[None, None]:
    """(library, class name) as a component's own files say them, for one that no index names.

    Raises:
        CheckpointError: a file is there and no JSON object.
    """
    for name in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        match read_json_object(folder / name):
            case {"_class_name": str(class_name)}:
                return "diffusers", class_name
            case {"architectures": [str(class_name), *_]}:
                return "transformers", class_name
            case {"tokenizer_class": str(class_name)}:
                return "transformers", class_name
    return None, None
