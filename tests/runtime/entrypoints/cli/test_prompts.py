import pytest

from sglang.multimodal_gen.runtime.entrypoints.cli.prompts import read_prompt_file, read_prompts
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, UserError


def test_a_file_holds_one_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    lines = "\ufeff# a comment\r\na café\r\n\r\n  two words \n\t\n#x\n\u200b\nwith # inside\u2028x"
    path.write_bytes(lines.encode())
    assert read_prompt_file(path) == ["a café", "two words", "with # inside\u2028x"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "holds no prompt"),
        (b"# only\n\n", "holds no prompt"),
        (b"caf\xe9", r"is no UTF-8 text \(byte 3\)"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_prompts_is_named(tmp_path, data, problem):
    path = tmp_path / "p.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=problem) as raised:
        read_prompt_file(path)
    assert str(path) in str(raised.value)
    with pytest.raises(UserError, match="Is a directory"):
        read_prompt_file(tmp_path)


@pytest.mark.parametrize(
    ("said", "configured", "prompts"),
    [
        ({"prompt": "a"}, {}, ["a"]),
        ({"prompt": ("a", "b")}, {}, ["a", "b"]),
        ({}, {"prompt": "c"}, ["c"]),
        ({"prompt": "a"}, {"prompt": "c"}, ["a"]),
        ({"prompt": "a"}, {"prompt_file": "missing"}, ["a"]),
        ({"prompt": "a"}, {"prompt": "b", "prompt_file": "c"}, ["a"]),
    ],
)
def test_one_source_is_used_and_the_command_line_wins(said, configured, prompts):
    assert read_prompts(said, configured, optional=False) == prompts


@pytest.mark.parametrize("place", ["said", "configured"])
def test_two_sources_in_one_place_are_refused(place):
    both = {"prompt": "a", "prompt_file": "b"}
    said, configured = (both, {}) if place == "said" else ({}, both)
    with pytest.raises(UserError, match="has both 'prompt' and 'prompt-file'"):
        read_prompts(said, configured, optional=False)


def test_no_source_is_refused_unless_the_model_needs_none():
    with pytest.raises(UserError, match="there is no prompt"):
        read_prompts({}, {}, optional=False)
    assert read_prompts({}, {}, optional=True) == []


@pytest.mark.parametrize("blank", ["", "   ", "\u200b"])
def test_an_empty_prompt_is_refused_unless_the_model_needs_none(blank):
    with pytest.raises(InvalidRequest, match="is empty"):
        read_prompts({"prompt": blank}, {}, optional=False)
    assert read_prompts({"prompt": blank}, {}, optional=True) == [blank]
