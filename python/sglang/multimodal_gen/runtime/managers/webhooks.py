"""Webhooks: who is told that a job has ended, and how often that is tried.

Messages are signed as standardwebhooks.com says, which OpenAI's clients verify too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import tenacity
from sqlalchemy import delete, select, update

from sglang.multimodal_gen.runtime.managers.storage.database import Database, webhooks
from sglang.multimodal_gen.runtime.managers.url_policy import (
    UrlPolicy,
    UrlRefused,
    check_url,
    resolve,
)
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_AT_ONCE = 16
_LOOK_SECONDS = 0.5
_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """How often a message is tried: after 1, 2, 4 ... seconds, at most ``max_seconds`` apart."""

    attempts: int = 8
    first_seconds: float = 1.0
    max_seconds: float = 600.0

    def wait(self, attempt: int) -> float:
        """Seconds until the next try, after ``attempt`` tries."""
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempt
        rule = tenacity.wait_exponential(multiplier=self.first_seconds, max=self.max_seconds)
        return float(rule(state))

    def is_last(self, attempt: int) -> bool:
        """Whether there is no further try after ``attempt`` tries."""
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempt
        return tenacity.stop_after_attempt(self.attempts)(state)


def signature(secret: str, message_id: str, timestamp: int, body: str) -> str:
    """``v1,`` and the HMAC-SHA256 of id, time and body, in base64."""
    signed = f"{message_id}.{timestamp}.{body}".encode()
    digest = hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode('ascii')}"


def secret_bytes(secret: str) -> bytes:
    """A secret as bytes; one that begins with ``whsec_`` is base64 after that.

    Raises:
        ValueError: it is not.
    """
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("is not base64 after 'whsec_'") from error


class WebhookSender:
    """Sends what the database says is due; several servers share the work.

    A try is counted before it is made: a server that dies in it leaves a message that is sent
    again later, so receivers may get one twice, and know it by its id.
    """

    def __init__(
        self,
        database: Database,
        secret: str,
        *,
        policy: UrlPolicy,
        rule: RetryRule | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = database
        self.policy = policy
        self.rule = RetryRule() if rule is None else rule
        self.timeout = timeout
        self.clock = clock
        self._secret = secret
        self._lookups = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="webhook lookup")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="webhooks", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; what is not sent yet stays in the database."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self.timeout + 5.0)
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def send_due(self) -> int:
        """Try the messages that are due, at once; how many got through.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        now = self.clock()
        query = select(webhooks).where(webhooks.c.next_at <= now).order_by(webhooks.c.next_at)
        with self.database.read() as connection:
            due = [dict(row) for row in connection.execute(query.limit(_AT_ONCE)).mappings()]
        claimed = [row for row in due if not self._stop.is_set() and self._claim(row)]
        if not claimed:
            return 0
        problems = asyncio.run(self._post_all(claimed))
        return sum(self._settle(row, told) for row, told in zip(claimed, problems, strict=True))

    def _claim(self, row: dict) -> bool:
        """Count a try of a message; False where another server is at it."""
        attempt = row["attempts"] + 1
        same = (webhooks.c.id == row["id"], webhooks.c.attempts == row["attempts"])
        next_at = self.clock() + self.timeout + self.rule.wait(attempt)
        with self.database.write() as connection:
            claim = update(webhooks).where(*same).values(attempts=attempt, next_at=next_at)
            return connection.execute(claim).rowcount == 1

    def _settle(self, row: dict, problem: str | None) -> bool:
        """Write down how a try went; whether the message got through."""
        attempt = row["attempts"] + 1
        if problem is not None and not self.rule.is_last(attempt):
            logger.info("webhook of job %s, try %d: %s", row["job_id"], attempt, problem)
            next_at = self.clock() + self.rule.wait(attempt)
            with self.database.write() as connection:
                where = webhooks.c.id == row["id"]
                connection.execute(update(webhooks).where(where).values(next_at=next_at))
            return False
        if problem is not None:
            text = "webhook of job %s given up after %d tries: %s"
            logger.warning(text, row["job_id"], attempt, problem)
        with self.database.write() as connection:
            connection.execute(delete(webhooks).where(webhooks.c.id == row["id"]))
        return problem is None

    async def _post_all(self, rows: Sequence[dict]) -> list[str | None]:
        """Send messages side by side: one that hangs costs the others nothing."""
        async with httpx.AsyncClient(
            timeout=self.timeout, follow_redirects=False, trust_env=False
        ) as client:
            return await asyncio.gather(*(self._post(client, row) for row in rows))

    async def _post(self, client: httpx.AsyncClient, row: dict) -> str | None:
        """Send a message once; why it did not get through."""
        try:
            async with asyncio.timeout(self.timeout):  # in all: a read's own begins at each byte
                return await self._exchange(client, row)
        except TimeoutError:
            return f"no answer within {self.timeout:g} s"
        except UrlRefused as error:
            return str(error)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return type(error).__name__  # ValueError: a name that cannot be looked up or shown

    async def _exchange(self, client: httpx.AsyncClient, row: dict) -> str | None:
        timestamp = int(self.clock())
        headers = {
            "content-type": "application/json",
            "user-agent": "sglang-diffusion",
            "webhook-id": row["id"],
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._secret, row["id"], timestamp, row["body"]),
        }
        checked = check_url(row["url"], self.policy)
        # To the address that was looked at, and not by the name again.
        loop = asyncio.get_running_loop()
        address = await loop.run_in_executor(self._lookups, resolve, checked, self.policy)
        headers["host"] = checked.authority
        async with client.stream(
            "POST", checked.at(address), content=row["body"], headers=headers,
            extensions={"sni_hostname": checked.host},
        ) as response:  # fmt: skip
            return None if response.is_success else f"status {response.status_code}"

    def _loop(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                self.send_due()
            except StoreUnavailable as error:
                logger.warning("%s", error)
