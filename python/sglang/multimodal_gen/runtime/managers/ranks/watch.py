"""When an order has gone wrong without a word: the rule, apart from clocks and processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sglang.multimodal_gen.runtime.managers.ranks.messages import Beat

ALONE_SECONDS = 5.0
"""How long the others may take to report the end of an order that failed on one rank."""
LOADING_SECONDS = 120.0
"""`Patience` while a model loads: a process starts, and disks may be slow."""
_QUIET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: without a sign of life, and doing nothing while others wait."""

    silent: float = 8.0
    stalled: float = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks are to blame, and the words for it."""

    ranks: tuple[int, ...]
    problem: str


@dataclass(slots=True)
class Watch:
    """What is known of the ranks of one order; times are seconds of one clock.

    Neither a long computation nor a wait for something outside is taken for a hang: a rank is
    blamed when it uses no processor and waits for no rank, while another works, waits or has
    finished. Ranks that all wait for each other are stuck, too.
    """

    started: float
    patience: Patience = field(default_factory=Patience)
    heard: dict[int, float] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    stalled_since: dict[int, float] = field(default_factory=dict)
    stuck: tuple[frozenset[int], float] | None = None

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """A rank gave a sign of life."""
        self.heard[rank] = now
        self.beats[rank] = beat

    def verdict(
        self, working: Collection[int], ended: Collection[int], now: float
    ) -> Verdict | None:
        """Whether some of the ranks still ``working`` will never finish; ask it often."""
        limit = self.patience
        silent = [r for r in working if now - self.heard.get(r, self.started) > limit.silent]
        if silent:
            return Verdict(tuple(silent), f"gave no sign of life for {limit.silent:.0f} seconds")
        quiet = [r for r in working if self._idle(r, _QUIET_SECONDS) and not self.beats[r].waiting]
        alone = len(quiet) == len(working) and not ended
        kept = {} if alone else {r: self.stalled_since.get(r, now) for r in quiet}
        self.stalled_since = kept
        stalled = tuple(r for r, since in kept.items() if now - since > limit.stalled)
        if stalled:
            problem = f"did nothing for {limit.stalled + _QUIET_SECONDS:.0f} seconds"
            return Verdict(stalled, f"{problem} while other ranks went on or were done")
        if self._stuck(frozenset(working), now):
            problem = f"waited {limit.stalled:.0f} seconds for each other in vain"
            return Verdict(tuple(working), problem)
        return None

    def _stuck(self, working: frozenset[int], now: float) -> bool:
        """Whether all that still work have waited too long, since the last other one ended.

        Since then, for the end of one may be what the others waited for, and their last sign of
        life be of before it.
        """
        if not all(self._idle(r, _QUIET_SECONDS) and self.beats[r].waiting for r in working):
            self.stuck = None
            return False
        if self.stuck is None or self.stuck[0] != working:
            self.stuck = (working, now)
        long = now - self.stuck[1] >= self.patience.stalled - _QUIET_SECONDS
        return long and all(self._idle(r, self.patience.stalled) for r in working)

    def stacks(self, ranks: Collection[int]) -> Mapping[int, str]:
        """What those ranks were doing, as far as they said."""
        return {r: self.beats[r].stack for r in ranks if r in self.beats and self.beats[r].stack}

    def _idle(self, rank: int, seconds: float) -> bool:
        return rank in self.beats and self.beats[rank].idle_seconds >= seconds
