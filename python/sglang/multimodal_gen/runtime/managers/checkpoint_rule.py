"""When the state of a running batch is worth keeping: logic alone, with a clock handed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """Every ``steps`` steps or ``seconds`` seconds, whichever comes first; 0 leaves one out."""

    steps: int = 0
    seconds: float = 0.0

    def due(self, steps_since: int, seconds_since: float) -> bool:
        """Whether a state is due, so long after the last one or the start."""
        by_steps = self.steps > 0 and steps_since >= self.steps
        by_time = self.seconds > 0 and seconds_since >= self.seconds
        return by_steps or by_time
