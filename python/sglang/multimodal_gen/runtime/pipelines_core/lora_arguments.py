"""The arguments of calls that load, choose and merge adapters: checked, and one for each name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from sglang.multimodal_gen.configs.lora_choice import nickname_problem
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

MergeMode = Literal["auto", "merge", "dynamic"]


def not_loaded(name: str, known: Mapping[str, object]) -> str:
    """What is wrong with a name, which names there are, and what to do."""
    loaded = f"Loaded: {', '.join(known)}." if known else "None is loaded."
    return (
        f"no adapter of that name is loaded.{did_you_mean(name, known)} {loaded} Load it with "
        "lora_path, or give the path of its file"
    )


def check_new_name(nickname: object, path: object) -> None:
    """A nickname for a file must be text by which a request can choose it, and the path a path."""
    if (problem := nickname_problem(nickname)) is not None:
        raise InvalidArgument("lora_nickname", nickname, problem)
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).strip():
        raise InvalidArgument("lora_path", path, "must be a path")


def texts_of(field: str, value: object) -> list[str]:
    """One text or several, as a list."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(x, str) for x in found):
        raise InvalidArgument(field, value, "must be text, or a list of texts")
    return list(found)


def one_each(field: str, value: Any, count: int) -> list[Any]:
    """A list with one value for each nickname."""
    if not isinstance(value, (list, tuple)):
        if field == "lora_path" and value is not None and count > 1:
            problem = f"is one path for {count} nicknames; give a list"
            raise InvalidArgument(field, value, problem)
        return [value] * count
    if len(value) != count:
        raise InvalidArgument(field, value, f"has {len(value)} entries for {count} nicknames")
    return list(value)


def check_weight(field: str, value: Any) -> None:
    """A weight must be a finite number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or value != value or value in (float("inf"), float("-inf")):
        raise InvalidArgument(field, value, "must be a finite number")


def merge_mode_of(merge_weights: bool | None, merge_mode: MergeMode | None) -> MergeMode:
    """The mode that two arguments name together."""
    modes = ("auto", "merge", "dynamic")
    if merge_mode is not None and merge_mode not in modes:
        raise InvalidArgument("merge_mode", merge_mode, f"choose one of {', '.join(modes)}")
    if merge_weights is None:
        return merge_mode or "auto"
    said: MergeMode = "merge" if merge_weights else "dynamic"
    if merge_mode not in (None, "auto", said):
        problem = f"contradicts merge_mode={merge_mode!r}; give one of them"
        raise InvalidArgument("merge_weights", merge_weights, problem)
    return said
