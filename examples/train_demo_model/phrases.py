"""Prompts: many ways to say a scene, and the way back from a prompt to the scene."""

from __future__ import annotations

import random
import re

from examples.train_demo_model.scenes import DEFAULT_BACKGROUND, KINDS, PALETTE, Scene, Shape

SIZE_WORDS = {"small": ("small", "small", "little", "tiny"), "large": ("large", "large", "big")}
RELATION_WORDS = {
    "above": ("above", "above", "over"),
    "below": ("below", "below", "under", "beneath"),
    "left of": ("to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "right of", "on the right of"),
}
POSITION_WORDS = {
    "top left": ("in the top left corner", "in the upper left corner", "at the top left"),
    "top": ("at the top", "in the top middle", "at the top center"),
    "top right": ("in the top right corner", "in the upper right corner", "at the top right"),
    "left": ("on the left", "on the left side", "at the left edge"),
    "center": ("in the center", "in the middle", "at the center"),
    "right": ("on the right", "on the right side", "at the right edge"),
    "bottom left": ("in the bottom left corner", "in the lower left corner", "at the bottom left"),
    "bottom": ("at the bottom", "in the bottom middle", "at the bottom center"),
    "bottom right": (
        "in the bottom right corner",
        "in the lower right corner",
        "at the bottom right",
    ),
}
BACKGROUND_WORDS = (
    "on {article} {colour} background",
    "on {article} {colour} background",
    "on {colour}",
    "against {article} {colour} background",
    "with {article} {colour} background",
)
PREFIXES = ("", "", "", "", "a picture of ", "an image of ", "a drawing of ")
COLOUR_WORDS = {"gray": ("gray", "grey")}


class PromptError(ValueError):
    """The prompt is outside the grammar of the demo model's scenes."""


def say(scene: Scene, rng: random.Random) -> str:
    """One of the prompts for the scene."""
    words = [_say_shape(shape, rng) for shape in scene.shapes]
    if scene.relations:
        text = words[0]
        for i, relation in enumerate(scene.relations):
            link = " and " if i and rng.random() < 0.1 else " "
            # "a above b and left of c" would be about a: the chain's link names b again.
            if link == " and ":
                text += f" and the {_plain(scene.shapes[i])} is"
            text += f" {rng.choice(RELATION_WORDS[relation])} {words[i + 1]}"
    elif len(words) == 3:
        text = f"{words[0]}, {words[1]} and {words[2]}"
    else:
        text = " and ".join(words)
    text = rng.choice(PREFIXES) + text
    if scene.background != DEFAULT_BACKGROUND or rng.random() < 0.5:
        colour = _colour(scene.background, rng)
        words_of = rng.choice(BACKGROUND_WORDS)
        text += " " + words_of.format(article=article_of(colour), colour=colour)
    if rng.random() < 0.12:
        text = text[0].upper() + text[1:] + "."
    return text


def parse(prompt: str) -> Scene:
    """The scene of a prompt; the inverse of :func:`say`.

    Raises :class:`PromptError` for words outside the grammar.
    """
    text = re.sub(r"\s+", " ", prompt.strip().lower().rstrip(".")).replace("grey", "gray")
    text = re.sub(rf"^({'|'.join(p for p in PREFIXES if p)})", "", text)
    background = DEFAULT_BACKGROUND
    if match := re.search(rf" (?:on|against|with) (?:an? )?({_COLOURS})(?: background)?$", text):
        background, text = match[1], text[: match.start()]

    shapes: list[Shape] = []
    relations: list[str] = []
    while text:
        match = _SHAPE.match(text)
        if match is None:
            raise PromptError(f"prompt={prompt!r}: {text!r} does not begin with a shape")
        shapes.append(Shape(match["kind"], match["colour"], _SIZES.get(match["size"] or "", "")))
        text = text[match.end() :]
        if match := _POSITION.match(text):
            last = shapes[-1]
            position = _POSITIONS[match[1]]
            shapes[-1] = Shape(last.kind, last.colour, last.size, position)
            text = text[match.end() :]
        if match := _LINK.match(text):
            relations += [_RELATIONS[match[1]]] if match[1] else []
            text = text[match.end() :]
        elif text:
            raise PromptError(f"prompt={prompt!r}: cannot read {text!r}")
    if relations and len(relations) != len(shapes) - 1:
        raise PromptError(f"prompt={prompt!r}: relations must chain all shapes or none")
    return Scene(tuple(shapes), background, tuple(relations))


def corpus() -> list[str]:
    """All words of the grammar, once each, with capitals where a sentence can begin."""
    phrases = [*PALETTE, "grey", *KINDS, "a an the and is , ."]
    for table in (SIZE_WORDS, RELATION_WORDS, POSITION_WORDS):
        phrases += [phrase for choices in table.values() for phrase in choices]
    phrases += [*BACKGROUND_WORDS, *PREFIXES, "A An"]
    words = re.sub(r"{\w+}", " ", " ".join(phrases)).split()
    return sorted(set(words))


def _say_shape(shape: Shape, rng: random.Random) -> str:
    words = [_colour(shape.colour, rng), shape.kind]
    if shape.size:
        words.insert(0, rng.choice(SIZE_WORDS[shape.size]))
    text = " ".join(words)
    text = f"{article_of(text)} {text}"
    if shape.position:
        text += " " + rng.choice(POSITION_WORDS[shape.position])
    return text


def article_of(text: str) -> str:
    """Its indefinite article."""
    return "an" if text[0] in "aeiou" else "a"


def _plain(shape: Shape) -> str:
    return f"{shape.colour} {shape.kind}"


def _colour(colour: str, rng: random.Random) -> str:
    return rng.choice(COLOUR_WORDS.get(colour, (colour,)))


def _invert(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {phrase: name for name, phrases in table.items() for phrase in phrases}


def _either(phrases: dict[str, str]) -> str:
    """A pattern for any of the phrases; the longest first, since one may begin another."""
    return "|".join(sorted(phrases, key=len, reverse=True))


_SIZES = _invert(SIZE_WORDS)
_RELATIONS = _invert(RELATION_WORDS)
_POSITIONS = _invert(POSITION_WORDS)
_COLOURS = "|".join(PALETTE)
_SHAPE = re.compile(
    rf"(?:an? )?(?:(?P<size>{_either(_SIZES)}) )?(?P<colour>{_COLOURS}) (?P<kind>{'|'.join(KINDS)})"
)
# "on the left of" is a relation although it begins as the position "on the left".
_POSITION = re.compile(rf" ({_either(_POSITIONS)})(?! of\b)")
_LINK = re.compile(
    rf"(?: and the \w+ \w+ is)?(?:,? which is)? ({_either(_RELATIONS)}) |, (?:and )?| and "
)
