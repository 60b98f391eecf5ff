"""What the libraries say while they work, as sentences instead of lines on standard error."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

_LIBRARIES = ("diffusers", "transformers")
_FOR_DEVELOPERS = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        _add(self.messages, record.getMessage())


@contextlib.contextmanager
def library_messages() -> Iterator[list[str]]:
    """Collects the libraries' warnings, each once; the list is complete at the end of the block.

    Their handlers, levels and progress bars are put aside for the block, and back after it: who
    quiets a library's log does not lose what concerns his picture.
    """
    messages: list[str] = []
    collector = _Collector(messages)
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(x, x.handlers, x.propagate, x.level) for x in loggers]
    with _without_bars(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for logger in loggers:
                logger.handlers, logger.propagate = [collector], False
                logger.setLevel(logging.WARNING)
            yield messages
        finally:
            for logger, handlers, propagate, level in before:
                logger.handlers, logger.propagate = handlers, propagate
                logger.setLevel(level)
            for warning in caught:
                if not issubclass(warning.category, _FOR_DEVELOPERS):
                    _add(messages, str(warning.message))


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    active = [
        module
        for module in (diffusers_logging, transformers_logging)
        if module.is_progress_bar_enabled()
    ]
    try:
        for module in active:
            module.disable_progress_bar()
        yield
    finally:
        for module in active:
            module.enable_progress_bar()


def _add(messages: list[str], text: str) -> None:
    sentence = " ".join(text.split())
    if sentence not in messages:
        messages.append(sentence)
