"""How much a client may ask for in a minute: requests, pictures and their pixels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from sglang.multimodal_gen.runtime.server_args.guard_section import GuardArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, RateLimited

_KILO = 1000  # pixels are counted in thousands, rounded up


@dataclass(frozen=True, slots=True)
class _Rule:
    """One budget: what it counts, and how much of it a minute has."""

    name: str
    words: str
    item: RateLimitItemPerMinute


class Budgets:
    """The budgets of all clients, over a sliding minute, in this process's memory."""

    def __init__(self, guard: GuardArgs) -> None:
        self._window = SlidingWindowCounterRateLimiter(MemoryStorage())
        most = guard.megapixels_per_minute
        kilopixels = None if most is None else max(1, round(most * 1_000_000 / _KILO))
        self._requests = _rule("requests", "requests", guard.requests_per_minute)
        self._images = _rule("images", "pictures", guard.images_per_minute)
        self._pixels = _rule("kilopixels", "thousand pixels", kilopixels)

    def take_request(self, who: str) -> None:
        """Book one request.

        Raises:
            RateLimited: there was no more.
        """
        if self._requests is not None and not self._window.hit(self._requests.item, who):
            raise self._used_up(self._requests, who)

    def charge(self, who: str, images: int, pixels: int) -> Callable[[], object]:
        """Check pictures against the budget; the answer books them.

        Raises:
            RateLimited: not now.
            InvalidRequest: they are more than a whole minute's.
        """
        costs = [(self._images, images), (self._pixels, math.ceil(pixels / _KILO))]
        asked = [(rule, cost) for rule, cost in costs if rule is not None]
        for rule, cost in asked:
            if cost > rule.item.amount:
                problem = f"{cost} {rule.words}; a client has {rule.item.amount} a minute here"
                raise InvalidRequest("n", images, problem)
            if not self._window.test(rule.item, who, cost=cost):
                raise self._used_up(rule, who)

        def book() -> None:
            for rule, cost in asked:
                self._window.hit(rule.item, who, cost=cost)

        return book

    def headers(self, who: str) -> Iterator[tuple[str, str]]:
        """What is left, in the headers that OpenAI's clients know."""
        for rule in (self._requests, self._images, self._pixels):
            if rule is None:
                continue
            left = self._window.get_window_stats(rule.item, who)
            yield f"x-ratelimit-limit-{rule.name}", str(rule.item.amount)
            yield f"x-ratelimit-remaining-{rule.name}", str(max(0, left.remaining))
            yield f"x-ratelimit-reset-{rule.name}", f"{_seconds_until(left.reset_time)}s"

    def _used_up(self, rule: _Rule, who: str) -> RateLimited:
        seconds = _seconds_until(self._window.get_window_stats(rule.item, who).reset_time)
        message = f"the limit of {rule.item.amount} {rule.words} a minute is reached"
        return RateLimited(message, retry_after=seconds)


def _rule(name: str, words: str, amount: int | None) -> _Rule | None:
    return None if amount is None else _Rule(name, words, RateLimitItemPerMinute(amount, 1, name))


def _seconds_until(moment: float) -> int:
    return max(1, math.ceil(moment - time.time()))
