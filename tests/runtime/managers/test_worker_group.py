"""Ranks are processes; each test here that kills some pays about five seconds for others."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import rank_stubs
from processes import all_gone, children, is_running
from rank_stubs import ScriptPipeline, script, script_model
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.utils.errors import (
    CallbackFailed,
    Cancelled,
    CheckpointError,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    UserError,
    WorkerDied,
)

PAIR = script_model(num_gpus=2, enable_cfg_parallel=True)
PROGRAM = "import rank_stubs, sys, time, threading, os\n"


@pytest.fixture(scope="module")
def group():
    group = WorkerGroup(PAIR)
    yield group
    group.close()


@pytest.fixture(scope="module")
def copies():
    group = WorkerGroup(script_model(num_gpus=2, dp_size=2))
    yield group
    group.close()


def run(group, prompt, **settings):
    return group.run(script(group.model, prompt, **settings)[0])


def python(program: str, *args: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        text=True,
        **options,
    )


class Local:
    """Nothing that another process could import."""


# A group is a worker.


def test_a_batch_that_cannot_be_sent_leaves_its_ranks_free(group):
    (batch,) = script(group.model, "ok")
    batch.model_state = lambda: Local
    with pytest.raises(InternalError, match="could import"):
        group.run(batch)
    assert run(group, "ok").warnings
    shouted = type("Shout", (str,), {})("ok")
    assert run(group, shouted).warnings, "a caller's own kind of text is text"


def test_a_rank_that_follows_anothers_failure_harms_nobody(group):
    """The error is that of the rank that failed, and the request's alone."""
    before = group.pids
    for prompt in ("memory 0", "memory 1"):
        with pytest.raises(OutOfMemory, match="too large"):
            run(group, prompt)
    assert group.pids == before
    assert run(group, "ok").warnings


def test_the_lead_gives_the_result_once(group):
    output = run(group, "ok", seed=[3, 4], num_outputs_per_prompt=2)
    expected = [torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(s)) for s in (3, 4)]
    assert torch.equal(output.output, torch.stack(expected))
    assert output.output.dtype is torch.float32
    output.output.add_(1)  # it is the caller's own: no warning of memory that is not writable
    assert output.seeds == [3, 4]
    assert list(output.timings) == ["script_stage"]
    assert len(output.warnings) == 1
    assert "rank 0" in output.warnings[0]
    assert output.peak_memory_mb > 50


def test_a_function_of_a_module_is_called_on_every_rank(group):
    ranks = group.call(rank_stubs.rank_and_sum, 10)
    assert ranks == {0: (10, 2.0), 1: (11, 2.0)}
    with pytest.raises(InvalidRequest, match="no such prompt"):
        group.call(rank_stubs.refuse)
    assert run(group, "ok").warnings


def test_the_ranks_are_other_processes_and_both_work(group):
    assert sorted(group.pids) == [0, 1]
    assert len({*group.pids.values(), os.getpid()}) == 3
    assert all(map(is_running, group.pids.values()))
    # The sum over ranks divided by their number is 1 only where both took part.
    assert run(group, "ok").output.max() <= 1


def test_progress_comes_from_the_lead_in_order(group):
    events = []
    control = RequestControl(events.append)
    run(group, "ok", control=control, num_inference_steps=5)
    assert [(e.phase, e.done, e.total) for e in events] == [("denoise", k, 5) for k in range(6)]


def test_an_error_of_all_ranks_is_the_requests_alone(group):
    before = group.pids
    with pytest.raises(InvalidRequest, match="is refused") as caught:
        run(group, "refuse all")
    assert (caught.value.field, caught.value.value) == ("prompt", "refuse all")
    assert "do_refuse" in str(caught.value.__cause__)
    with pytest.raises(InternalError, match=r"request \w+ failed: ZeroDivisionError: a bug"):
        run(group, "bug all")
    assert run(group, "ok").warnings
    assert group.pids == before


def test_a_caller_can_stop_all_ranks_at_the_same_step(group):
    control = RequestControl(cancelled=threading.Event())
    seen = []

    def listen(event):
        seen.append(event.done)
        if event.done == 5:
            control.cancelled.set()

    control = RequestControl(listen, control.cancelled)
    start = time.monotonic()
    with pytest.raises(Cancelled, match=r"stopped by the caller in denoising, \d+ of 500"):
        run(group, "ok", control=control, num_inference_steps=500)
    assert time.monotonic() - start < 5
    assert 5 <= seen[-1] < 50
    assert run(group, "ok").warnings, "a rank that stopped elsewhere would have ended the group"


def test_cancelling_from_another_thread_while_a_batch_runs(group):
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    with pytest.raises(Cancelled):
        run(group, "ok", control=RequestControl(None, cancelled), num_inference_steps=500)
    assert group.is_alive
    assert run(group, "ok").warnings


def test_a_callback_that_raises_stops_the_ranks_and_keeps_its_error(group):
    boom = RuntimeError("boom")

    def listen(event):
        if event.done == 3:
            raise boom

    with pytest.raises(CallbackFailed) as caught:
        run(group, "ok", control=RequestControl(listen), num_inference_steps=500)
    assert caught.value.cause is boom
    assert run(group, "ok").warnings


def test_results_that_nobody_asks_for_any_more_are_stopped(group):
    seen = []

    def listen(event):
        seen.append(event.done)
        if event.done == 5:
            raise KeyboardInterrupt  # in a notebook, say: the group is to be used again

    with pytest.raises(KeyboardInterrupt):
        run(group, "ok", control=RequestControl(listen), num_inference_steps=1000)
    start = time.monotonic()
    assert run(group, "ok").warnings  # waits for the ranks to be free
    assert time.monotonic() - start < 5, "all 1000 steps take twenty"
    assert max(seen) == 5


@pytest.mark.slow
def test_a_long_computation_is_not_taken_for_a_hang(group):
    """Nine seconds on one rank, while the other waits."""
    assert run(group, "work 1").warnings


def test_a_pipeline_without_adapters_says_so_on_all_ranks(group):
    with pytest.raises(UserError, match="ScriptPipeline takes no LoRA adapters"):
        group.set_lora("a", "a.safetensors")
    assert group.lora_status() == {"loaded_adapters": [], "active": {}}
    assert group.is_alive


def test_a_script_cannot_bring_its_own_classes(monkeypatch):
    monkeypatch.setattr(ScriptPipeline, "__module__", "__main__")
    with pytest.raises(UserError, match="ScriptPipeline is defined in the script that runs"):
        WorkerGroup(PAIR)


# Copies of the model.


def test_batches_are_dealt_over_copies_that_work_at_the_same_time(copies):
    seen = []
    batches = [
        batch
        for name in "abcd"
        for batch in script(
            copies.model,
            "ok",
            seed=ord(name),
            num_inference_steps=15,
            control=RequestControl(lambda event, name=name: seen.append(name)),
        )
    ]
    copies.dealt.clear()
    outputs = list(copies.run_all(batches))
    assert sum(copies.dealt.values()) == 4
    assert set(copies.dealt) == {0, 1}
    assert {output.warnings[0].split(" run")[0] for output in outputs} == {
        f"pid {pid} rank {rank}" for rank, pid in copies.pids.items()
    }
    assert [output.seeds for output in outputs] == [[ord(name)] for name in "abcd"]
    first_of_b, last_of_a = seen.index("b"), len(seen) - 1 - seen[::-1].index("a")
    assert first_of_b < last_of_a, "one after the other"


def test_each_copy_gives_the_same_bits_as_one_rank(copies, group):
    batches = script(copies.model, *["ok"] * 4, seed=7)
    outputs = [output.output for output in copies.run_all(batches)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(outputs[0], run(group, "ok", seed=7).output)


def test_several_threads_may_call(copies):
    results = {}

    def call(seed):
        results[seed] = run(copies, "ok", seed=seed, num_inference_steps=8)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {seed: output.seeds for seed, output in results.items()} == {s: [s] for s in range(5)}


def test_a_copy_that_fails_a_request_does_not_stop_the_other(copies):
    good, bad = script(copies.model, "ok"), script(copies.model, "refuse all")
    with pytest.raises(InvalidRequest):
        list(copies.run_all([*bad, *good]))
    assert copies.is_alive
    assert run(copies, "ok").warnings


# Ends.


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_others_can_be_started():
    group = WorkerGroup(PAIR)
    before = group.pids
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        run(group, "kill 1")
    assert time.monotonic() - start < 10
    assert "rank 1 died of SIGKILL (exit code -9) during request" in str(caught.value)
    assert all_gone(before.values(), 0.5)
    assert not group.is_alive
    with pytest.raises(WorkerDied, match="died of SIGKILL"):
        run(group, "ok")
    with pytest.raises(WorkerDied, match="died of SIGKILL"):
        group.check()
    group.restart()
    assert run(group, "ok").warnings
    # Between requests, too.
    os.kill(group.pids[0], 9)
    assert all_gone(group.pids.values())
    with pytest.raises(WorkerDied, match="rank 0 died of SIGKILL"):
        run(group, "ok")
    group.close()


ALONE = [
    ("exit 1", "rank 1 ended with exit code 7", "some last words"),
    ("crash 1", "rank 1 died of SIGSEGV", "do_crash"),
    ("bug 1", "rank 1 failed during request", 'ZeroDivisionError("a bug")'),
    ("bug 0", "rank 0 failed during request", 'ZeroDivisionError("a bug")'),
    ("sleep 1", "rank 1 did nothing for 7 seconds", "in do_sleep"),
    ("stop 1", "rank 1 gave no sign of life for 8 seconds", "it does not answer"),
    ("await all", "rank 0 and rank 1 waited 5 seconds for each other", "in do_await"),
    ("report 0", "rank 1 failed during request", "reported denoise 2 of 4 while its lead"),
]


@pytest.fixture(scope="module")
def mortal():
    group = WorkerGroup(PAIR)
    yield group
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "message", "detail"), ALONE, ids=[a[0] for a in ALONE])
def test_a_rank_that_fails_alone_ends_all_within_ten_seconds(mortal, prompt, message, detail):
    if not mortal.is_alive:
        mortal.restart()
    pids = mortal.pids
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        run(mortal, prompt)
    assert time.monotonic() - start < 10
    assert message in str(caught.value)
    assert detail in str(caught.value)
    assert all_gone(pids.values(), 0.5)


@pytest.mark.slow
def test_each_rank_imports_the_packages_of_others_once(tmp_path, monkeypatch):
    trace = tmp_path / "imports"
    (tmp_path / "noted_package.py").write_text(
        f"import os\nopen({str(trace)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "noted_package")
    group = WorkerGroup(PAIR)
    pids = group.pids
    group.close()
    assert sorted(map(int, trace.read_text().split())) == sorted(pids.values())


@pytest.mark.slow
def test_what_cannot_be_loaded_leaves_no_process_behind():
    before = set(children(os.getpid()))
    with pytest.raises(CheckpointError, match="weight 'x' is missing"):
        WorkerGroup(script_model("broken", num_gpus=2, enable_cfg_parallel=True))
    with pytest.raises(WorkerDied, match=r"rank 1 failed during the loading of broken on 1"):
        WorkerGroup(script_model("broken on 1", num_gpus=2, enable_cfg_parallel=True))
    assert not [pid for pid in children(os.getpid()) if is_running(pid) and pid not in before]


@pytest.mark.slow
def test_a_group_that_is_forgotten_or_closed_leaves_no_process_behind():
    group = WorkerGroup(PAIR)
    pids = group.pids
    group.close()
    assert all_gone(pids.values(), 0.5)
    with pytest.raises(WorkerDied, match="told to stop"):
        run(group, "ok")
    group.restart()
    pids = group.pids
    del group
    gc.collect()
    assert all_gone(pids.values())


HOLDER = """
from rank_stubs import *
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
kept = []
def hold():
    group = WorkerGroup(script_model(num_gpus=2, enable_cfg_parallel=True))
    kept.append(group)
    print(*group.pids.values(), flush=True)
    if sys.argv[1] == "busy":
        group.run(script(group.model, "sleep all")[0])
if sys.argv[2] == "thread":
    threading.Thread(target=hold).start()
else:
    hold()
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "where"), [("busy", "main"), ("busy", "thread"), ("idle", "thread")]
)
def test_ranks_end_when_their_starter_is_killed(state, where):
    with python(HOLDER, state, where, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        time.sleep(0.5)
        assert all(map(is_running, pids))
        holder.kill()
    assert all_gone(pids)


SPEAKER = """
import logging
from rank_stubs import *
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
logging.basicConfig(format="%(name)s says %(message)s")
group = WorkerGroup(script_model(num_gpus=2, enable_cfg_parallel=True))
group.run(script(group.model, "shout all")[0])
try:
    group.run(script(group.model, "bug 1")[0])
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_rank_0_speaks_and_the_others_only_when_something_failed():
    """No ``if __name__ == "__main__"`` in the program either: ranks do not run it again."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with python(SPEAKER, **streams) as speaker:
        out, err = speaker.communicate(timeout=60)
    assert err.count("sglang.stub says logged by rank 0") == 1
    assert err.count("warned by rank 0") == 1
    assert err.count("printed by rank 0") == 1
    assert "rank 1" not in err
    assert "printed by" not in out
    assert "rank 1 failed during request" in out


def test_ranks_that_others_started_cannot_be_started_from_here():
    group = object.__new__(WorkerGroup)
    group._launched = None
    address = {"nnodes": 2, "dist_init_addr": "127.0.0.1:29500"}
    group.model = script_model(num_gpus=2, enable_cfg_parallel=True, **address)
    with pytest.raises(UserError, match="start the commands again"):
        group.restart()
