import pytest

from sglang.multimodal_gen.configs.lora_choice import LoRAChoice, parse_lora_choices
from sglang.multimodal_gen.configs.sample.sampling_params import (
    ImageSamplingParams,
    SamplingParams,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest


@pytest.mark.parametrize(
    ("entry", "choice"),
    [
        ("ink", LoRAChoice("ink", False, 1.0)),
        ("ink=0.5", LoRAChoice("ink", False, 0.5)),
        ("ink=-1", LoRAChoice("ink", False, -1.0)),
        ("ink=0", LoRAChoice("ink", False, 0.0)),
        ("ink=v2", LoRAChoice("ink=v2", False, 1.0)),
        ("ink=v2=2", LoRAChoice("ink=v2", False, 2.0)),
        ("a/ink", LoRAChoice("a/ink", True, 1.0)),
        ("ink.safetensors=0.3", LoRAChoice("ink.safetensors", True, 0.3)),
        ({"name": "a/b", "weight": 2}, LoRAChoice("a/b", False, 2.0)),
        ({"path": "ink"}, LoRAChoice("ink", True, 1.0)),
    ],
)
def test_an_entry_is_a_name_or_a_path_with_a_weight(entry, choice):
    assert parse_lora_choices([entry]) == (choice,)
    assert parse_lora_choices(entry) == (choice,)
    assert parse_lora_choices([choice.as_setting()]) == (choice,)


def test_nothing_and_an_empty_list_differ():
    assert parse_lora_choices(None) is None
    assert parse_lora_choices([]) == ()
    assert ImageSamplingParams().lora_choices is None
    assert SamplingParams().lora_choices is None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (3, "must be a name"),
        ("", "names no adapter"),
        ("=1", "names no adapter"),
        ("ink=nan", "finite"),
        ("ink=inf", "finite"),
        ({"name": "ink", "weight": True}, "finite"),
        ({"name": "ink", "weight": "1"}, "finite"),
        ({"weight": 1}, "either a name or a path"),
        ({"name": "a", "path": "b"}, "either a name or a path"),
        ({"name": " "}, "not blank"),
        ({"name": "a", "wieght": 1}, "Did you mean 'weight'"),
    ],
)
def test_what_is_neither_is_refused_when_the_request_is_made(entry, problem):
    with pytest.raises(InvalidRequest, match=f"(?s)lora.*{problem}"):
        ImageSamplingParams(lora=[entry])
