"""Mix files and plans."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter

import pytest

from sglang.multimodal_gen.runtime.entrypoints.bench.mix import (
    DEFAULT_MIX,
    MixEntry,
    plan,
    read_mix,
)
from sglang.multimodal_gen.runtime.utils.errors import UserError


def planned(**options):
    return plan(DEFAULT_MIX, **{"rate": 5, "count": 2000, "seed": 3, "variants": 4} | options)


def test_a_plan_is_the_same_for_the_same_seed_and_another_for_another():
    assert planned() == planned()
    assert planned() != planned(seed=4)


def test_arrivals_are_a_poisson_process():
    times = [0.0, *(arrival.at for arrival in planned())]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.15)  # an exponential's: its mean


def test_entries_come_as_often_as_they_weigh():
    counts = Counter(arrival.entry.name for arrival in planned())
    assert counts["small"] == pytest.approx(4 * counts["wide"], rel=0.25)
    assert len({arrival.body["seed"] for arrival in planned()}) == 4


def test_an_own_seed_stays():
    entry = MixEntry("one", {"prompt": "x", "seed": 7})
    arrivals = plan([entry], rate=1, count=5, seed=0, variants=3)
    assert {arrival.body["seed"] for arrival in arrivals} == {7}


def test_files_are_yaml_or_json(tmp_path):
    entries = [{"name": "a", "weight": 2, "body": {"prompt": "x", "stream": True},
                "cancel_after": 0.5, "cancel_by": "route"}]  # fmt: skip
    expected = (MixEntry("a", {"prompt": "x", "stream": True}, 2, 0.5, "route"),)
    for name, raw in (("a.json", {"requests": entries}), ("b.json", entries)):
        (tmp_path / name).write_text(json.dumps(raw))
        assert read_mix(str(tmp_path / name)) == expected
    (tmp_path / "c.yaml").write_text("requests:\n- {body: {prompt: x}}\n")
    assert read_mix(str(tmp_path / "c.yaml"))[0].name == "request 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "neither YAML nor JSON"),
        ("{}", "list of requests"),
        ("[]", "list of requests"),
        ("- 3", "request 1: must be a mapping"),
        ("- {name: a}", "'body' must map"),
        ("- {body: {}, weigth: 2}", "Did you mean 'weight'"),
        ("- {body: {}, weight: 0}", "weight=0"),
        ("- {body: {}, weight: true}", "weight=True"),
        ("- {body: {}, cancel_after: -1}", "cancel_after=-1"),
        ("- {body: {}, cancel_by: letter}", "hang_up or route"),
        ("- {body: {}, cancel_by: route}", "needs stream"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path, text, said):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_mix(str(path))
