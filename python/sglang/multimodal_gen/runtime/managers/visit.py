"""Who asks, while a request is looked after: known to whatever works for it, from door to record.

A door opens a visit around each request (`visiting`). What is made meanwhile (records, files) is
the visitor's, and a budget is charged, without every route having to think of it. Work of the
server itself has no visit, and sees everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

Charge = Callable[[int, int], Callable[[], object]]
"""Given images and pixels: raises where they are too many, else returns what books them."""


@dataclass(eq=False, slots=True)
class Visit:
    """One request of a client.

    ``client`` is who it is, where clients have keys; ``sees_all`` is the operator's. ``facts`` are
    what the request's log line will say.
    """

    request_id: str = ""
    client: str | None = None
    sees_all: bool = True
    charge: Charge | None = None
    facts: dict[str, Any] = field(default_factory=dict)


_VISIT: ContextVar[Visit | None] = ContextVar("visit", default=None)


@contextlib.contextmanager
def visiting(visit: Visit) -> Iterator[Visit]:
    """Make ``visit`` the current one of this task, and of threads and tasks that it starts."""
    token = _VISIT.set(visit)
    try:
        yield visit
    finally:
        _VISIT.reset(token)


def current_visit() -> Visit | None:
    """The visit that is being looked after here."""
    return _VISIT.get()


def current_client() -> str | None:
    """Whose a record or file is that is made now; None where clients have no keys."""
    visit = _VISIT.get()
    return None if visit is None else visit.client


def may_see(client: str | None) -> bool:
    """Whether the current visitor may know of what is ``client``'s."""
    visit = _VISIT.get()
    return visit is None or visit.sees_all or (client is not None and visit.client == client)


def charge(parts: Sequence[Req]) -> Callable[[], object]:
    """Check an admitted request against the visitor's budget; call the answer once it is taken.

    Raises:
        RateLimited: the budget is used up for now.
        InvalidRequest: it is more than a minute's whole budget.
    """
    visit = _VISIT.get()
    if visit is None or visit.charge is None:
        return lambda: None
    images = sum(part.batch_size for part in parts)
    pixels = sum(part.batch_size * part.height * part.width * part.num_frames for part in parts)
    return visit.charge(images, pixels)
