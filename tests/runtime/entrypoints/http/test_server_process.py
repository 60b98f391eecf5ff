"""`sglang serve` as a process: start, refusals, and a clean end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from processes import children

from parity.tiny_checkpoints import flux_dev

ROOT = Path(__file__).parents[4]
COMMAND = [sys.executable, "-m", "sglang.multimodal_gen.runtime.entrypoints.cli.main", "serve"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    """The default place of state is one for each test, not the developer's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server process and a client of it, at the port it says."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *flags], env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening on http://127.0.0.1:" in line, line
        url = line.split("listening on ")[1].split(";")[0]
        with httpx.Client(base_url=url, timeout=60) as client:
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def until_ready(client: httpx.Client) -> list[int]:
    seen = []
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            seen.append(client.get("/health").status_code)
            if seen[-1] == 200:
                return seen
        time.sleep(0.05)
    raise AssertionError("never ready")


BODY = {"prompt": "a red circle", "num_inference_steps": 2, "seed": 1}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_serves_and_ends_cleanly(number):
    """CB-073, CB-079: 503 while loading; a signal lets running work end, and exits 0."""
    with served() as (process, client):
        assert until_ready(client)[0] == 503
        assert client.post("/v1/images/generations", json=BODY).status_code == 200
        answers = []

        def ask(steps):
            answers.append(client.post("/v1/images/generations",
                                       json=BODY | {"num_inference_steps": steps}))  # fmt: skip

        threads = [threading.Thread(target=ask, args=(steps,)) for steps in (60, 61)]
        for thread in threads:
            thread.start()
        while client.get("/server_info").json()["queue"] not in (
            {"waiting": 1, "running": 1, "batches": 2},
        ):
            time.sleep(0.01)
        process.send_signal(number)
        for thread in threads:
            thread.join(60)
        assert process.wait(30) == 0
    by_status = {answer.status_code: answer for answer in answers}
    assert set(by_status) == {200, 503}  # the running one finished, the waiting one was handed back
    assert len(by_status[200].json()["data"]) == 1
    assert "retry-after" in by_status[503].headers


@pytest.mark.slow
def test_work_that_outlasts_the_grace_is_given_up():
    with served("--http-graceful-shutdown-timeout", "0.5") as (process, client):
        until_ready(client)
        answers = []
        body = BODY | {"num_inference_steps": 1000}
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/images/generations", json=body))
        )
        thread.start()
        while client.get("/server_info").json()["queue"]["running"] < 1:
            time.sleep(0.01)
        start = time.perf_counter()
        process.terminate()
        assert process.wait(30) == 0
        assert time.perf_counter() - start < 15  # the 1000 steps take a multiple of it
        thread.join(5)
    assert answers[0].status_code == 503


def refused(*flags: str) -> str:
    done = subprocess.run(
        [*COMMAND, *flags], env=environment(), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "error" in text]
    assert "Traceback" not in done.stderr
    return line


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("--port", str(port))
    assert line.startswith(f"sglang: error: port={port}: is in use on 127.0.0.1.")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "no.such.host.invalid"], "host='no.such.host.invalid': cannot be resolved"),
        (["--host", "203.0.113.7"], "host='203.0.113.7': cannot be listened on"),
        (["--host", "a b"], "host='a b': is no host name"),
        (["--port", "70000"], "port=70000: must lie in 0..65535"),
        (["--max-queued-requests", "0"], "max_queued_requests=0: must lie in"),
        (["--prot", "1"], "unrecognized argument --prot. Did you mean '--port'?"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(flags, words):
    assert words in refused(*flags)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    flux_dev().write(tmp_path / "m")
    weights = next((tmp_path / "m/vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refused("--port", "0", "--model-path", str(tmp_path / "m"))
    assert weights.name in line
    assert "no-such" in refused("--port", "0", "--model-path", "/no-such")


@pytest.mark.slow
def test_a_killed_rank_fails_one_request_and_others_go_on():
    """The server starts the ranks again, and gives the same pictures."""
    with served("--num-gpus", "2", "--enable-cfg-parallel", "true") as (process, client):
        until_ready(client)
        answers = []
        long = BODY | {"num_inference_steps": 500}
        kept = client.post("/v1/images/generations", json=BODY).json()["data"][0]["b64_json"]
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/images/generations", json=long))
        )
        thread.start()
        while client.get("/server_info").json()["queue"]["running"] < 1:
            time.sleep(0.01)
        ranks = [pid for pid in children(process.pid) if os.getsid(pid) == pid]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        thread.join(60)
        again = client.post("/v1/images/generations", json=BODY)
        assert again.status_code == 200
        assert again.json()["data"][0]["b64_json"] == kept
        assert client.get("/health?deep=1").status_code == 200
        assert not set(ranks) & set(children(process.pid))
        process.terminate()
        assert process.wait(30) == 0
    assert answers[0].status_code == 500
    assert answers[0].json()["error"]["code"] == "worker_died"
