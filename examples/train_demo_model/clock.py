"""Time: what a stage has spent, what it may spend, and the line that says so."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path


class Log:
    """Progress on the terminal and, as one JSON record a line, in ``log.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, stage: str, **fields: float | int | str) -> None:
        """Says one thing that happened."""
        record: dict[str, float | int | str] = {"t": round(self.seconds(), 1), "stage": stage}
        record |= {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        words = " ".join(f"{k}={v}" for k, v in record.items() if k not in ("t", "stage"))
        print(f"[{record['t']:6.1f}s] {stage}: {words}", flush=True)

    def seconds(self) -> float:
        """Since this piece began."""
        return time.monotonic() - self.start


@dataclass
class Clock:
    """Progress of one stage over all pieces, measured in seconds of training or in steps.

    A stage is planned in seconds, because that is what a lent GPU has; ``total_steps`` makes it
    reproducible instead. The first steps of a piece (compilation) cost wall time, not progress.
    """

    total_seconds: float
    total_steps: int | None
    deadline: float
    """``time.monotonic()`` at which this piece must hand over."""
    steps: int = 0
    seconds: float = 0.0
    free_steps: int = 5

    def __post_init__(self) -> None:
        self._last = time.monotonic()
        self._steps_here = 0
        self._finish: tuple[float, float] | None = None

    def tick(self) -> None:
        """After each step."""
        now = time.monotonic()
        self.steps += 1
        self._steps_here += 1
        if self._steps_here > self.free_steps:
            self.seconds += now - self._last
        self._last = now

    def pause(self) -> None:
        """After work that is no training (an evaluation, a save)."""
        self._last = time.monotonic()

    def finish_here(self) -> None:
        """Plans the stage to end exactly at this piece's deadline."""
        if self.total_steps is None:
            now = time.monotonic()
            left = max(self.deadline - now, 1.0)
            self._finish = (now, self.seconds / (self.seconds + left))

    @property
    def fraction(self) -> float:
        """Share of the stage that is done, 0..1."""
        if self.total_steps is not None:
            return min(self.steps / self.total_steps, 1.0)
        if self._finish is not None:
            begin, share = self._finish
            passed = (time.monotonic() - begin) / max(self.deadline - begin, 1e-6)
            return min(share + (1 - share) * passed, 1.0)
        return min(self.seconds / self.total_seconds, 1.0)

    @property
    def done(self) -> bool:
        """True when the stage is complete."""
        return self.fraction >= 1.0

    @property
    def out_of_time(self) -> bool:
        """True when this piece has to stop."""
        return time.monotonic() >= self.deadline

    def eta(self) -> float:
        """Seconds of training that the stage still needs, at the speed so far."""
        share = self.fraction
        if self._finish is not None:
            return max(self.deadline - time.monotonic(), 0.0)
        return self.seconds / share * (1 - share) if share > 0 else float("nan")

    def state(self) -> dict[str, float | int]:
        """What a later piece resumes from."""
        return {"steps": self.steps, "seconds": self.seconds}


def learning_rate(
    peak: float, fraction: float, steps: int, *, warmup: int, decay_from: float
) -> float:
    """Linear warm-up, constant, then linear to zero over the last part of the stage."""
    warm = min((steps + 1) / warmup, 1.0)
    decay = min((1.0 - fraction) / (1.0 - decay_from), 1.0)
    return peak * warm * max(decay, 0.0)
