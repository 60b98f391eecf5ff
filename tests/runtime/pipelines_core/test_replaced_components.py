"""``--component-paths``: what cannot do the work of what it replaces is refused at load."""

from __future__ import annotations

import shutil

import pytest
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.loader.capabilities import lacking
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@pytest.mark.parametrize(
    ("role", "by", "problem"),
    [
        ("transformer", "vae", r"is a AutoencoderKL, .* for FluxTransformer2DModel.*rotary_emb"),
        ("vae", "transformer", r"is a FluxTransformer2DModel, .* it has no decode\(\), encode\(\)"),
    ],
)
def test_another_kind_of_component_is_refused_by_what_it_lacks(folder, role, by, problem):
    with pytest.raises(InvalidArgument, match=rf"component_paths\.{role}=.*{problem}"):
        DiffGenerator.from_pretrained(
            str(folder), device="cpu", component_paths={role: str(folder / by)}
        )


def test_the_same_kind_from_elsewhere_serves(folder, tmp_path):
    other = shutil.copytree(folder / "transformer", tmp_path / "other")
    with DiffGenerator.from_pretrained(
        str(folder), device="cpu", component_paths={"transformer": str(other)}
    ) as generator:
        assert generator.generate(
            prompt="a", height=32, width=32, num_inference_steps=1
        )[0].array.any()  # fmt: skip


class Usual(nn.Module):
    def forward(self, hidden_states, timestep=None, attention_kwargs=None): ...


class Open(nn.Module):
    def forward(self, **kwargs): ...


class Timeless(nn.Module):
    def forward(self, hidden_states): ...


class Subclass(Usual):
    def forward(self, **anything): ...


def test_what_is_always_handed_over_must_be_taken():
    assert lacking(Timeless, Usual) == ["forward(timestep=)"]
    assert not lacking(Open, Usual)
    assert not lacking(Subclass, Usual)
    assert not lacking(Usual, Timeless)
