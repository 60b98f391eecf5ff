"""The comparison of two traces: a list of measurements, each with its limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.multimodal_gen.runtime.verify.measure import (
    FINAL_LIMIT,
    FORWARD_LIMIT,
    largest_difference,
    relative_l2,
)

from parity.trace import Branch, Trace

PIXEL_LIMIT = 1 / 255
"""Largest difference of one pixel, in 0..1; one level of a stored image."""


@dataclass(frozen=True)
class Measurement:
    """How far one thing is off, and how far it may be; infinite where it cannot be compared."""

    what: str
    measured: float
    limit: float

    @property
    def kept(self) -> bool:
        """Whether the limit is kept."""
        return self.measured <= self.limit


@dataclass(frozen=True)
class Report:
    """All measurements of one comparison, in the order of the run."""

    measurements: tuple[Measurement, ...]

    @property
    def broken(self) -> tuple[Measurement, ...]:
        """Those over their limit; the first one is where the runs part."""
        return tuple(m for m in self.measurements if not m.kept)

    def worst(self, start: str) -> float:
        """Largest value among the measurements whose name starts with `start`."""
        return max(m.measured for m in self.measurements if m.what.startswith(start))

    def __str__(self) -> str:
        return "\n".join(
            f"{'    ' if m.kept else 'OFF '}{m.what:<48} {m.measured:9.2e}  limit {m.limit:.0e}"
            for m in self.measurements
        )


def compare(measured: Trace, expected: Trace) -> Report:
    """Compare from the noise to the stored picture."""
    return Report(tuple(_measurements(measured, expected)))


def _measurements(measured: Trace, expected: Trace) -> Iterator[Measurement]:
    yield Measurement("noise, bit for bit", relative_l2(measured.noise, expected.noise), 0.0)
    yield Measurement("timesteps", relative_l2(measured.timesteps, expected.timesteps), 0.0)
    yield Measurement("sigmas", relative_l2(measured.sigmas, expected.sigmas), 0.0)
    yield _counts("number of steps", len(measured.steps), len(expected.steps))
    for index, (ours, theirs) in enumerate(zip(measured.steps, expected.steps, strict=False)):
        where = f"step {index}"
        latents = relative_l2(ours.latents, theirs.latents)
        yield Measurement(f"{where}: latents", latents, FORWARD_LIMIT)
        yield _counts(f"{where}: guidance branches", len(ours.branches), len(theirs.branches))
        pairs = zip(ours.branches, theirs.branches, strict=False)
        for side, pair in zip(("positive", "negative"), pairs, strict=False):
            yield from _branch(f"{where}, {side}", *pair)
    yield Measurement(
        "final latents", relative_l2(measured.final_latents, expected.final_latents), FINAL_LIMIT
    )
    # A pixel may be one level off by rounding; the whole picture may not drift.
    yield Measurement("picture", relative_l2(measured.pixels, expected.pixels), FINAL_LIMIT)
    yield Measurement("pixels", largest_difference(measured.pixels, expected.pixels), PIXEL_LIMIT)
    yield Measurement(
        "stored image, levels", largest_difference(measured.images, expected.images), 1.0
    )


def _branch(where: str, measured: Branch, expected: Branch) -> Iterator[Measurement]:
    for name in dict.fromkeys((*expected.inputs, *measured.inputs)):
        both = name in measured.inputs and name in expected.inputs
        off = relative_l2(measured.inputs[name], expected.inputs[name]) if both else float("inf")
        yield Measurement(f"{where}: input {name}", off, FORWARD_LIMIT)
    off = relative_l2(measured.prediction, expected.prediction)
    yield Measurement(f"{where}: prediction", off, FORWARD_LIMIT)


def _counts(what: str, measured: int, expected: int) -> Measurement:
    return Measurement(what, float(abs(measured - expected)), 0.0)
