"""One simulated client: sends a request, hears its answer, or changes its mind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang.multimodal_gen.runtime.entrypoints.bench.answers import (
    TOLERANCE,
    Kind,
    Outcome,
    Pictures,
    distance,
    key_of,
    pictures_of,
)
from sglang.multimodal_gen.runtime.entrypoints.bench.mix import Arrival, Asks, MixEntry

ROUTES: Mapping[Asks, str] = {
    "picture": "/v1/images/generations",
    "edit": "/v1/images/edits",
    "video": "/v1/videos",
}
"""Where what an entry asks for is asked."""
_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class _Heard:
    """What an answer said so far."""

    status: int | None = None
    code: str | None = None
    texts: dict[int, str] = field(default_factory=dict)
    clips: int = 0
    queue_seconds: float | None = None
    first_preview: float | None = None
    job_id: str | None = None


class Asker:
    """Sends requests to one server, and judges the answers by ``alone``: pictures by `key_of`."""

    def __init__(
        self, http: httpx.AsyncClient, alone: Mapping[str, Pictures], timeout: float
    ) -> None:
        self.http = http
        self.alone = alone
        self.timeout = timeout

    async def ask(self, arrival: Arrival, late: float) -> Outcome:
        """One request from start to end; never raises for what the server does."""
        entry, heard, begin = arrival.entry, _Heard(), time.perf_counter()
        changed_mind = hung_up = False
        asking = asyncio.ensure_future(self._exchange(arrival, heard, begin))
        try:
            async with asyncio.timeout(self.timeout):
                if entry.cancel_after is not None:
                    await asyncio.wait({asking}, timeout=entry.cancel_after)
                    if not asking.done():
                        changed_mind = True
                        hung_up = await self._cancel(entry, heard, asking)
                await asyncio.gather(asking, return_exceptions=hung_up)
        except (TimeoutError, httpx.HTTPError, httpx.StreamError) as error:
            heard.code = type(error).__name__
            return await self._outcome(arrival, late, begin, heard, "lost")
        except (KeyError, TypeError, ValueError):  # an answer, but none of this API
            heard.code = f"bad_answer_{heard.status}"
        finally:
            asking.cancel()
        if hung_up or (changed_mind and heard.code == "cancelled"):
            return await self._outcome(arrival, late, begin, heard, "cancelled")
        if heard.status == 429:
            return await self._outcome(arrival, late, begin, heard, "rejected")
        kind = "ok" if heard.code is None else "error"
        return await self._outcome(arrival, late, begin, heard, kind)

    async def pictures(self, asks: Asks, body: Mapping[str, Any]) -> Pictures:
        """The pictures that a request gets when nothing else is asked.

        Raises:
            httpx.HTTPStatusError: it was refused.
        """
        plain = {k: v for k, v in body.items() if k not in ("stream", "partial_images")}
        response = await self.http.post(ROUTES[asks], json=plain, timeout=self.timeout)
        response.raise_for_status()
        return pictures_of([each["b64_json"] for each in response.json()["data"]])

    async def _cancel(self, entry: MixEntry, heard: _Heard, asking: asyncio.Future[None]) -> bool:
        """Change one's mind; whether the line was cut, so that nothing more will be heard."""
        if entry.cancel_by == "route" and heard.job_id is not None:
            await self.http.post(f"/v1/jobs/{heard.job_id}/cancel", timeout=self.timeout)
            return False
        asking.cancel()
        return True

    async def _exchange(self, arrival: Arrival, heard: _Heard, begin: float) -> None:
        if arrival.entry.asks == "video":
            await self._video(arrival, heard)
            return
        async with self.http.stream(
            "POST", ROUTES[arrival.entry.asks], json=dict(arrival.body), timeout=None
        ) as response:
            heard.status = response.status_code
            heard.job_id = response.headers.get("x-job-id")
            if response.status_code != 200 or not arrival.entry.streams:
                _read_reply(json.loads(await response.aread()), heard)
                return
            async for event, data in _events(response):
                _read_event(event, data, heard, time.perf_counter() - begin)
            if not heard.texts and heard.code is None:
                raise httpx.RemoteProtocolError("the stream ended without its last event")

    async def _video(self, arrival: Arrival, heard: _Heard) -> None:
        """Ask for a video, look until it has ended, and fetch what was made."""
        route = ROUTES["video"]
        response = await self.http.post(route, json=dict(arrival.body), timeout=None)
        while True:
            heard.status, video = response.status_code, json.loads(response.content)
            if response.status_code != 200:
                heard.code = video["error"]["code"] or f"http_{heard.status}"
                return
            heard.job_id = video["id"]
            if video["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(_LOOK_SECONDS)
            response = await self.http.get(f"{route}/{heard.job_id}", timeout=None)
        if video["status"] != "completed":
            told = video.get("error") or {}
            heard.code = told.get("code") or video["status"]
            return
        for index in range(arrival.body.get("n") or 1):
            place = f"{route}/{heard.job_id}/content"
            response = await self.http.get(place, params={"index": index}, timeout=None)
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith(("video/", "image/")):
                heard.code = f"bad_video_{response.status_code}"
                return
            heard.clips += bool(response.content)

    async def _outcome(
        self, arrival: Arrival, late: float, begin: float, heard: _Heard, kind: Kind
    ) -> Outcome:
        seconds = time.perf_counter() - begin
        facts: dict[str, Any] = {}
        if kind == "ok":
            facts["images"] = len(heard.texts) + heard.clips
            alone = self.alone.get(key_of(arrival.body)) if arrival.entry.comparable else None
            if alone is not None:  # in a thread: decoding must not make the next request late
                facts["distance"] = await asyncio.to_thread(_distance, heard, alone)
                facts["wrong"] = facts["distance"] > TOLERANCE
        return Outcome(
            entry=arrival.entry.name,
            kind=kind,
            at=arrival.at,
            late=late,
            seconds=seconds,
            code=heard.code,
            status=heard.status,
            queue_seconds=heard.queue_seconds,
            first_preview=heard.first_preview,
            **facts,
        )


def _distance(heard: _Heard, alone: Pictures) -> int:
    try:
        return distance(pictures_of([heard.texts[index] for index in sorted(heard.texts)]), alone)
    except (OSError, ValueError):  # what came is no picture
        return 255


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    event = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


def _read_event(event: str, data: dict[str, Any], heard: _Heard, now: float) -> None:
    if event == "error":
        heard.code = data["error"]["code"] or "error"
    elif event.endswith(".completed"):
        heard.texts[data.get("image_index", 0)] = data["b64_json"]
    elif heard.first_preview is None:
        heard.first_preview = now


def _read_reply(reply: dict[str, Any], heard: _Heard) -> None:
    if "error" in reply:
        heard.code = reply["error"]["code"] or f"http_{heard.status}"
        return
    heard.texts = {index: each["b64_json"] for index, each in enumerate(reply["data"])}
    heard.queue_seconds = reply["seconds"]["queue"]
