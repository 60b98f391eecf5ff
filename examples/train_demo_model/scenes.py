"""Scenes: what a picture shows, as data; drawing lots for them; which ones are never trained on.

A scene is a background and one to three shapes of distinct colours, with absolute positions, or
chained by relations, or neither. No torch here: worker processes import this module.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (222, 36, 36),
    "orange": (250, 132, 16),
    "yellow": (250, 222, 40),
    "green": (32, 158, 60),
    "cyan": (54, 208, 222),
    "blue": (36, 72, 220),
    "purple": (136, 44, 176),
    "pink": (250, 140, 196),
    "black": (16, 16, 16),
    "gray": (128, 128, 128),
    "white": (250, 250, 250),
}
"""sRGB values; the two nearest colours are 90 apart (Euclidean, 0..255)."""

KINDS = ("circle", "square", "triangle", "star", "cross")
SIZES = ("small", "large")
RELATIONS = ("above", "below", "left of", "right of")
OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
POSITIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
"""Cells of a 3 x 3 grid, in reading order: cell ``i`` is row ``i // 3``, column ``i % 3``."""

DEFAULT_BACKGROUND = "white"
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape; ``size`` and ``position`` are empty where the prompt leaves them open."""

    kind: str
    colour: str
    size: str = ""
    position: str = ""

    def words(self) -> str:
        """Canonical words, such as ``small red circle@top left``."""
        return " ".join(filter(None, (self.size, self.colour, self.kind))) + (
            f"@{self.position}" if self.position else ""
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows.

    ``relations`` is empty, or holds one relation for each neighbouring pair: shape ``i`` stands
    ``relations[i]`` shape ``i + 1``.
    """

    shapes: tuple[Shape, ...]
    background: str = DEFAULT_BACKGROUND
    relations: tuple[str, ...] = ()

    def canonical(self) -> str:
        """One text for all ways to say the same scene: "a above b" equals "b below a"."""
        words = [shape.words() for shape in self.shapes]
        if not self.relations:
            return f"{self.background}: " + " & ".join(sorted(words))
        forward = _chain(words, self.relations)
        backward = _chain(words[::-1], [OPPOSITE[name] for name in self.relations[::-1]])
        return f"{self.background}: " + min(forward, backward)

    def held_out(self) -> bool:
        """True for scenes that training never sees: 1 in 20, by a hash of the canonical text."""
        return is_held_out(self.canonical())


def is_held_out(canonical: str) -> bool:
    """True for one text in :data:`HELD_OUT_ONE_IN`, by its hash."""
    digest = hashlib.sha256(canonical.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


FORMS = (
    ("one", 8),
    ("one placed", 12),
    ("two", 8),
    ("two related", 30),
    ("two placed", 10),
    ("three", 6),
    ("three related", 26),
)
"""Forms of a scene and how often each is drawn."""


def form_of(scene: Scene) -> str:
    """The form in :data:`FORMS` that a scene has."""
    count = ("one", "two", "three")[len(scene.shapes) - 1]
    if scene.relations:
        return f"{count} related"
    return f"{count} placed" if scene.shapes[0].position else count


def draw_scene(rng: random.Random) -> Scene:
    """A random scene, held out or not."""
    names, weights = zip(*FORMS, strict=True)
    form = rng.choices(names, weights)[0]
    count = {"one": 1, "two": 2, "three": 3}[form.split()[0]]
    colours = rng.sample(list(PALETTE), count + 1)
    if rng.random() < 0.25 and DEFAULT_BACKGROUND not in colours:
        colours[0] = DEFAULT_BACKGROUND
    cells = rng.sample(POSITIONS, count) if form.endswith("placed") else [""] * count
    shapes = tuple(
        Shape(
            kind=rng.choice(KINDS),
            colour=colours[i + 1],
            size=rng.choice((*SIZES, *SIZES, "")),
            position=cells[i],
        )
        for i in range(count)
    )
    relations: tuple[str, ...] = ()
    if form.endswith("related"):
        relations = (rng.choice(RELATIONS),)
        if count == 3:
            # "a above b below c" stacks a and c on the same side of b: hard to read, not drawn.
            second = [name for name in RELATIONS if name != OPPOSITE[relations[0]]]
            relations = (*relations, rng.choice(second))
    return Scene(shapes, colours[0], relations)


def draw_scenes(rng: random.Random, count: int, *, held_out: bool) -> list[Scene]:
    """``count`` random scenes, all held out or all for training."""
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = draw_scene(rng)
        if scene.held_out() == held_out:
            scenes.append(scene)
    return scenes


def distinct_scenes(seed: int, count: int, *, held_out: bool = True) -> list[Scene]:
    """The first ``count`` different scenes of a seed; evaluations use these."""
    rng = random.Random(f"scenes {seed}")
    found: dict[str, Scene] = {}
    while len(found) < count:
        (scene,) = draw_scenes(rng, 1, held_out=held_out)
        found.setdefault(scene.canonical(), scene)
    return list(found.values())


def _chain(words: list[str], relations: tuple[str, ...] | list[str]) -> str:
    text = words[0]
    for relation, following in zip(relations, words[1:], strict=True):
        text += f" {relation} {following}"
    return text
