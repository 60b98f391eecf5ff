from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.utils.environ import (
    EXTERNAL_MODEL_PACKAGE,
    VARIABLES,
    LaunchedRank,
    environment_with,
    launched_rank,
)
from sglang.multimodal_gen.runtime.utils.errors import UserError


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


TOLD = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_launcher_tells_a_process_its_place(told: pytest.MonkeyPatch) -> None:
    assert launched_rank() == LaunchedRank(3, 8, 1, 2, "node0")
    told.delenv("LOCAL_WORLD_SIZE")
    assert launched_rank() == LaunchedRank(3, 8, 1, 8, "node0")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_it_is_for_another_program(told: pytest.MonkeyPatch, name: str) -> None:
    told.delenv(name)
    assert launched_rank() is None


def test_words_where_numbers_belong_are_refused(told: pytest.MonkeyPatch) -> None:
    told.setenv("LOCAL_RANK", "first")
    with pytest.raises(UserError, match="LOCAL_RANK='first' must be a whole number"):
        launched_rank()


def test_what_is_set_wins_over_what_we_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = environment_with({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("7", "lo")
