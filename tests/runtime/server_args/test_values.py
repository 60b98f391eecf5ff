from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from sglang.multimodal_gen.runtime.server_args.values import ValueType, value_type


class Colour(Enum):
    RED = "red"
    DARK_BLUE = 7


def known(annotation, choices=()) -> ValueType:
    found = value_type(annotation, choices)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "7", 7),
        (int, "-1", -1),
        (float, "1e-3", 0.001),
        (float | None, "0", 0.0),
        (float | int, "2", 2.0),
        (str, "7", "7"),
        (str | None, "", ""),
        (Path, "a/b", Path("a/b")),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Colour, "red", Colour.RED),
        (Colour, "dark_blue", Colour.DARK_BLUE),
        (Colour | str | None, "RED", Colour.RED),
        (tuple[int, ...], ["1", "2"], (1, 2)),
        (list[str], ["1"], ["1"]),
        (tuple[int, int], ["3", "4"], (3, 4)),
        (int | list[int] | None, ["5"], 5),
        (int | list[int] | None, ["5", "6"], [5, 6]),
        (list[bool], ["true", "false"], [True, False]),
        (dict[str, str], {"vae": "x"}, {"vae": "x"}),
        (Mapping[str, int], {"vae": "3"}, {"vae": 3}),
        (dict[str, Any] | None, '{"a": [1]}', {"a": [1]}),
    ],
)
def test_text_becomes_the_value_that_the_annotation_means(annotation, text, value):
    parsed = known(annotation).parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "problem"),
    [
        (int, "1.5", "must be a whole number"),
        (int, "x", "must be a whole number"),
        (float, "x", "must be a number"),
        (float, "nan", "must be a finite number"),
        (float, "inf", "must be a finite number"),
        (Literal["cpu", "cuda"], "cuba", "choose one of cpu, cuda. Did you mean 'cuda'?"),
        (Literal[1, 2], "3", "choose one of 1, 2."),
        (Colour, "rad", "choose one of red, dark_blue. Did you mean 'red'?"),
        (tuple[int, int], ["3"], "takes 2 values, not 1"),
        (list[bool], ["yes"], "must be true or false"),
        (dict[str, int], {"vae": "x"}, "vae: must be a whole number"),
        (dict[str, str], {"a b": "x"}, "'a b' is no name"),
        (dict[str, Any], "[1]", "must be a JSON object"),
        (dict[str, Any], "{", "must be a JSON object"),
    ],
)
def test_bad_text_is_refused_with_the_problem(annotation, text, problem):
    with pytest.raises(ValueError, match=problem.replace("?", r"\?")):
        known(annotation).parse(text)


@pytest.mark.parametrize(
    ("annotation", "value", "kept"),
    [
        (int, 7, 7),
        (float, 7, 7.0),
        (str, Path("a"), "a"),
        (bool, False, False),
        (int | None, None, None),
        (tuple[int, ...], [1, 2], (1, 2)),
        (int | list[int], (1, 2), [1, 2]),
        (int | list[int], 0, 0),
        (Colour, Colour.RED, Colour.RED),
        (Mapping[str, str], {}, {}),
    ],
)
def test_a_value_of_the_right_type_is_kept(annotation, value, kept):
    accepted = known(annotation).accept(value)
    assert accepted == kept
    assert type(accepted) is type(kept)


@pytest.mark.parametrize(
    ("annotation", "value", "problem"),
    [
        (int, "7", "must be a whole number, not str"),
        (int, 7.0, "must be a whole number, not float"),
        (int, True, "must be a whole number, not bool"),
        (float, True, "must be a number, not bool"),
        (float, float("nan"), "must be a finite number"),
        (bool, 1, "must be true or false, not int"),
        (str, False, "must be text, not bool"),
        (str, None, "must be text, not NoneType"),
        (tuple[int, ...], 3, "must be a list, each item a whole number"),
        (Mapping[str, str], "vae=x", "must map names to text"),
        (Mapping[str, str], {"vae": 3}, "vae: must be text, not int"),
        (Mapping[str, str], {3: "x"}, "3 is no name"),
        (Colour, 7, "choose one of"),
    ],
)
def test_a_value_of_another_type_is_refused(annotation, value, problem):
    with pytest.raises(ValueError, match=problem):
        known(annotation).accept(value)


@pytest.mark.parametrize(
    "annotation", [object, Any, int | str, list[list[int]], tuple[int, str], bytes, list[int | str]]
)
def test_what_text_cannot_express_has_no_value_type(annotation):
    assert value_type(annotation) is None


def test_choices_narrow_an_annotation_that_lists_none():
    narrowed = known(str, ("a", "b"))
    assert narrowed.metavar() == "{a,b}"
    with pytest.raises(ValueError, match="choose one of a, b"):
        narrowed.accept("c")
