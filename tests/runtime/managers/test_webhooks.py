"""Webhooks: signed, tried again, delivered after a restart, and never to where they may not go."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import socket
import threading
import time

import openai
import pytest
from sqlalchemy import select

from runtime.managers.stubs import Clock
from sglang.multimodal_gen.runtime.managers import webhooks as sending
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.storage.database import Database, webhooks
from sglang.multimodal_gen.runtime.managers.storage.sql_jobs import SqlJobStore
from sglang.multimodal_gen.runtime.managers.url_policy import UrlPolicy
from sglang.multimodal_gen.runtime.managers.webhooks import (
    RetryRule,
    WebhookSender,
    secret_bytes,
    signature,
)

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


class Receiver(http.server.ThreadingHTTPServer):
    """Answers with ``statuses`` in turn, then 200, and keeps what it was sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], str]] = []
        self.statuses: list[int] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server.seen.append((headers, body))
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if statuses else 200)
        self.send_header("location", self.server.url)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


ANYWHERE = UrlPolicy(ports=(), networks=("0.0.0.0/0", "::/0"))


@pytest.fixture
def receiver():
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1_800_000_000.0
    return clock


@pytest.fixture
def database(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    yield database
    database.close()


@pytest.fixture
def sender(database, clock):
    made = []

    def make(**changes):
        options = {"policy": ANYWHERE, "clock": clock, "timeout": 2.0}
        made.append(WebhookSender(database, SECRET, **options | changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def end_a_job(database, clock, url, status="completed"):
    store = SqlJobStore(database)
    store.add(JobRecord(id="j1", kind="k", model="m", created_at=clock(), webhook=url))
    store.update("j1", status=status, completed_at=clock())


def left(database) -> list[tuple[int, float]]:
    with database.read() as connection:
        return connection.execute(select(webhooks.c.attempts, webhooks.c.next_at)).all()


def test_the_official_client_verifies_what_is_sent(database, clock, sender, receiver, monkeypatch):
    end_a_job(database, clock, receiver.url)
    assert sender().send_due() == 1
    ((headers, body),) = receiver.seen
    assert json.loads(body) == {
        "type": "job.completed",
        "created_at": int(clock.now),
        "data": {"id": "j1", "kind": "k", "model": "m", "status": "completed", "error": None},
    }
    client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
    monkeypatch.setattr("time.time", clock)
    client.webhooks.verify_signature(body, headers)
    for bad in (headers | {"webhook-id": "other"},
                headers | {"webhook-timestamp": str(int(clock.now) + 1)}):  # fmt: skip
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.verify_signature(body, bad)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body + " ", headers)
    assert left(database) == []
    assert sender().send_due() == 0


def test_failures_are_tried_again_with_growing_pauses_and_then_given_up(
    database, clock, sender, receiver
):
    receiver.statuses = [500, 302, 404, 503]
    end_a_job(database, clock, receiver.url)
    one = sender(rule=RetryRule(attempts=4, first_seconds=10.0, max_seconds=25.0))
    pauses = []
    for _ in range(3):
        assert one.send_due() == 0
        ((attempts, next_at),) = left(database)
        pauses.append(next_at - clock.now)
        assert one.send_due() == 0  # not before it is due
        assert len(receiver.seen) == attempts
        clock.now = next_at
    assert pauses == [10.0, 20.0, 25.0]
    one.send_due()
    assert left(database) == []
    assert len(receiver.seen) == 4  # a redirect is not followed
    assert len({headers["webhook-id"] for headers, _ in receiver.seen}) == 1


def test_a_restart_still_delivers(database, clock, sender, receiver):
    receiver.statuses = [500]
    end_a_job(database, clock, receiver.url, "failed")
    sender().send_due()
    database.close()
    again = Database(str(database.engine.url))
    clock.now += 100
    late = WebhookSender(again, SECRET, policy=ANYWHERE, clock=clock)
    assert late.send_due() == 1
    late.close()
    again.close()
    assert json.loads(receiver.seen[-1][1])["type"] == "job.failed"


def test_of_two_servers_one_sends(database, clock, sender, receiver):
    end_a_job(database, clock, receiver.url)
    senders = [sender() for _ in range(4)]
    threads = [threading.Thread(target=one.send_due) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(receiver.seen) == 1


def test_private_addresses_are_not_called(database, clock, sender, receiver):
    end_a_job(database, clock, receiver.url)
    assert sender(policy=UrlPolicy()).send_due() == 0
    assert receiver.seen == []
    assert left(database)[0][0] == 1


def test_secrets():
    assert secret_bytes("plain") == b"plain"
    assert secret_bytes(SECRET) == b"0123456789abcdef0123456789abcdef"
    with pytest.raises(ValueError, match="base64"):
        secret_bytes("whsec_***")
    assert signature("a", "m", 1, "x") != signature("b", "m", 1, "x")


@contextlib.contextmanager
def dripping(seconds: float):
    """A receiver that answers one byte at a time, each within any read's patience."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        over = threading.Event()

        def serve():
            line = stack.enter_context(listener.accept()[0])
            begin = time.monotonic()
            with contextlib.suppress(OSError):
                line.sendall(b"HTTP/1.1 200 OK\r\nx-slow: ")
                while time.monotonic() - begin < seconds and not over.wait(0.05):
                    line.sendall(b"a")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook"
        over.set()
        thread.join(10)


def test_a_receiver_that_takes_for_ever_holds_up_nobody(database, clock, sender, receiver):
    store = SqlJobStore(database)
    with dripping(8.0) as slow:
        for number, url in enumerate((slow, receiver.url)):
            job_id = f"j{number}"
            store.add(JobRecord(id=job_id, kind="k", model="m", created_at=clock(), webhook=url))
            store.update(job_id, status="completed", completed_at=clock() - 10 + number)
        begin = time.monotonic()
        assert sender(timeout=0.5).send_due() == 1
        assert time.monotonic() - begin < 3
    assert len(receiver.seen) == 1
    ((attempts, _),) = left(database)  # the slow one is tried again
    assert attempts == 1


def test_an_address_that_cannot_be_tried_ends_no_thread(database, clock, sender, monkeypatch):
    end_a_job(database, clock, "http://example.com/hook")

    def broken(url, policy):
        raise UnicodeError("label too long")

    monkeypatch.setattr(sending, "resolve", broken)
    assert sender().send_due() == 0
    assert left(database)[0][0] == 1
