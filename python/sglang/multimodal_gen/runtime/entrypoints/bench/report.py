"""A load's numbers, and the table of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from sglang.multimodal_gen.runtime.entrypoints.bench.answers import Outcome
from sglang.multimodal_gen.runtime.entrypoints.bench.load import Load

_PERCENTS = (50, 90, 99)


def summary(load: Load, rate: float) -> dict[str, Any]:
    """The numbers of one load, ready for JSON; times are in seconds."""
    outcomes = load.outcomes
    kinds = Counter(outcome.kind for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.kind == "ok"]
    images = sum(outcome.images for outcome in good)
    return {
        "request_rate": rate,
        "requests": len(outcomes),
        "seconds": round(load.seconds, 4),
        **{kind: kinds[kind] for kind in ("ok", "cancelled", "rejected", "error", "lost")},
        "wrong": sum(outcome.wrong is True for outcome in good),
        "compared": sum(outcome.wrong is not None for outcome in good),
        "largest_distance": max((o.distance for o in good if o.distance is not None), default=None),
        "errors_by_code": dict(Counter(o.code for o in outcomes if o.kind in ("error", "lost"))),
        "requests_per_second": round(len(good) / load.seconds, 4),
        "images_per_second": round(images / load.seconds, 4),
        "latency": percentiles([outcome.seconds for outcome in good]),
        "queue": percentiles([o.queue_seconds for o in good if o.queue_seconds is not None]),
        "first_preview": percentiles(
            [o.first_preview for o in good if o.first_preview is not None]
        ),
        "max_waiting": load.max_waiting,
        "sent_late": percentiles([outcome.late for outcome in outcomes]),
        "by_entry": {name: _of_entry(own) for name, own in _grouped(outcomes).items()},
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and the largest; None of nothing."""
    if not values:
        return None
    points = np.percentile(values, _PERCENTS)
    found = {f"p{q}": round(float(p), 4) for q, p in zip(_PERCENTS, points, strict=True)}
    return {"mean": round(float(np.mean(values)), 4), **found, "max": round(max(values), 4)}


def table_of(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each rate."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("requests a second")
    for one in summaries:
        table.add_column(f"{one['request_rate']:g}", justify="right")
    for name, show in _ROWS:
        table.add_row(name, *(show(one) for one in summaries))
    return table


def failed(summaries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a request was lost or got a wrong picture, or the server failed at one."""
    return any(
        one["lost"] or one["wrong"] or any(outcome["status"] == 500 for outcome in one["outcomes"])
        for one in summaries
    )


def _count(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda one: "-" if one[name] is None else str(one[name])


def _point(name: str, point: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda one: "-" if one[name] is None else f"{one[name][point]:.3g}"


def _errors(one: Mapping[str, Any]) -> str:
    codes = ", ".join(f"{count} {code}" for code, count in one["errors_by_code"].items())
    return codes if one["error"] else "0"


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("requests", _count("requests")),
    ("  ok", _count("ok")),
    ("  cancelled by the client", _count("cancelled")),
    ("  rejected (429)", _count("rejected")),
    ("  errors", _errors),
    ("  lost", _count("lost")),
    ("wrong, of those compared", lambda one: f"{one['wrong']} of {one['compared']}"),
    ("images a second", lambda one: f"{one['images_per_second']:.3g}"),
    *((f"latency {point}, s", _point("latency", point)) for point in ("p50", "p90", "p99")),
    *((f"in the queue {point}, s", _point("queue", point)) for point in ("p50", "p90", "p99")),
    ("first preview p50, s", _point("first_preview", "p50")),
    ("most that waited", _count("max_waiting")),
)


def _of_entry(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    good = [outcome.seconds for outcome in outcomes if outcome.kind == "ok"]
    kinds = Counter(outcome.kind for outcome in outcomes)
    return {"requests": len(outcomes), **kinds, "latency": percentiles(good)}


def _grouped(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.entry, []).append(outcome)
    return groups
