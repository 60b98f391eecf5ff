"""Transformers without its progress bars, for work that has a progress of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_library_bars() -> Iterator[None]:
    """No bars of the library inside; as before afterwards."""
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
