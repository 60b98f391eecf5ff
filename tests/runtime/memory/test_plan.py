"""The plan: what fits, what moves least, what is said; and the numbers when nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.memory.plan import (
    GIB,
    HOST_RESERVE,
    ComponentFacts,
    Placement,
    Residency,
    Wishes,
    activation_reserve,
    plan_residency,
)
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory

R, C, L = Residency.RESIDENT, Residency.COMPONENT, Residency.LAYERWISE
MIB = 1 << 20


def component(name, group, gib, blocks=(), rest=0.0):
    sizes = tuple(int(size * GIB) for size in blocks)
    total = int(gib * GIB) if gib is not None else sum(sizes) + int(rest * GIB)
    return ComponentFacts(name, group, total, sizes, bool(sizes))


BIG = (
    component("text_encoder", "text_encoder", None, [0.014] * 12, 0.08),
    component("text_encoder_2", "text_encoder", None, [0.36] * 24, 0.25),
    component("transformer", "dit", None, [0.63] * 19 + [0.26] * 38, 0.1),
    component("vae", "vae", None, [0.01] * 8, 0.05),
)
"""Twelve billion weights in bf16, and an encoder of five."""


def facts(device, host=256.0, total=None):
    total = device if total is None else total
    return MemoryFacts(int(device * GIB), int(total * GIB), int(host * GIB))


def modes(plan):
    return [plan[component.name].mode for component in BIG]


@pytest.mark.parametrize(
    ("device", "chosen", "blocks_that_stay", "overlap"),
    [
        (141, [R, R, R, R], 0, False),
        (36, [R, R, R, R], 0, False),
        (28, [R, L, R, R], 0, True),
        (24, [R, L, L, R], 44, False),
        (12, [R, L, L, R], 9, False),
        (6, [R, L, L, R], 0, False),
    ],
)
def test_the_fewest_bytes_move_that_fit(device, chosen, blocks_that_stay, overlap):
    memory = facts(device, total=16)
    plan = plan_residency(BIG, memory, Wishes(), device="cuda")
    assert (modes(plan), plan.overlap) == (chosen, overlap), plan.note
    assert plan["transformer"].resident_layers == blocks_that_stay
    assert plan.device_bytes <= memory.device_free - activation_reserve(memory)


def test_what_is_used_once_a_request_goes_before_what_is_used_at_every_step():
    parts = (component("text_encoder", "text_encoder", 9), component("transformer", "dit", 22))
    for device, chosen in ((36, [R, R]), (34, [C, C]), (27, [C, C])):
        plan = plan_residency(parts, facts(device, total=16), Wishes(), device="cuda")
        assert [plan[part.name].mode for part in parts] == chosen
        assert not plan.overlap
    small = (component("text_encoder", "text_encoder", 2), component("transformer", "dit", 22))
    plan = plan_residency(small, facts(29, total=16), Wishes(), device="cuda")
    assert [plan[part.name].mode for part in small] == [R, R]


def test_memory_left_over_keeps_leading_blocks_on_the_device():
    roomy = plan_residency(BIG, facts(24, total=16), Wishes(), device="cuda")
    tight = plan_residency(BIG, facts(12, total=16), Wishes(), device="cuda")
    assert roomy["transformer"].resident_layers > tight["transformer"].resident_layers > 0
    assert roomy.host_bytes < tight.host_bytes
    assert f"(all but {roomy['transformer'].resident_layers} of 57 blocks)" in (roomy.note or "")


def test_wishes_are_kept_and_only_what_is_left_open_is_chosen():
    wishes = Wishes({"transformer": L, "vae": C}, prefetch_size=0.1, resident_layers=3)
    plan = plan_residency(BIG, facts(141), wishes, device="cuda")
    assert modes(plan) == [R, R, L, C]
    assert plan["transformer"] == Placement(L, slots=7, resident_layers=3)
    assert plan.overlap
    cpu = plan_residency(BIG, facts(256), wishes, device="cpu")
    assert modes(cpu) == [R, R, L, C]


@pytest.mark.parametrize(("size", "slots"), [(0, 2), (0.001, 2), (0.1, 7), (1, 2), (5, 6)])
def test_how_far_ahead(size, slots):
    plan = plan_residency(BIG, facts(141), Wishes({"transformer": L}, size), device="cuda")
    assert plan["transformer"].slots == slots


@pytest.mark.parametrize(("size", "layers"), [(0, 0), (0.5, 28), (1, 1), (20, 20), (500, 57)])
def test_how_many_blocks_stay(size, layers):
    wishes = Wishes({"transformer": L}, resident_layers=size)
    plan = plan_residency(BIG, facts(141), wishes, device="cuda")
    assert plan["transformer"].resident_layers == layers


def test_everything_by_layers_takes_little_of_the_device():
    plan = plan_residency(BIG, facts(141), Wishes({c.name: L for c in BIG}), device="cuda")
    assert plan.device_bytes < 2.6 * GIB
    assert plan.host_bytes == sum(c.nbytes for c in BIG)


def test_one_sentence_says_what_was_chosen_and_why():
    plan = plan_residency(BIG, facts(141), Wishes(), device="cuda")
    assert plan.note == (
        "memory: all 31.2 GiB of weights stay on the GPU (141.0 GiB are free, 14.1 GiB of them "
        "kept for activations)"
    )
    plan = plan_residency(BIG, facts(12, total=16), Wishes({"text_encoder": C}), device="cuda")
    assert plan.note == (
        "memory: text_encoder offloaded whole; text_encoder_2, transformer (all but 10 of 57 "
        "blocks) streamed by layers: of 31.2 GiB of weights 24.8 GiB rest in host memory and 7.8 "
        "GiB at most are on the device of 12.0 GiB free, 4.0 GiB more kept for activations"
    )
    assert plan_residency(BIG, facts(64), Wishes(), device="cpu").note is None


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(OutOfMemory) as caught:
        plan_residency(BIG, facts(5, total=16), Wishes(), device="cuda")
    for part in ("transformer 21.9 GiB", "beside 4.0 GiB for activations", "5.0 GiB and 256.0 GiB"):
        assert part in str(caught.value)
    with pytest.raises(OutOfMemory, match=r"With transformer resident, as asked for,.*Offload"):
        plan_residency(BIG, facts(24), Wishes({"transformer": R}), device="cuda")
    with pytest.raises(OutOfMemory, match=r"31\.2 GiB are needed; 20\.0 GiB are free"):
        plan_residency(BIG, facts(20, host=20), Wishes(), device="cpu")


def test_host_memory_counts_too():
    with pytest.raises(OutOfMemory, match=r"16\.0 GiB are free"):
        plan_residency(BIG, facts(24, host=16), Wishes({"transformer": L}), device="cuda")
    plan = plan_residency(BIG, facts(24, host=20, total=16), Wishes(), device="cuda")
    assert plan.host_bytes <= 19 * GIB


def test_a_machine_that_says_nothing_is_taken_at_its_word():
    plan = plan_residency(BIG, MemoryFacts(None, None, None), Wishes(), device="cuda")
    assert modes(plan) == [R, R, R, R]


sizes = st.integers(1, 12_000).map(lambda mib: mib * MIB)


@st.composite
def any_component(draw, name):
    group = draw(st.sampled_from(["dit", "text_encoder", "vae", "projection"]))
    blocks = tuple(draw(st.lists(sizes, max_size=4)))
    rest = draw(sizes)
    return ComponentFacts(name, group, sum(blocks) + rest, blocks, bool(blocks))


@st.composite
def situations(draw):
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    components = [draw(any_component(name)) for name in names]
    memory = MemoryFacts(draw(sizes) * 4, draw(sizes) * 4, draw(sizes) * 4)
    wished = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(Residency)))
    streams = {c.name for c in components if c.streams}
    wished = {name: mode for name, mode in wished.items() if mode is not L or name in streams}
    return components, memory, Wishes(wished)


def peak_of(components, placements):
    """The most device memory at once, from first principles: stage by stage."""
    always, in_use = 0, {}
    for c in components:
        place = placements[c.name]
        staying, streamed = c.blocks[: place.resident_layers], c.blocks[place.resident_layers :]
        outside = c.nbytes - sum(c.blocks)
        moving = {R: 0, C: c.nbytes, L: outside + min(2, len(streamed)) * max(streamed, default=0)}
        always += {R: c.nbytes, C: 0, L: sum(staying)}[place.mode]
        in_use[c.group] = in_use.get(c.group, 0) + moving[place.mode]
    return always + max(in_use.values())


def host_of(components, placements):
    total = 0
    for c in components:
        place = placements[c.name]
        total += {R: 0, C: c.nbytes, L: c.nbytes - sum(c.blocks[: place.resident_layers])}[
            place.mode
        ]
    return total


@settings(deadline=None, max_examples=200)
@given(situations())
def test_a_plan_fits_and_is_refused_only_where_none_does(situation):
    components, memory, wishes = situation
    names = [c.name for c in components]
    budget = memory.device_free - activation_reserve(memory)
    host = memory.host_free - HOST_RESERVE

    def fits(placements):
        return peak_of(components, placements) <= budget and host_of(components, placements) <= host

    def allowed(modes):
        return all(
            c.streams or mode is not L for c, mode in zip(components, modes, strict=True)
        ) and (all(wishes.modes.get(n, mode) is mode for n, mode in zip(names, modes, strict=True)))

    possible = [
        dict(zip(names, map(Placement, modes), strict=True))
        for modes in itertools.product(Residency, repeat=len(names))
        if allowed(modes)
    ]
    try:
        plan = plan_residency(components, memory, wishes, device="cuda")
    except OutOfMemory:
        assert not any(fits(placements) for placements in possible)
        return
    assert fits(plan.placements)
    assert plan.host_bytes == host_of(components, plan.placements)
    assert peak_of(components, plan.placements) <= plan.device_bytes <= budget
    assert all(plan[name].mode is mode for name, mode in wishes.modes.items())
    if not wishes.modes and fits({name: Placement(R) for name in names}):
        assert {plan[name].mode for name in names} == {R}


def test_of_denoisers_that_take_turns_one_is_on_the_device_at_a_time():
    two = [component(name, "dit", 28) for name in ("transformer", "transformer_2")]
    turns = [replace(facts, takes_turns=True) for facts in two]
    wishes = Wishes({facts.name: C for facts in two})
    memory = facts(48)
    plan = plan_residency(turns, memory, wishes, device="cuda")
    assert plan.device_bytes == 28 * GIB
    assert plan.host_bytes == 2 * 28 * GIB
    with pytest.raises(OutOfMemory):
        plan_residency(two, memory, wishes, device="cuda")
