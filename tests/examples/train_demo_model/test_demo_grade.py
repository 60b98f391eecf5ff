"""The grader: right pictures pass, and each kind of mistake is seen."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from examples.train_demo_model.grade import components, detect, grade
from examples.train_demo_model.layout import place
from examples.train_demo_model.render import render, to_uint8
from examples.train_demo_model.scenes import (
    KINDS,
    OPPOSITE,
    PALETTE,
    POSITIONS,
    Scene,
    Shape,
    distinct_scenes,
)

COUNT = 120
SCENES = distinct_scenes(5, COUNT)


def pictures(scenes: list[Scene], seed: int = 0) -> np.ndarray:
    return to_uint8(render(place(scenes, np.random.default_rng(seed))))


def free_colour(scene: Scene, rng: random.Random) -> str:
    used = {scene.background, *(shape.colour for shape in scene.shapes)}
    return rng.choice([colour for colour in PALETTE if colour not in used])


def with_first(scene: Scene, **changes: str) -> Scene:
    first = dataclasses.replace(scene.shapes[0], **changes)
    return dataclasses.replace(scene, shapes=(first, *scene.shapes[1:]))


def wrong_colour(scene: Scene, rng: random.Random) -> Scene | None:
    return with_first(scene, colour=free_colour(scene, rng))


def wrong_kind(scene: Scene, rng: random.Random) -> Scene | None:
    kinds = [kind for kind in KINDS if kind != scene.shapes[0].kind]
    return with_first(scene, kind=rng.choice(kinds))


def wrong_size(scene: Scene, rng: random.Random) -> Scene | None:
    if not (size := scene.shapes[0].size):
        return None
    return with_first(scene, size="small" if size == "large" else "large")


def wrong_position(scene: Scene, rng: random.Random) -> Scene | None:
    taken = {shape.position for shape in scene.shapes}
    if "" in taken:
        return None
    return with_first(scene, position=rng.choice([p for p in POSITIONS if p not in taken]))


def turned_relation(scene: Scene, rng: random.Random) -> Scene | None:
    if not scene.relations:
        return None
    return dataclasses.replace(scene, relations=tuple(OPPOSITE[r] for r in scene.relations))


def exchanged_kinds(scene: Scene, rng: random.Random) -> Scene | None:
    if len(scene.shapes) < 2 or scene.shapes[0].kind == scene.shapes[1].kind:
        return None
    first, second, *rest = scene.shapes
    swapped = (
        dataclasses.replace(first, kind=second.kind),
        dataclasses.replace(second, kind=first.kind),
    )
    return dataclasses.replace(scene, shapes=(*swapped, *rest))


def missing_shape(scene: Scene, rng: random.Random) -> Scene | None:
    if len(scene.shapes) == 1:
        return None
    return dataclasses.replace(scene, shapes=scene.shapes[:-1], relations=scene.relations[:-1])


def extra_shape(scene: Scene, rng: random.Random) -> Scene | None:
    if len(scene.shapes) == 3:
        return None
    extra = Shape(rng.choice(KINDS), free_colour(scene, rng))
    return dataclasses.replace(scene, shapes=(*scene.shapes, extra), relations=())


def wrong_background(scene: Scene, rng: random.Random) -> Scene | None:
    return dataclasses.replace(scene, background=free_colour(scene, rng))


MISTAKES = {
    wrong_colour: "missing",
    wrong_kind: "kind",
    wrong_size: "size",
    wrong_position: "position",
    turned_relation: "relation",
    exchanged_kinds: "kind",
    missing_shape: "missing",
    extra_shape: "extra",
    wrong_background: "background",
}


def test_true_pictures_are_right():
    faults = [grade(p, s) for p, s in zip(pictures(SCENES), SCENES, strict=True)]
    assert sum(map(bool, faults)) <= COUNT * 0.005, [f for f in faults if f]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_seen(mistake: Callable[[Scene, random.Random], Scene | None]):
    rng = random.Random(6)
    pairs = [(scene, wrong) for scene in SCENES if (wrong := mistake(scene, rng)) is not None]
    assert len(pairs) >= 20
    drawn = pictures([wrong for _, wrong in pairs], seed=1)
    faults = [grade(p, scene) for p, (scene, _) in zip(drawn, pairs, strict=True)]
    assert np.mean([bool(found) for found in faults]) >= 0.98
    named = [any(fault.sort == MISTAKES[mistake] for fault in found) for found in faults]
    assert np.mean(named) >= 0.95


def test_blur_and_noise_of_a_decoder_do_not_matter():
    drawn = pictures(SCENES[:40]).astype(np.float32)
    soft = (drawn + np.roll(drawn, 1, 1) + np.roll(drawn, 1, 2)) / 3
    noisy = soft + np.random.default_rng(0).normal(0, 6, soft.shape)
    seen = noisy.clip(0, 255).astype(np.uint8)
    assert sum(bool(grade(p, s)) for p, s in zip(seen, SCENES[:40], strict=True)) <= 1


def test_noise_alone_is_wrong():
    lots = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert grade(lots, SCENES[0])


def test_detection_measures_centre_and_scale():
    scene = Scene((Shape("star", "red", "large"),), "black")
    layout = place([scene], np.random.default_rng(2))
    background, (found,) = detect(to_uint8(render(layout))[0])
    assert background == "black"
    assert (found.kind, found.colour) == ("star", "red")
    assert abs(found.scale - layout.scale[0, 0]) < 0.5
    assert abs(found.x - layout.centre[0, 0, 0]) < 0.5
    assert abs(found.y - layout.centre[0, 0, 1]) < 0.5


def test_components_join_what_touches():
    mask = np.zeros((6, 6), bool)
    mask[1, 1:4] = mask[1:4, 3] = True  # an angle
    mask[5, 0] = True
    mask[4, 5] = True  # touches nothing, not even at a corner
    parts = components(mask)
    assert sorted(len(rows) for rows, _ in parts) == [1, 1, 5]


def test_wrong_picture_format_is_named():
    with pytest.raises(ValueError, match="uint8"):
        detect(np.zeros((64, 64, 3), np.uint8))
