"""Which batches of different requests may run as one, how they are joined, and taken apart again.

An image does not depend on its batch: it has its own prompt, negative prompt, seed and generator.
All else is shared by the images of a batch, so all else is compared, field by field: a new sampling
field, or a new field of `Req`, separates requests unless it is named here or says of itself that it
is each image's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    OutputBatch,
    Req,
    RequestControl,
)

PER_IMAGE_SETTINGS = frozenset({"prompt", "negative_prompt", "seed", "num_outputs_per_prompt"})
"""Sampling fields in which the requests of one batch may differ. A family's own field joins them
by ``field(metadata={"per_image": True})``."""

PER_IMAGE_FIELDS = frozenset({"prompt", "negative_prompt", "seeds", "previews"})
"""The same for `Req`."""

NOT_COMPARED = frozenset(
    {"request", "request_id", "control", "warnings", "warned_images", "timings", "resume_from"}
    | {"step_cache"}
)
"""Fields of `Req` that say whose batch it is, or what became of it; ``request`` is compared by its
own fields, and ``resume_from`` keeps its whole request alone (`waiting_line.Ticket`)."""


def signature(batch: Req) -> Hashable:
    """What batches must have in common to run as one."""
    request = batch.request
    settings = tuple(
        (f.name, _frozen(getattr(request, f.name)))
        for f in fields(request)
        if f.name not in PER_IMAGE_SETTINGS and not f.metadata.get("per_image")
    )
    admitted = tuple(
        (f.name, _frozen(getattr(batch, f.name)))
        for f in fields(batch)
        if f.init
        and not f.metadata.get("stage")
        and f.name not in PER_IMAGE_FIELDS
        and f.name not in NOT_COMPARED
    )
    # Guidance takes a negative prompt of every image, or of none.
    return (type(request), settings, admitted, batch.negative_prompt is None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The images of one part within a joined batch: ``start`` up to ``stop``."""

    start: int
    stop: int

    @property
    def indices(self) -> range:
        """The images' numbers in the joined batch."""
        return range(self.start, self.stop)


def join(parts: Sequence[Req], control: RequestControl) -> tuple[Req, list[Rows]]:
    """One batch of all images of ``parts``, in order, and where each part's images are in it.

    ``parts`` have one signature and stay as they are, so that each can still run alone. What
    admission warned of stays with the part.
    """
    rows, start = [], 0
    for part in parts:
        rows.append(Rows(start, start + part.batch_size))
        start += part.batch_size
    first = parts[0]
    negatives = [text for part in parts for text in part.negative_prompt or ()]
    request = first.request
    if len(parts) > 1:
        request = dataclasses.replace(
            request,
            prompt=tuple(text for part in parts for text in part.prompt),
            seed=tuple(seed for part in parts for seed in part.seeds),
            num_outputs_per_prompt=1,
        ).seal()
    joined = dataclasses.replace(
        first,
        request=request,
        request_id="+".join(dict.fromkeys(part.request_id for part in parts)),
        prompt=[text for part in parts for text in part.prompt],
        negative_prompt=None if first.negative_prompt is None else negatives,
        seeds=[seed for part in parts for seed in part.seeds],
        previews=_previews(parts),
        image_path=list(first.image_path),
        video_path=list(first.video_path),
        control=control,
        warnings=[],
        warned_images={},
        timings={},
        step_cache=None,
    )
    return joined, rows


def part_of(output: OutputBatch, part: Req, rows: Rows) -> OutputBatch:
    """What a joined batch made for one of its parts: its images, and the warnings about them.

    Times and peak memory are those of the whole batch.
    """
    heard = [
        text
        for text in output.warnings
        if text not in output.warned_images
        or any(image in rows.indices for image in output.warned_images[text])
    ]
    return OutputBatch(
        request_id=part.request_id,
        output=output.output[rows.start : rows.stop],
        prompt=part.prompt,
        seeds=part.seeds,
        timings=dict(output.timings),
        peak_memory_mb=output.peak_memory_mb,
        warnings=list(dict.fromkeys([*part.warnings, *heard])),
        fps=output.fps,
        step_cache=output.step_cache and output.step_cache.rows(rows.start, rows.stop),
    )


def _previews(parts: Sequence[Req]) -> list[int]:
    """One count an image where anybody wants to see something."""
    if not any(part.previews for part in parts):
        return []
    return [count for part in parts for count in part.previews or [0] * part.batch_size]


def _frozen(value: object) -> Hashable:
    """A value as something that can be compared and hashed, lists and mappings included."""
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value if isinstance(value, Hashable) else repr(value)
