"""Clips, tracks and the grader: true renders are right, planted mistakes are found."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from examples.train_demo_model.render import palette_on
from examples.train_demo_model.scenes import KINDS, PALETTE, SIZES
from examples.train_demo_video.clips import MOTIONS, Clip, draw_clips, held_out_prompts, say
from examples.train_demo_video.grade import grade
from examples.train_demo_video.tracks import (
    CANVAS,
    FRAMES,
    draw_tracks,
    render,
    to_device,
    to_uint8,
)
from examples.train_demo_video.vocabulary import build_tokenizer, encode_prompts

CHOICES = {"kind": KINDS, "colour": tuple(PALETTE), "background": tuple(PALETTE),
           "motion": MOTIONS, "size": SIZES}  # fmt: skip


def rendered(clips: list[Clip]) -> np.ndarray:
    fields = to_device(draw_tracks(clips, np.random.default_rng(0)), "cpu")
    return to_uint8(render(fields, palette_on("cpu")))


def test_true_clips_are_right_and_each_planted_mistake_is_found():
    rng = random.Random(3)
    clips = [replace(Clip("circle", "red", m), kind=rng.choice(KINDS)) for m in MOTIONS]
    clips[:3] = [replace(clip, size="small", background="blue") for clip in clips[:3]]
    for clip, frames in zip(clips, rendered(clips), strict=True):
        assert frames.shape == (FRAMES, CANVAS, CANVAS, 3)
        assert grade(frames, clip) == []
        name = rng.choice(["size", *CHOICES]) if clip.size else rng.choice(list(CHOICES)[:4])
        wrong = rng.choice([value for value in CHOICES[name] if value != getattr(clip, name)])
        assert grade(frames, replace(clip, **{name: wrong})), (clip, name, wrong)


def test_flicker_of_a_frame_is_forgiven_and_of_two_is_not():
    clip = Clip("square", "green", "right", "large")
    (frames,) = rendered([clip])
    frames[8] = 250
    assert grade(frames, clip) == []
    frames[9] = 250
    assert {fault.sort for fault in grade(frames, clip)} == {"missing"}
    with pytest.raises(ValueError, match=r"uint8 \(F, 64, 64, 3\)"):
        grade(frames[:, ::2], clip)


def test_a_clip_played_backwards_is_the_opposite():
    clip = Clip("star", "purple", "up")
    (frames,) = rendered([clip])
    assert grade(frames[::-1], replace(clip, motion="down")) == []
    assert grade(frames[::-1], clip)


def test_held_out_clips_are_never_trained_on_and_prompts_fit():
    asked, prompts = held_out_prompts(0, 40)
    assert all(clip.held_out() for clip in asked)
    assert len({clip.canonical() for clip in asked}) == 40
    trained = draw_clips(random.Random(0), 200, held_out=False)
    assert not any(clip.held_out() for clip in trained)
    tokenizer = build_tokenizer()
    rng = random.Random(1)
    words = prompts + [say(clip, rng) for clip in trained]
    ids = encode_prompts(tokenizer, words)
    assert ((ids != 0).sum(axis=1) == [len(text.split()) + 1 for text in words]).all()
    assert (ids[:, -1] == 0).all(), "room for the longest prompt and its end"
