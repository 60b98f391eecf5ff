from __future__ import annotations

import pytest
from torch import nn

from sglang.multimodal_gen.runtime.memory.layerwise import (
    LayerwiseOffloadableModuleMixin,
    check_layer_names,
    streamed_blocks,
)
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from .toy import Toy


def test_blocks_come_in_the_order_of_the_lists():
    names = ["first.0", "first.1", "second.blocks.0", "second.blocks.1", "second.blocks.2"]
    assert list(streamed_blocks(Toy())) == names


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["frist"], r"'frist', which the module does not have. Lists it has: first, second.blocks"),
        (["inward"], "'inward', a Linear; it must be a ModuleList"),
        (["first", "first"], "lists 'first' twice"),
    ],
)
def test_a_wrong_path_is_the_porters_error(names, problem):
    model = type("Wrong", (Toy,), {"layer_names": names})()
    with pytest.raises(
        PipelineDefinitionError, match=rf"Wrong.layer_names \w+ {problem}|{problem}"
    ):
        check_layer_names(model)


def test_a_list_inside_another_is_refused():
    class Nested(nn.Module, LayerwiseOffloadableModuleMixin):
        layer_names = ["a", "a.0.b"]

        def __init__(self):
            super().__init__()
            inner = nn.Module()
            inner.b = nn.ModuleList([nn.Linear(1, 1)])
            self.a = nn.ModuleList([inner])

    with pytest.raises(PipelineDefinitionError, match=r"lists 'a.0.b' twice: it is part of 'a'"):
        check_layer_names(Nested())


def test_a_module_without_lists_has_nothing_to_stream():
    check_layer_names(nn.Linear(1, 1))
    with pytest.raises(PipelineDefinitionError, match="layer_names is empty"):
        streamed_blocks(nn.Linear(1, 1))
