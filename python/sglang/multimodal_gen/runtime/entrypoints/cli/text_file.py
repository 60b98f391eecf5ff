"""Text files that users name: read with a bound, whatever stands behind the name."""

from __future__ import annotations

from pathlib import Path

from sglang.multimodal_gen.runtime.utils.errors import UserError


def read_text_file(path: str | Path, what: str, *, limit: int) -> str:
    """The UTF-8 text of a file, or of a pipe such as ``/dev/stdin``.

    Args:
        path: as the user gave it.
        what: what messages call it, e.g. ``the prompt file``.
        limit: most bytes read; a device that never ends stops here.

    Raises:
        UserError: it cannot be read, is larger, or is no UTF-8 text.
    """
    shown = f"{what} {str(path)!r}"
    if not str(path).strip():
        raise UserError(f"{what} has no name. Give its path.")
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = " For standard input, give /dev/stdin." if str(path) == "-" else " Check the path."
        raise UserError(f"cannot read {shown}: {reason}.{hint}") from error
    if len(data) > limit:
        raise UserError(f"{shown} is larger than {limit // 2**20} MiB. Split it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{shown} is no UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from error
