"""Where prompts come from: the command line, a prompt file or a config file; one source only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import is_blank
from sglang.multimodal_gen.runtime.entrypoints.cli.text_file import read_text_file
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, UserError

_SOURCES = ("prompt", "prompt_file")
_MAX_BYTES = 16 * 2**20


def read_prompts(
    said: Mapping[str, Any], configured: Mapping[str, Any], *, optional: bool
) -> list[str]:
    """The prompts of one run.

    Args:
        said: ``prompt`` (text or several) or ``prompt_file`` of the command line; wins.
        configured: the same of the config file.
        optional: whether the model works without a prompt.

    Raises:
        UserError: no source or two sources; a file that cannot be read or holds no prompt.
        InvalidRequest: a prompt is empty, and the model needs one.
    """
    for place, values in (("the command line", said), ("the config file", configured)):
        given = [name for name in _SOURCES if values.get(name) is not None]
        if len(given) > 1:
            raise UserError(f"{place} has both 'prompt' and 'prompt-file'. Give one of them.")
        if given:
            prompts = _from(given[0], values[given[0]])
            break
    else:
        if optional:
            return []
        raise UserError(
            "there is no prompt. Give --prompt TEXT, or --prompt-file FILE with one prompt a line "
            "(in a config file: prompt or prompt_file)."
        )
    for prompt in prompts:
        # Admission refuses these too, but only after the model was loaded.
        if is_blank(prompt) and not optional:
            raise InvalidRequest("prompt", prompt, "is empty. Say what to make.")
    return prompts


def _from(source: str, value: Any) -> list[str]:
    if source == "prompt_file":
        return read_prompt_file(value)
    return [value] if isinstance(value, str) else list(value)


def read_prompt_file(path: str | Path) -> list[str]:
    """One prompt a line; blank lines and lines that begin with ``#`` are skipped.

    Raises:
        UserError: the file cannot be read, is no UTF-8 text, or holds no prompt.
    """
    text = read_text_file(path, "the prompt file", limit=_MAX_BYTES)
    # Not `splitlines`, which also cuts at characters that a prompt may hold (U+2028, form feed).
    lines = [line.strip() for line in text.split("\n")]
    prompts = [line for line in lines if not is_blank(line) and not line.startswith("#")]
    if not prompts:
        raise UserError(
            f"the prompt file {str(path)!r} holds no prompt. Write one a line; '#' begins a "
            "comment."
        )
    return prompts
