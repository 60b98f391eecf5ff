import os
import subprocess
import sys

import pytest
import torch

from sglang.multimodal_gen.runtime.platforms import device
from sglang.multimodal_gen.runtime.platforms.device import (
    device_facts,
    peak_memory_mb,
    reset_peak_memory,
    synchronize,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_facts_agree_with_torch():
    facts = device_facts()
    assert facts.cuda_available == torch.cuda.is_available()
    assert facts.device_count == torch.cuda.device_count()
    assert facts.name
    assert facts.memory_bytes > 2**27


PEAK_PROBE = """
from sglang.multimodal_gen.runtime.platforms.device import *
before = peak_memory_mb("cpu")
block = b"x" * (64 * 2**20)
after = peak_memory_mb("cpu")
del block
reset_peak_memory("cpu")
synchronize("cpu")
print(before, after, peak_memory_mb("cpu"))
"""


def in_a_fresh_process(code: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
    )
    return done.stdout


def test_peak_memory_of_the_cpu_is_that_of_the_process_in_mib_and_can_start_anew():
    before, after, reset = map(float, in_a_fresh_process(PEAK_PROBE).split())
    assert before < 100, "the test's own memory must not count"
    assert 60 < after - before < 80
    assert reset < after - 60


def test_peak_memory_is_known_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(device, "_CLEAR_REFS", tmp_path / "none")
    reset_peak_memory("cpu")
    assert peak_memory_mb("cpu") > 50


@needs_gpu
def test_peak_memory_of_a_gpu_starts_anew():
    block = torch.zeros(2**26, dtype=torch.uint8, device="cuda")
    assert peak_memory_mb("cuda") >= 64
    del block
    reset_peak_memory("cuda")
    synchronize("cuda")
    assert peak_memory_mb("cuda") < 64


def test_importing_the_module_imports_no_torch():
    code = (
        "import sys, sglang.multimodal_gen.runtime.server_args.resolve; print(sys.modules.keys())"
    )
    loaded = in_a_fresh_process(code)
    assert "'argparse'" not in loaded
    assert "'torch'" not in loaded
