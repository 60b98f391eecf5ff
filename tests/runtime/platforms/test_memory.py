"""Free host memory, also inside containers: fake files of both control group versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang.multimodal_gen.runtime.platforms.host_memory import HostMemory
from sglang.multimodal_gen.runtime.platforms.memory import host_free, memory_facts

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path):
    """Writes the files of a machine with 64 GiB available; returns how much is free on it."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {64 * GIB // 1024} kB\n")

    def free(belongs_to: str, **files: dict[str, object]) -> int | None:
        (proc / "self/cgroup").write_text(belongs_to)
        for folder, contents in files.items():
            place = groups / folder.replace("__", "/").strip("/")
            place.mkdir(parents=True, exist_ok=True)
            for name, value in contents.items():
                (place / name.replace("__", ".")).write_text(f"{value}\n")
        return host_free(proc, groups)

    return free


def test_without_a_limit_it_is_what_the_machine_has(machine):
    assert machine("0::/\n") == 64 * GIB
    assert machine("0::/a\n", a={"memory__max": "max", "memory__current": 9 * GIB}) == 64 * GIB


def test_a_limit_of_version_2_minus_what_is_used(machine):
    group = {"memory__max": 16 * GIB, "memory__current": 6 * GIB}
    assert machine("0::/a/b\n", a__b=group) == 10 * GIB


def test_a_container_sees_its_own_group_as_the_root(machine):
    group = {"memory__max": 16 * GIB, "memory__current": 6 * GIB}
    assert machine("0::/../../elsewhere\n", __=group) == 10 * GIB


def test_cached_files_that_nobody_reads_are_free(machine):
    group = {"memory__max": 16 * GIB, "memory__current": 15 * GIB,
             "memory__stat": f"anon 1\ninactive_file {4 * GIB}\nactive_file {9 * GIB}"}  # fmt: skip
    assert machine("0::/a\n", a=group) == 5 * GIB


def test_the_tightest_group_above_counts(machine):
    outer = {"memory__max": 8 * GIB, "memory__current": 5 * GIB}
    inner = {"memory__max": 16 * GIB, "memory__current": 1 * GIB}
    assert machine("0::/outer/inner\n", outer=outer, outer__inner=inner) == 3 * GIB


def test_a_limit_of_version_1(machine):
    group = {"memory__limit_in_bytes": 12 * GIB, "memory__usage_in_bytes": 9 * GIB,
             "memory__stat": f"inactive_file 1\ntotal_inactive_file {GIB}"}  # fmt: skip
    assert (
        machine("11:cpu,cpuacct:/x\n4:memory:/docker/abc\n", memory__docker__abc=group) == 4 * GIB
    )
    assert machine("4:memory:/docker/none\n", memory=group) == 4 * GIB


def test_version_1_writes_no_limit_as_a_huge_number(machine):
    group = {"memory__limit_in_bytes": 9223372036854771712, "memory__usage_in_bytes": 9 * GIB}
    assert machine("4:memory:/a\n", memory__a=group) == 64 * GIB


def test_a_full_container_has_nothing_and_not_less(machine):
    group = {"memory__max": 4 * GIB, "memory__current": 5 * GIB}
    assert machine("0::/a\n", a=group) == 0


def test_a_system_that_says_nothing(tmp_path: Path):
    assert host_free(tmp_path, tmp_path) is None


def test_this_machine():
    facts = memory_facts("cpu")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert facts.device_total == total
    assert facts.device_free == facts.host_free
    assert facts.host_free is None or 0 < facts.host_free <= total


def test_host_memory_has_the_exact_size_and_outlives_its_owner():
    memory = HostMemory(3 * 2**20 + 17)
    assert memory.data.nbytes == 3 * 2**20 + 17
    assert not memory.data.any(), "fresh pages are zero"
    view = memory.data[5:9].fill_(7)
    del memory
    assert view.tolist() == [7] * 4
    assert HostMemory(0).data.nbytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_host_memory_is_pinned():
    memory = HostMemory(2**20 + 3)
    assert memory.pin()
    assert memory.data.is_pinned()
    memory.data.fill_(9)
    assert memory.data.cuda(non_blocking=True).sum().item() == 9 * (2**20 + 3)
