"""The command with several ranks, as a shell, torchrun and several machines start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from processes import all_gone, children

MAIN = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
STREAMS = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
pytestmark = pytest.mark.slow


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_stays():
    """Whatever a failed test left behind is ended."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def start(*argv: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen([sys.executable, *argv], env=environment, text=True, **STREAMS)
    STARTED.append(process)
    return process


def started(process: subprocess.Popen[str]) -> str:
    """Wait until a command has loaded its model; returns what it said so far."""
    said = ""
    assert process.stderr is not None
    while "ulysses_degree" not in said:
        line = process.stderr.readline()
        assert line, f"the command ended: {said}"
        said += line
    return said


def finish(process: subprocess.Popen[str], seconds: float = 200.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def generate(place: Path, *more: str, steps: int = 2) -> list[str]:
    return ["-m", MAIN, "generate", "--prompt", "a red circle", "--seed", "1",
            "--num-inference-steps", str(steps), "--output-path", str(place), *more]  # fmt: skip


def picture(out: str) -> np.ndarray:
    (line,) = out.splitlines()
    return np.asarray(Image.open(line))


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> np.ndarray:
    code, out, err = finish(start(*generate(tmp_path_factory.mktemp("one"))))
    assert code == 0, err
    return picture(out)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return int(np.abs(one.astype(int) - other.astype(int)).max()) <= 1


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_two_ranks_make_one_picture_and_one_report(tmp_path, expected):
    code, out, err = finish(start(*generate(tmp_path, "--num-gpus", "2")))
    assert code == 0, err
    assert close(picture(out), expected)
    assert err.count("note: num_gpus=2: ulysses_degree=2 chosen") == 1
    assert err.count("denoising: 2/2") == 1
    assert err.count("denoising_stage") == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_ctrl_c_ends_ranks_and_command_as_with_one(tmp_path):
    process = start(*generate(tmp_path, "--num-gpus", "2", steps=1000))
    started(process)
    time.sleep(0.5)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, 15)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "sglang: interrupted"
    assert "Traceback" not in err
    assert all_gone(ranks, 0.5)
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_is_one_paragraph_and_exit_code_1(tmp_path):
    process = start(*generate(tmp_path, "--num-gpus", "2", steps=1000))
    started(process)
    ranks = children(process.pid)
    os.kill(max(ranks), signal.SIGKILL)
    code, out, err = finish(process, 10)
    assert (code, out) == (1, "")
    assert "sglang: error: rank " in err
    assert "died of SIGKILL (exit code -9)" in err
    assert "Traceback" not in err
    assert all_gone(ranks, 0.5)


def test_sizes_that_do_not_multiply_are_refused_before_a_model_loads(tmp_path):
    code, out, err = finish(start(*generate(tmp_path, "--num-gpus", "4", "--tp-size", "3")))
    assert (code, out) == (2, "")
    assert err.startswith("sglang: error: num_gpus=4: tp_size=3, but num_gpus=4.")
    assert err.count("\n") == 1


def test_torchrun_starts_the_ranks_itself(tmp_path, expected):
    code, out, err = finish(start(*TORCHRUN, *generate(tmp_path)))
    assert code == 0, err
    assert close(picture(out), expected)
    assert err.count("note: num_gpus=2: torchrun started as many processes") == 1
    assert err.count("denoising: 2/2") == 1


LAUNCHED = """
import sys
from rank_stubs import *
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.managers.ranks.follower import follow, is_front
from sglang.multimodal_gen.runtime.utils.environ import launched_rank
from sglang.multimodal_gen.runtime.utils.errors import WorkerDied
place, model = launched_rank(), script_model(num_gpus=2, enable_cfg_parallel=True)
if not is_front(model.server_args.parallel, place):
    follow(model, place)
    sys.exit(0)
group = WorkerGroup(model, launched=place)
failures = 0
for prompt in sys.argv[1:]:
    try:
        print(prompt, "gave", group.run(script(model, prompt)[0]).warnings, flush=True)
    except Exception as error:
        print(prompt, "raised", type(error).__name__, error, flush=True)
        failures += isinstance(error, WorkerDied)
group.close()
sys.exit(0 if failures == 0 else 1)
"""


def launched(tmp_path: Path, *prompts: str) -> tuple[int, str, str]:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED)
    return finish(start(*TORCHRUN, str(program), *prompts))


def test_torchruns_ranks_serve_request_after_request(tmp_path):
    code, out, err = launched(tmp_path, "ok", "refuse all", "shout all", "ok")
    assert code == 0, err
    assert out.count(" gave ") == 3
    assert "refuse all raised InvalidRequest" in out
    assert "rank 1" not in out + err, "rank 0 speaks"
    assert "logged by rank 0" in err


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("kill 1", "raised WorkerDied rank 1 ended, or cannot be reached"),
        ("bug 1", "raised WorkerDied rank 1 failed during request"),
        ("sleep 1", "raised WorkerDied rank 1 did nothing for 7 seconds"),
        ("kill 0", ""),
    ],
)
def test_a_rank_of_torchrun_that_fails_ends_the_run(tmp_path, prompt, message):
    code, out, err = launched(tmp_path, "ok", prompt)
    assert code == 1
    assert out.count(" gave ") == 1
    assert message in out
    if prompt == "kill 0":
        assert "sglang: rank 1: rank 0 ended, or cannot be reached" in err


def nodes(tmp_path: Path, address: str, *, steps: int = 2, precisions=("fp32", "fp32")):
    """Node 0 and node 1, of which 1 comes first."""
    both = []
    for rank in (1, 0):
        told = ["--num-gpus", "2", "--nnodes", "2", "--dist-init-addr", address]
        told += ["--node-rank", str(rank), "--precision", precisions[rank]]
        both.append(start(*generate(tmp_path / str(rank), *told, steps=steps)))
    return both[::-1]


def test_two_nodes_make_one_picture_on_the_first(tmp_path, address, expected):
    first, second = nodes(tmp_path, address)
    code, out, err = finish(first)
    assert code == 0, err
    assert close(picture(out), expected)
    assert finish(second, 15) == (0, "", "")
    assert not (tmp_path / "1").exists()


def test_nodes_that_were_told_different_things_refuse(tmp_path, address):
    first, other = nodes(tmp_path, address, precisions=("fp32", "bf16"))
    code, _, err = finish(first)
    assert code == 2
    assert "precision='fp32': is 'bf16' on node 1. Start all of them with the same" in err
    code, out, err = finish(other, 15)
    assert (code, out) == (1, "")
    assert "precision='fp32': is 'bf16' on node 1" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_dies_ends_the_others(tmp_path, address, victim):
    both = nodes(tmp_path, address, steps=1000)
    started(both[0])
    ranks = [*children(both[0].pid), *children(both[1].pid)]
    assert len(ranks) == 2
    both[victim].kill()
    both[victim].communicate()
    code, out, err = finish(both[1 - victim], 10)
    assert (code, out) == (1, "")
    assert f"node {victim} ended, or cannot be reached" in err
    assert all_gone(ranks, 5)
