from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.server_args.flags import flag, flags_of, to_argv
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    PipelineDefinitionError,
    UserError,
)


@dataclass
class Record:
    some_text: str = flag("", help="A text, 100% of it.")
    count: int = flag(3, help="A number.")
    scale: float = flag(1.0, help="Another.")
    colour: Literal["red", "green"] = flag("red", help="One of two.")
    switch_on: bool = flag(False, help="A switch.")
    many: tuple[str, ...] = flag((), help="Several.")
    seed: int | list[int] | None = flag(None, help="One or several.")
    per_part: Mapping[str, str] = flag(default_factory=dict, help="By name.")
    path: str | None = flag(None, help="Has two names.", aliases=("--file",))


FLAGS = flags_of(Record)


def parser() -> FlagParser:
    made = FlagParser("sglang test", "A test.")
    made.add_flags("group", FLAGS, owner="Record")
    return made


def parse(*argv: str) -> dict[str, object]:
    made = parser()
    return made.values_of(made.parse(argv), FLAGS)


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ([], {}),
        (["--some-text", "a b"], {"some_text": "a b"}),
        (["--some_text=a=b_c"], {"some_text": "a=b_c"}),
        (["--some-text", "--no_flag but a sentence"], {"some_text": "--no_flag but a sentence"}),
        (["--some-text="], {"some_text": ""}),
        (["--count", "-4"], {"count": -4}),
        (["--count", "1", "--count", "2"], {"count": 2}),
        (["--switch-on"], {"switch_on": True}),
        (["--switch_on"], {"switch_on": True}),
        (["--no-switch-on"], {"switch_on": False}),
        (["--no_switch_on"], {"switch_on": False}),
        (["--switch-on", "true", "--count", "1"], {"switch_on": True, "count": 1}),
        (["--switch-on=False"], {"switch_on": False}),
        (["--switch-on", "false"], {"switch_on": False}),
        (["--many", "a", "b", "--many=-c"], {"many": ("a", "b", "-c")}),
        (["--seed", "1"], {"seed": 1}),
        (["--seed", "1", "2"], {"seed": [1, 2]}),
        (["--per-part.text_encoder", "x"], {"per_part": {"text_encoder": "x"}}),
        (["--per_part.a=x=y", "--per-part.b", "z"], {"per_part": {"a": "x=y", "b": "z"}}),
        (["--file", "f"], {"path": "f"}),
    ],
)
def test_what_was_said_and_nothing_else_is_returned(argv, values):
    assert parse(*argv) == values


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cuont", "1"], "unrecognized argument --cuont. Did you mean '--count'? "),
        (["--some_txet", "1"], "unrecognized argument --some_txet. Did you mean '--some-text'? "),
        (["--count-not=1"], "unrecognized argument --count-not."),
        (["--coun", "1"], "unrecognized argument --coun. Did you mean '--count'?"),
        (["-x"], "unrecognized argument -x."),
        (["stray"], "unexpected 'stray': every value follows a flag."),
        (["--per_part", "x"], "--per-part needs a name: write --per-part.NAME VALUE"),
        (["--count"], "--count needs a value; write --count=VALUE"),
        (["--many"], "--many needs a value"),
        (["--some-text", "--count", "1"], "--some-text needs a value; write --some-text=VALUE"),
        (["--some-text=--"], "--some-text does not take '--' as its value."),
        (["--per-part.vae"], "--per-part.vae needs a value"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(argv, message):
    with pytest.raises(UserError) as raised:
        parse(*argv)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--count", "1.5"], "--count='1.5': must be a whole number"),
        (["--scale", "inf"], "--scale='inf': must be a finite number"),
        (["--colour", "gren"], "--colour='gren': choose one of red, green. Did you mean 'green'?"),
        (["--switch-on=maybe"], "--switch-on='maybe': must be true or false"),
        (["--seed", "x"], "--seed='x': must be a whole number"),
    ],
)
def test_a_bad_value_names_the_flag(argv, message):
    with pytest.raises(InvalidArgument) as raised:
        parse(*argv)
    assert str(raised.value) == message


def test_unknown_flags_can_be_left_for_a_second_reading():
    said, unknown = parser().parse_known(["--family_flag", "3", "--count", "2"])
    assert vars(said) == {"count": "2"}
    assert unknown == ["--family_flag", "3"]


def test_two_owners_of_one_spelling_are_a_definition_error():
    made = parser()
    with pytest.raises(PipelineDefinitionError, match=r"Other\.some_text claims .* Record has"):
        made.add_flags("other", FLAGS, owner="Other")


def test_help_shows_defaults_and_placeholders():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        parser().print_help()
    text = " ".join(out.getvalue().split())
    assert "A text, 100% of it." in text
    assert "--count N A number. (default: 3)" in text
    assert "--colour {red,green}" in text
    assert "--switch-on, --no-switch-on A switch. (default: off)" in text
    assert "--per-part.NAME TEXT" in text


names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
texts = st.text(max_size=20).filter(lambda text: text != "--")


@settings(deadline=None)
@given(
    st.builds(
        Record,
        some_text=texts,
        count=st.integers(),
        scale=st.floats(allow_nan=False, allow_infinity=False),
        colour=st.sampled_from(["red", "green"]),
        switch_on=st.booleans(),
        many=st.lists(texts, max_size=3).map(tuple),
        seed=st.none() | st.integers() | st.lists(st.integers(), min_size=2, max_size=3),
        per_part=st.dictionaries(names, texts, max_size=3),
        path=st.none() | texts,
    )
)
def test_values_survive_the_way_over_a_command_line(record):
    values = asdict(record)
    parsed = parse(*to_argv(FLAGS, values))
    assert asdict(Record(**parsed)) == values  # type: ignore[arg-type]
