from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


def test_lists_are_written_with_spaces_or_commas():
    spaced = ServerArgs.from_flat(cpu_offload_components=["dit", "vae"])
    assert spaced.memory.cpu_offload_components == ("dit", "vae")
    assert MemoryArgs(cpu_offload_components=("dit, vae",)) == spaced.memory


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"cpu_offload_components": ("all", "vae")}, "'all' goes with nothing else"),
        ({"layerwise_offload_components": ("none",)}, "takes no 'none'"),
        ({"layerwise_offload_components": ("dit,dit",)}, "names one component twice"),
        ({"dit_offload_prefetch_size": -1.0}, "must be a share from 0 to 1, or a whole number"),
        ({"dit_layerwise_resident_layers": 1.5}, "must be a share from 0 to 1"),
    ],
)
def test_what_no_machine_can_do_is_refused(values, problem):
    with pytest.raises(InvalidArgument, match=problem):
        MemoryArgs(**values)


def test_the_first_setting_is_found():
    assert MemoryArgs().first_set() is None
    assert MemoryArgs(pin_cpu_memory=False).first_set() == ("pin_cpu_memory", False)
    assert MemoryArgs(vae_cpu_offload=False).first_set() == ("vae_cpu_offload", False)
