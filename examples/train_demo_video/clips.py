"""Clips as data: what one shows, which are never trained on, and many ways to say one.

One shape moves, grows, shrinks or stands still before a plain background. Colours, kinds and sizes
are those of the pictures' trainer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from examples.train_demo_model.phrases import (
    BACKGROUND_WORDS,
    COLOUR_WORDS,
    SIZE_WORDS,
    article_of,
)
from examples.train_demo_model.scenes import (
    DEFAULT_BACKGROUND,
    KINDS,
    PALETTE,
    SIZES,
    is_held_out,
)

MOTION_WORDS = {
    "right": ("moving left to right", "moving from left to right", "moving right"),
    "left": ("moving right to left", "moving from right to left", "moving left"),
    "down": ("moving down", "moving downwards", "moving top to bottom"),
    "up": ("moving up", "moving upwards", "moving bottom to top"),
    "growing": ("growing", "getting larger"),
    "shrinking": ("shrinking", "getting smaller"),
    "still": ("standing still", "not moving"),
}
"""In the first place, the words of the README."""
MOTIONS = tuple(MOTION_WORDS)
CHANGING = ("growing", "shrinking")
"""Motions that leave no word for the size."""
PREFIXES = ("", "", "", "", "a clip of ", "a video of ")


@dataclass(frozen=True, slots=True)
class Clip:
    """What a clip shows; ``size`` is empty where the prompt leaves it open."""

    kind: str
    colour: str
    motion: str
    size: str = ""
    background: str = DEFAULT_BACKGROUND

    def canonical(self) -> str:
        """One text for all ways to say the same clip."""
        words = (self.size, self.colour, self.kind, self.motion)
        return f"{self.background}: " + " ".join(filter(None, words))

    def held_out(self) -> bool:
        """True for clips that training never sees: 1 in 20, by a hash of the canonical text."""
        return is_held_out(self.canonical())


def draw_clip(rng: random.Random) -> Clip:
    """A random clip, held out or not."""
    background, colour = rng.sample(list(PALETTE), 2)
    if rng.random() < 0.25 and colour != DEFAULT_BACKGROUND:
        background = DEFAULT_BACKGROUND
    motion = rng.choice(MOTIONS)
    size = "" if motion in CHANGING else rng.choice((*SIZES, *SIZES, ""))
    return Clip(rng.choice(KINDS), colour, motion, size, background)


def draw_clips(rng: random.Random, count: int, *, held_out: bool) -> list[Clip]:
    """``count`` random clips, all held out or all for training."""
    clips: list[Clip] = []
    while len(clips) < count:
        clip = draw_clip(rng)
        if clip.held_out() == held_out:
            clips.append(clip)
    return clips


def held_out_prompts(seed: int, count: int) -> tuple[list[Clip], list[str]]:
    """Different held-out clips, a prompt for each. Seed 0 is the final test; others, to choose."""
    rng = random.Random(f"clips {seed}")
    found: dict[str, Clip] = {}
    while len(found) < count:
        (clip,) = draw_clips(rng, 1, held_out=True)
        found.setdefault(clip.canonical(), clip)
    clips = list(found.values())
    return clips, [say(clip, rng) for clip in clips]


def say(clip: Clip, rng: random.Random) -> str:
    """One of the prompts for the clip."""
    colour = rng.choice(COLOUR_WORDS.get(clip.colour, (clip.colour,)))
    size = rng.choice(SIZE_WORDS[clip.size]) if clip.size else ""
    shape = " ".join(filter(None, (size, colour, clip.kind)))
    text = (
        f"{rng.choice(PREFIXES)}{article_of(shape)} {shape} {rng.choice(MOTION_WORDS[clip.motion])}"
    )
    if clip.background != DEFAULT_BACKGROUND or rng.random() < 0.5:
        ground = rng.choice(COLOUR_WORDS.get(clip.background, (clip.background,)))
        words = rng.choice(BACKGROUND_WORDS)
        text += " " + words.format(article=article_of(ground), colour=ground)
    return text


def corpus() -> list[str]:
    """All words of the grammar, once each."""
    phrases = [*PALETTE, "grey", *KINDS, "a an", *PREFIXES]
    for table in (SIZE_WORDS, MOTION_WORDS):
        phrases += [phrase for choices in table.values() for phrase in choices]
    phrases += [text.replace("{article}", "").replace("{colour}", "") for text in BACKGROUND_WORDS]
    return sorted(set(" ".join(phrases).split()))
