"""The environment variables of this project: a typed table, and the one place that reads them.

What the libraries underneath read (``HF_HOME``, ``CUDA_VISIBLE_DEVICES``...) is theirs; what
torchrun tells the processes that it starts is read here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sglang.multimodal_gen.runtime.utils.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable: its name, how its text becomes a value, and what it is for.

    ``parse`` gets the text, empty where the variable is not set.
    """

    name: str
    parse: Callable[[str], T]
    help: str

    def read(self) -> T:
        """The value now. Whoever needs it for the life of the process keeps it."""
        return self.parse(os.environ.get(self.name, ""))


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """This process's place among those that torchrun, or a launcher like it, started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """Where rank 0 is."""


def launched_rank() -> LaunchedRank | None:
    """What the launcher of this process told it; None where it was started by itself.

    Raises:
        UserError: the variables are there, but hold no numbers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    told = {name: os.environ.get(name, "") for name in names}
    if not all(told.values()):
        return None  # some of them alone are set by schedulers of clusters, for other programs
    numbers = {name: told[name] for name in names if name != "MASTER_ADDR"}
    numbers["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", "") or told["WORLD_SIZE"]
    for name, text in numbers.items():
        if not text.isdecimal():
            raise UserError(f"environment variable {name}={text!r} must be a whole number")
    return LaunchedRank(
        rank=int(numbers["RANK"]),
        world_size=int(numbers["WORLD_SIZE"]),
        local_rank=int(numbers["LOCAL_RANK"]),
        local_world_size=int(numbers["LOCAL_WORLD_SIZE"]),
        host=told["MASTER_ADDR"],
    )


def environment_with(defaults: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for one that it starts; ``defaults`` are for what is not set."""
    return {**defaults, **os.environ}


def compiled_code_folder(temporary: str) -> str:
    """Where torch keeps what its compiler made, in this process and those after it.

    Its variable, TORCHINDUCTOR_CACHE_DIR, wins. Where that is not set it is from now on: torch's
    own choice, ``temporary``, does not outlive a restart of the machine. Some of torch's imports
    set the variable to it, which is as good as not set.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, temporary) == temporary:
        caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        os.environ[name] = str(Path(caches) / "sglang-diffusion" / "torch-compile")
    return os.environ[name]


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names, each once, in order."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


EXTERNAL_MODEL_PACKAGE = Variable(
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    _names,
    "Packages, comma separated, that register models of their own when they are imported.",
)
WEBHOOK_SECRET = Variable(
    "SGLANG_WEBHOOK_SECRET", str, "What webhooks are signed with, where --webhook-secret is not."
)
API_KEYS = Variable(
    "SGLANG_API_KEY",
    _names,
    "Keys, comma separated, one of which clients of `sglang serve` must show.",
)
VARIABLES: tuple[Variable[Any], ...] = (EXTERNAL_MODEL_PACKAGE, WEBHOOK_SECRET, API_KEYS)
"""Every variable that this project reads."""
