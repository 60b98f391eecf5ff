"""JSON files of a checkpoint, read with errors that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a checkpoint file holds.

    Raises:
        CheckpointError: if the file is absent, unreadable, not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as missing:
        raise CheckpointError(f"{path} does not exist.") from missing
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}.") from problem
    if not text.strip():
        raise CheckpointError(f"{path} is empty. Likely cause: an interrupted download.")
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise CheckpointError(f"{path} is not JSON ({problem}).{_likely_cause(text)}") from problem
    except RecursionError as problem:
        raise CheckpointError(f"{path} is nested too deeply to be a configuration.") from problem
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object ({{...}}), not {type(value).__name__}."
        )
    return value


def _likely_cause(text: str) -> str:
    start = text.lstrip()[:64].lower()
    if start.startswith("version https://git-lfs"):
        return " It is a Git LFS pointer: run `git lfs pull` in the repository."
    if start.startswith("<"):
        return " It looks like a web page that was saved instead of the file."
    return ""
