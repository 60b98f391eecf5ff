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
    mix_for,
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


def task(makes, image="no", video="no", name="x"):
    return {"name": name, "makes": makes, "image": image, "video": video}


@pytest.mark.parametrize(
    ("tasks", "asked"),
    [
        ([task("image")], {"picture"}),
        ([task("image", "must")], {"edit"}),
        ([task("image"), task("image", "must")], {"picture", "edit"}),
        ([task("video")], {"video"}),
        ([task("image", "may"), task("video", "must")], {"picture", "edit", "video"}),
    ],
)
def test_a_mix_is_what_the_model_can_do(tasks, asked):
    mix = mix_for(tasks)
    assert {entry.asks for entry in mix} == asked
    assert len({entry.name for entry in mix}) == len(mix)
    given = [e for e in mix if e.asks == "video" and "input_reference" in e.body]
    assert bool(given) == (tasks[-1]["makes"] == "video" and tasks[-1]["image"] != "no")


def test_a_model_that_only_changes_videos_has_no_usual_mix():
    with pytest.raises(UserError, match="name one by --mix"):
        mix_for([task("video", video="must")])


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"asks": "song"}, "must be picture or edit or video"),
        ({"asks": "video", "cancel_after": 1}, "cancel_by: route"),
    ],
)
def test_what_is_asked_for_is_checked(tmp_path, entry, problem):
    (tmp_path / "m.json").write_text(json.dumps([{"body": {"prompt": "x"}} | entry]))
    with pytest.raises(UserError, match=problem):
        read_mix(str(tmp_path / "m.json"))


def test_where_several_tasks_fit_one_is_named():
    tasks = [task("image", "may", name="TI2I"), task("image", "must", name="I2I")]
    by_name = {entry.name: entry.body for entry in mix_for(tasks)}
    assert by_name["edit"]["task_type"] == "TI2I"
    assert "task_type" not in by_name["small"]
