"""A mix: the kinds of request that a load test sends, and how often each comes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from sglang.multimodal_gen.runtime.entrypoints.cli.text_file import read_text_file
from sglang.multimodal_gen.runtime.utils.errors import UserError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

CancelBy = Literal["hang_up", "route"]
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class MixEntry:
    """One kind of request.

    ``body`` is what ``/v1/images/generations`` takes; its seed, where there is none, is drawn from
    the test's variants. ``cancel_after`` are the seconds after which the client changes its mind:
    it hangs up, or, with a stream, asks the server to cancel.
    """

    name: str
    body: Mapping[str, Any]
    weight: float = 1.0
    cancel_after: float | None = None
    cancel_by: CancelBy = "hang_up"

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))

    @property
    def comparable(self) -> bool:
        """Whether equal pictures have equal bytes: of lossless formats alone."""
        return self.body.get("output_format") in (None, "png")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a plan: ``at`` seconds after the start."""

    at: float
    entry: MixEntry
    body: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_MIX = (
    MixEntry("small", {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 4}, 4),
    MixEntry("usual", {"prompt": "a large blue square", "num_inference_steps": 8}, 2),
    MixEntry(
        "wide",
        {"prompt": "a yellow star above a green triangle", "size": "128x64",
         "num_inference_steps": 6},
    ),
    MixEntry("three", {"prompt": "a blue star", "n": 3, "size": "64x64", "num_inference_steps": 4}),
    MixEntry(
        "stream",
        {"prompt": "two small green triangles", "size": "64x64", "num_inference_steps": 8,
         "stream": True, "partial_images": 2},
    ),
    MixEntry(
        "cancelled",
        {"prompt": "a red star", "num_inference_steps": 50, "stream": True},
        0.5,
        cancel_after=0.5,
        cancel_by="route",
    ),
)  # fmt: skip
"""Sizes, steps, counts, a stream, and a client that changes its mind; weights as given."""


def read_mix(path: str) -> tuple[MixEntry, ...]:
    """The entries of a file: a list, or a mapping with ``requests``.

    Raises:
        UserError: names the file, the entry and the remedy.
    """
    text = read_text_file(Path(path), "the mix file", limit=_MAX_BYTES)
    try:
        raw = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is neither YAML nor JSON ({error})") from error
    entries = raw.get("requests") if isinstance(raw, dict) else raw
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: must hold a list of requests, each with a name and a body")
    return tuple(_entry(path, index, each) for index, each in enumerate(entries))


def plan(
    mix: Sequence[MixEntry], *, rate: float, count: int, seed: int, variants: int
) -> list[Arrival]:
    """``count`` requests in the order of their coming, ``rate`` a second on average (a Poisson
    process); the same for the same arguments.
    """
    chance = random.Random(f"{seed}:{rate}")
    weights = [entry.weight for entry in mix]
    now, arrivals = 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        (entry,) = chance.choices(mix, weights)
        arrivals.append(Arrival(now, entry, with_seed(entry, chance.randrange(variants))))
    return arrivals


def with_seed(entry: MixEntry, variant: int) -> dict[str, Any]:
    """The body of an entry, with the seed of a variant unless it has its own."""
    return {"seed": 1000 + variant, **entry.body}


def _entry(path: str, index: int, raw: Any) -> MixEntry:
    where = f"{path}: request {index + 1}"
    if not isinstance(raw, dict):
        raise UserError(f"{where}: must be a mapping with a name and a body")
    known = [part.name for part in dataclasses.fields(MixEntry)]
    for name in raw:
        if name not in known:
            raise UserError(f"{where}: there is no {name!r}.{did_you_mean(str(name), known)}")
    entry = MixEntry(**{"name": f"request {index + 1}", "body": None, **raw})
    if not isinstance(entry.body, dict) or not all(isinstance(name, str) for name in entry.body):
        raise UserError(f"{where}: 'body' must map the settings of a request to their values")
    if not _positive(entry.weight):
        raise UserError(f"{where}: weight={entry.weight!r}: must be a number above 0")
    if entry.cancel_after is not None and not _positive(entry.cancel_after):
        raise UserError(f"{where}: cancel_after={entry.cancel_after!r}: must be seconds above 0")
    if entry.cancel_by not in ("hang_up", "route"):
        raise UserError(f"{where}: cancel_by={entry.cancel_by!r}: must be hang_up or route")
    if entry.cancel_by == "route" and not entry.streams:
        raise UserError(f"{where}: cancel_by=route needs stream: true, which tells the job's id")
    return dataclasses.replace(entry, name=str(entry.name))


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
