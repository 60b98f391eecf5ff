"""The standard streams of a command: never a reason to fail."""

from __future__ import annotations

import io
import os
import sys


def make_usable() -> None:
    """Let printing never fail for a stream that is closed or cannot show a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output() -> None:
    """Send what standard output still holds nowhere, after it refused something.

    Python flushes it once more when it ends, and would put its own exit code, 120, over ours.
    """
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # one in memory, or closed
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
