from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.entrypoints.cli.config_file import ConfigFile
from sglang.multimodal_gen.runtime.server_args.flags import flag, flags_of
from sglang.multimodal_gen.runtime.utils.errors import UserError


@dataclass
class Record:
    some_text: str = flag("", help="")
    scale: float = flag(1.0, help="")
    switch_on: bool = flag(False, help="")
    many: tuple[str, ...] = flag((), help="")
    per_part: Mapping[str, str] = flag(default_factory=dict, help="")
    path: str | None = flag(None, help="", aliases=("--file",))


FLAGS = flags_of(Record)


def read(tmp_path: Path, text: str, name: str = "c.yaml") -> dict[str, object]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    config = ConfigFile(tmp_path / name)
    config.check_keys(FLAGS)
    return config.values_of(FLAGS)


def refusal(tmp_path: Path, text: str, name: str = "c.yaml") -> str:
    with pytest.raises(UserError) as raised:
        read(tmp_path, text, name)
    message = str(raised.value)
    assert str(tmp_path / name) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("# a comment\n", {}),
        ("some_text: café", {"some_text": "café"}),
        ("some-text: 'no'", {"some_text": "no"}),
        ("\ufeffsome_text: x", {"some_text": "x"}),
        ("scale: 0", {"scale": 0.0}),
        ("scale: 1e-3", {"scale": 0.001}),
        ("switch-on: true", {"switch_on": True}),
        ("many: [a, b]", {"many": ("a", "b")}),
        ("per-part: {vae: x}", {"per_part": {"vae": "x"}}),
        ("per-part.vae: x\nper_part.a_b: y", {"per_part": {"vae": "x", "a_b": "y"}}),
        ("per-part: {vae: x}\nper_part.b: y", {"per_part": {"vae": "x", "b": "y"}}),
        ("per_part.b: y\nper-part: {vae: x}", {"per_part": {"vae": "x", "b": "y"}}),
        ("file: f", {"path": "f"}),
        ("some_text: null\nscale:\n", {}),
    ],
)  # fmt: skip
def test_yaml_says_what_flags_would(tmp_path, text, values):
    assert read(tmp_path, text) == values


def test_json_says_the_same(tmp_path):
    assert read(tmp_path, '{"some-text": "x", "scale": 2, "many": ["a"]}', "c.json") == {
        "some_text": "x",
        "scale": 2.0,
        "many": ("a",),
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("some_txt: x", "there is no setting 'some_txt'. Did you mean 'some_text'?"),
        ("3: x", "the key 3 is no setting's name."),
        ("some_text: no", "some_text=False: must be text, not bool"),
        ("scale: fast", "scale='fast': must be a number, not str"),
        ("scale: .inf", "scale=inf: must be a finite number"),
        ("many: a", "many='a': must be a list"),
        ("- a\n- b", "must hold settings such as 'height: 128', not one list."),
        ("just words", "must hold settings such as 'height: 128', not one str."),
        ("scale: 1\nscale: 2", "'scale' is set twice. Keep one of them."),
        ("some-text: a\nsome_text: b", "'some_text' is set twice."),
        ("per_part: {a: x}\nper-part.a: y", "'per-part.a' is set twice."),
        ("per-part.a: y\nper_part: {a: x}", "'per_part' is set twice."),
        ("per_part: {a: x, a: y}", "'a' is set twice."),
        ("scale.x: 1", "scale={'x': 1}: must be a number, not dict"),
        ("scale: [1", "is no valid YAML: "),
        ("? [a]\n: b", "is no valid YAML: "),
        ("!!python/object/apply:os.system [true]", "is no valid YAML: "),
    ],
)
def test_a_mistake_is_told_with_the_file(tmp_path, text, problem):
    assert problem in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no valid JSON: "),
        ("[]", "must hold settings"),
        ('{"scale": 1, "scale": 2}', "'scale' is set twice."),
    ],
)
def test_a_mistake_in_json_is_told_with_the_file(tmp_path, text, problem):
    assert problem in refusal(tmp_path, text, "c.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin1.yaml").write_bytes(b"some_text: caf\xe9")
    for name, reason in (
        ("missing.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("latin1.yaml", "is no UTF-8 text"),
    ):
        with pytest.raises(UserError, match="the config file") as raised:
            ConfigFile(tmp_path / name)
        assert reason in str(raised.value)
