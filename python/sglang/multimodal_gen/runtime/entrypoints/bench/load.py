"""A load: requests that come when they come, whether or not the server keeps up (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from sglang.multimodal_gen.runtime.entrypoints.bench.answers import Outcome, Pictures, key_of
from sglang.multimodal_gen.runtime.entrypoints.bench.client import Asker
from sglang.multimodal_gen.runtime.entrypoints.bench.mix import Arrival, MixEntry, with_seed
from sglang.multimodal_gen.runtime.utils.errors import UserError

_LOOK_SECONDS = 0.2
Tell = Callable[[Outcome], object]


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one plan. ``max_waiting`` is the longest queue seen, None where it was not told;
    ``seconds`` run from the first arrival's clock to the last answer.
    """

    outcomes: Sequence[Outcome]
    seconds: float
    max_waiting: int | None


@contextlib.asynccontextmanager
async def connected(url: str, api_key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a bound on connections: an open loop never waits for one."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=30
    ) as http:
        yield http


async def made_alone(
    http: httpx.AsyncClient,
    mix: Iterable[MixEntry],
    variants: int,
    timeout: float,
    tell: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Pictures]:
    """The picture of each request that may come, asked one by one.

    Raises:
        UserError: the server refuses one of them, or cannot be reached.
    """
    entries = [entry for entry in mix if entry.comparable and entry.cancel_after is None]
    bodies = {
        key_of(body): (entry, body)
        for entry in entries
        for body in (with_seed(entry, variant) for variant in range(variants))
    }
    asker, alone = Asker(http, {}, timeout), {}
    for done, (key, (entry, body)) in enumerate(bodies.items()):
        tell(done, len(bodies))
        try:
            alone[key] = await asker.pictures(entry.asks, body)
        except httpx.HTTPStatusError as error:
            told = error.response.text[:300]
            raise UserError(f"the server refuses {entry.name!r} of the mix: {told}") from error
        except httpx.HTTPError as error:
            raise UserError(f"the server does not answer ({type(error).__name__})") from error
    tell(len(bodies), len(bodies))
    return alone


async def run_load(
    http: httpx.AsyncClient,
    arrivals: Sequence[Arrival],
    alone: Mapping[str, Pictures],
    timeout: float,
    tell: Tell = lambda outcome: None,
) -> Load:
    """Send each request at its time, and wait for all answers."""
    asker = Asker(http, alone, timeout)
    outcomes: list[Outcome] = []
    start = time.perf_counter()

    async def one(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - start)))
        late = time.perf_counter() - start - arrival.at
        outcome = await asker.ask(arrival, late)
        outcomes.append(outcome)
        tell(outcome)

    ended = asyncio.Event()
    watching = asyncio.ensure_future(_longest_queue(http, ended))
    try:
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                group.create_task(one(arrival))
        seconds = time.perf_counter() - start
    finally:
        ended.set()
        longest = await watching
    return Load(tuple(outcomes), seconds, longest)


async def _longest_queue(http: httpx.AsyncClient, ended: asyncio.Event) -> int | None:
    """The longest queue that was seen until the end."""
    longest: int | None = None
    while not ended.is_set():
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            info = (await http.get("/server_info")).json()
            longest = max(longest or 0, info["queue"]["waiting"])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_SECONDS)
    return longest


async def until_idle(http: httpx.AsyncClient, seconds: float) -> None:
    """Wait until nothing waits or runs, so that one rate does not burden the next."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            queue = (await http.get("/server_info")).json()["queue"]
            if not queue["waiting"] and not queue["running"]:
                return
        await asyncio.sleep(_LOOK_SECONDS)
