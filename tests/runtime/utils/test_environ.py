from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.utils.environ import EXTERNAL_MODEL_PACKAGE, VARIABLES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ()),
        ("one", ("one",)),
        (" one , two.three,,one", ("one", "two.three")),
    ],
)
def test_package_names_are_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch, text: str, value: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", text)
    assert EXTERNAL_MODEL_PACKAGE.read() == value


def test_a_variable_that_is_not_set_has_its_empty_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    assert EXTERNAL_MODEL_PACKAGE.read() == ()


def test_the_table_is_told_to_readers() -> None:
    assert EXTERNAL_MODEL_PACKAGE in VARIABLES
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("SGLANG_") for name in names)
    assert all(variable.help.endswith(".") for variable in VARIABLES)
