"""A plan's lines are met in a model, or refused by name."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from torch import nn

import sglang.multimodal_gen.runtime.models.dits as dits
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    RETURN,
    Gather,
    SequencePlan,
    Split,
    sequence_plan,
)
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from seed_samples.video_toy import SP_PLAN, VideoToy

GATHER = Gather(RETURN, "video", dim=1)


def plan(*edges, streams=("video",), **fields):
    return SequencePlan(streams, (*edges, GATHER), **fields)


def toy():
    with torch.device("meta"):
        return VideoToy()


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(dits.__path__)])
def test_the_plan_of_every_family_fits_its_model(module):
    module = importlib.import_module(f"{dits.__name__}.{module}")
    entries = module.EntryClass
    for cls in entries if isinstance(entries, (list, tuple)) else [entries]:
        found = sequence_plan(cls)
        assert found is not None, f"{module.__name__} needs an SP_PLAN (docs/adding_a_model.md)"
        with torch.device("meta"):
            model = cls()
        assert found.places(model)
        assert found.attention_layers(model)
        assert ModelRegistry.knows(cls.__name__)


def test_a_class_derived_elsewhere_keeps_the_plan():
    derived = type("Derived", (VideoToy,), {"__module__": "somewhere.else"})
    assert sequence_plan(derived) is SP_PLAN
    assert sequence_plan(nn.Linear) is None


def test_a_class_may_have_a_plan_of_its_own():
    own = plan(Split("x", "video", dim=1, at="blocks.0"))
    assert sequence_plan(type("Other", (VideoToy,), {"SP_PLAN": own})) is own
    with pytest.raises(PipelineDefinitionError, match="must be a SequencePlan, not dict"):
        sequence_plan(type("Wrong", (VideoToy,), {"SP_PLAN": {}}))


def test_an_argument_that_forward_does_not_have():
    line = plan(Split("hidden_state", "video", dim=1))
    with pytest.raises(
        PipelineDefinitionError,
        match=r"VideoToy.forward has no argument 'hidden_state'. Did you mean 'hidden_states'",
    ):
        line.places(toy())
    inner = plan(Split("image", "video", dim=1, at="blocks.0"))
    with pytest.raises(
        PipelineDefinitionError, match=r"Block.forward of blocks.0 has no .*'image'"
    ):
        inner.places(toy())


def test_a_module_that_is_not_there():
    line = plan(Split("x", "video", dim=1, at="block.0"))
    with pytest.raises(PipelineDefinitionError, match=r"at='block.0'\) names no module"):
        line.places(toy())


def test_a_star_does_not_reach_over_a_dot():
    found = plan(Split("x", "video", dim=1, at="blocks.*")).places(toy())
    assert [type(place.module).__name__ for place in found][:-1] == ["Block", "Block"]


def test_a_stream_that_is_not_listed():
    with pytest.raises(PipelineDefinitionError, match=r"names stream 'vide'. Did you mean 'video'"):
        plan(Split("x", "vide", dim=1))
    with pytest.raises(PipelineDefinitionError, match=r"attention\['a'\] names stream 'b'"):
        plan(Split("x", "video", dim=1), attention={"a": ("b",)})
    with pytest.raises(PipelineDefinitionError, match="a name comes twice"):
        plan(Split("x", "video", dim=1), streams=("video", "video"))


def test_a_plan_splits_and_gathers():
    with pytest.raises(PipelineDefinitionError, match="has no Gather"):
        SequencePlan(("video",), (Split("x", "video", dim=1),))
    with pytest.raises(PipelineDefinitionError, match="has no Split"):
        SequencePlan(("video",), (GATHER,))


def test_attention_lines():
    split = Split("x", "video", dim=1, at="blocks.0")
    streams = ("text", "video")
    chosen = plan(split, streams=streams, attention={"blocks.*.own": ("video",)})
    assert chosen.attention_layers(toy()) == {
        "blocks.0.own.attend": ("video",),
        "blocks.1.own.attend": ("video",),
    }
    joined = plan(split, streams=streams, attention={"blocks.0": ("video",)})
    assert joined.attention_layers(toy())["blocks.1.own.attend"] == streams
    with pytest.raises(PipelineDefinitionError, match=r"attention\['rope'\] holds no USPAttention"):
        plan(split, attention={"rope": ("video",)}).attention_layers(toy())
    both = {"blocks.0": ("video",), "blocks.*": ("text",)}
    with pytest.raises(PipelineDefinitionError, match=r"and another name blocks.0.own.attend"):
        plan(split, streams=streams, attention=both).attention_layers(toy())


def test_a_model_whose_attention_nobody_can_split():
    line = plan(Split("input", "video", dim=1))
    with pytest.raises(PipelineDefinitionError, match="no USPAttention"):
        line.attention_layers(nn.Linear(2, 2))
    with pytest.raises(PipelineDefinitionError, match="no USPAttention"):
        line.attention_layers(nn.Sequential(USPAttention(replicated_keys=True)))
