"""The file that ``--output`` of ``sglang bench`` names: tried before the work, whole afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.utils.atomic_file import check_output_folder, replace_file
from sglang.multimodal_gen.runtime.utils.errors import OutputError


def report_file(said: str | None) -> Path | None:
    """The path that was said, tried: its folder is there, takes files, and it is no folder itself.

    Raises:
        OutputError: a report could not be written there.
    """
    if said is None:
        return None
    path = Path(said).expanduser()
    if said.endswith("/") or path.is_dir():
        raise OutputError(f"cannot write {said!r}: a folder has that name. Choose a file's name.")
    check_output_folder(path.parent)
    return path


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write it, in place of what was there; nothing where no path was said.

    Raises:
        OutputError: it could not be written; what was there is untouched.
    """
    if path is not None:
        replace_file(path, (json.dumps(report, indent=1) + "\n").encode())
