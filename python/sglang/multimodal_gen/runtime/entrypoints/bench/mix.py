"""A mix: the kinds of request that a load test sends, and how often each comes."""

from __future__ import annotations

import base64
import dataclasses
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from PIL import Image

from sglang.multimodal_gen.runtime.entrypoints.cli.text_file import read_text_file
from sglang.multimodal_gen.runtime.utils.errors import UserError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

CancelBy = Literal["hang_up", "route"]
Asks = Literal["picture", "edit", "video"]
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class MixEntry:
    """One kind of request.

    ``body`` is the JSON that the route of what it ``asks`` for takes (`client.ROUTES`); its seed,
    where there is none, is drawn from the test's variants. ``cancel_after`` are the seconds after
    which the client changes its mind: it hangs up, or, with a stream or a video, asks the server to
    cancel.
    """

    name: str
    body: Mapping[str, Any]
    weight: float = 1.0
    cancel_after: float | None = None
    cancel_by: CancelBy = "hang_up"
    asks: Asks = "picture"

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))

    @property
    def comparable(self) -> bool:
        """Whether what comes can be compared with what comes alone: lossless pictures."""
        return self.asks != "video" and self.body.get("output_format") in (None, "png")


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


def mix_for(tasks: Sequence[Mapping[str, Any]]) -> tuple[MixEntry, ...]:
    """The mix for a model with these tasks, as ``/v1/models`` tells them: pictures from text,
    edits and videos, as far as it makes them.
    """
    entries: list[MixEntry] = []
    drawn = _naming(tasks, "image", ("no", "may"))
    if drawn is not None:
        entries += [replace(entry, body={**entry.body, **drawn}) for entry in DEFAULT_MIX]
    edited = _naming(tasks, "image", ("may", "must"))
    if edited is not None:
        body = {"prompt": "the same at night", "num_inference_steps": 4, "image": _picture()}
        entries.append(MixEntry("edit", body | edited, 2, asks="edit"))
    small = {"prompt": "a red ball that rolls", "size": "64x64", "num_frames": 9,
             "num_inference_steps": 4}  # fmt: skip
    filmed = _naming(tasks, "video", ("no", "may"))
    if filmed is not None:
        late = {**small, "num_inference_steps": 50}
        entries.append(MixEntry("video", small | filmed, asks="video"))
        entries.append(MixEntry("video cancelled", late | filmed, 0.5, 0.5, "route", "video"))
    moved = _naming(tasks, "video", ("may", "must"))
    if moved is not None:
        body = {**small, "input_reference": {"image_url": _picture()}}
        entries.append(MixEntry("video from picture", body | moved, asks="video"))
    if not entries:
        raise UserError("the server's model takes no request of the usual mix; name one by --mix")
    return tuple(entries)


def _naming(
    tasks: Sequence[Mapping[str, Any]], makes: str, image: tuple[str, str]
) -> dict[str, str] | None:
    """What names the first task that ``makes`` this and has such a need of a picture; nothing where
    it is the only one, None where there is none.
    """
    fit = [
        task["name"] for task in tasks
        if task["makes"] == makes and task["image"] in image and task["video"] != "must"
    ]  # fmt: skip
    if not fit:
        return None
    return {} if len(fit) == 1 else {"task_type": fit[0]}


def _picture() -> str:
    """A small picture as a data URL: a red square on blue."""
    image = Image.new("RGB", (64, 64), (30, 60, 200))
    image.paste((220, 40, 40), (16, 16, 48, 48))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


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
    if entry.asks not in get_args(Asks):
        raise UserError(f"{where}: asks={entry.asks!r}: must be {' or '.join(get_args(Asks))}")
    if entry.cancel_by == "route" and not entry.streams and entry.asks != "video":
        raise UserError(f"{where}: cancel_by=route needs stream: true, which tells the job's id")
    if entry.asks == "video" and entry.cancel_after is not None and entry.cancel_by != "route":
        raise UserError(f"{where}: a video goes on without its client: use cancel_by: route")
    return replace(entry, name=str(entry.name))


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
