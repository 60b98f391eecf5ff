from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pytest

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.server_args.flags import flag, flags_of, to_argv
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Plain:
    guidance_scale: float = 4.0
    steps: int = field(default=20, metadata={"help": "How many."})
    latents: Tensor | None = None
    hidden: int = field(default=0, metadata={"flag": False})
    renamed: str = field(default="", metadata={"flag": "--other-name"})
    made: int = field(default=0, init=False)
    _private: int = 0
    shared: ClassVar[int] = 3


@dataclass
class Family(Plain):
    steps: int = 4


def test_each_expressible_field_of_a_plain_dataclass_has_a_flag():
    spellings = {spec.name: spec.spelling for spec in flags_of(Plain)}
    assert spellings == {
        "guidance_scale": "--guidance-scale",
        "steps": "--steps",
        "renamed": "--other-name",
    }


def test_fields_can_be_left_out():
    assert "steps" not in {spec.name for spec in flags_of(Plain, without=["steps"])}


def test_a_family_that_changes_a_default_keeps_the_help():
    (steps,) = (spec for spec in flags_of(Family) if spec.name == "steps")
    assert (steps.default, steps.help) == (4, "How many.")


def test_keys_of_a_config_file_follow_the_spelling():
    @dataclass
    class Record:
        x: str = flag("", help="", name="--some-name", aliases=("--alias-name",))

    (spec,) = flags_of(Record)
    assert spec.keys == ("some_name", "alias_name")


def test_every_shared_sampling_param_has_a_flag_with_help():
    flags = flags_of(ImageSamplingParams)
    assert {spec.name for spec in flags} == set(ImageSamplingParams.field_names())
    assert all(spec.help for spec in flags)


def test_a_bad_value_names_flag_or_field():
    steps = next(spec for spec in flags_of(Plain) if spec.name == "steps")
    with pytest.raises(InvalidArgument, match=r"^--steps='x': must be a whole number$"):
        steps.parse("x")
    with pytest.raises(InvalidArgument, match=r"^steps='3': must be a whole number, not str$"):
        steps.accept("3")


def test_defaults_are_left_out_of_a_command_line():
    assert to_argv(flags_of(Plain), {"steps": 20, "guidance_scale": 0.0}) == [
        "--guidance-scale=0.0"
    ]
