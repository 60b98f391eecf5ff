import os
import subprocess
import sys

import pytest
import torch

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


def test_peak_memory_of_the_cpu_is_the_process_and_in_mib():
    before = peak_memory_mb("cpu")
    # The largest resident set may lie far above what is resident now: ask for more than all of it.
    block = bytearray(os.urandom(1024)) * int((before + 64) * 1024)
    after = peak_memory_mb("cpu")
    assert 50 < before < after
    assert after >= len(block) / 2**20
    reset_peak_memory("cpu")
    assert peak_memory_mb("cpu") >= after
    synchronize("cpu")


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
        "import sys, sglang.multimodal_gen.runtime.server_args.resolve;"
        "sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
