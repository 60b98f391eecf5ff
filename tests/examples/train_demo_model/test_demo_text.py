"""The text encoders' lesson: where nouns stand, what the heads are told, what they are asked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from examples.train_demo_model.lessons import is_matrix
from examples.train_demo_model.phrases import say
from examples.train_demo_model.scenes import KINDS, draw_scenes
from examples.train_demo_model.text import (
    COLOURS,
    NOUN_PARTS,
    Facts,
    TextHeads,
    text_loss,
    text_report,
    whole_pixels,
)
from examples.train_demo_model.vocabulary import build_t5_tokenizer, encode_t5, find_nouns


def test_nouns_are_found_in_the_order_of_the_scene():
    rng = random.Random(2)
    scenes = draw_scenes(rng, 2000, held_out=False)
    prompts = [say(scene, rng) for scene in scenes]
    assert any(" is " in prompt for prompt in prompts), "a shape named twice must be among them"
    tokenizer = build_t5_tokenizer()
    ids = encode_t5(tokenizer, prompts)
    nouns = find_nouns(ids, tokenizer)
    for row, scene in enumerate(scenes):
        pieces = tokenizer.convert_ids_to_tokens(ids[row].tolist())
        found = [pieces[at].removeprefix("▁") for at in nouns[row, : len(scene.shapes)]]
        assert found == [shape.kind for shape in scene.shapes], prompts[row]
        assert not nouns[row, len(scene.shapes) :].any()


def some_facts() -> Facts:
    """A red square left above a blue circle; one star."""
    return Facts(
        noun=torch.tensor([[2, 6, 0], [3, 0, 0]], dtype=torch.int8),
        kind=torch.tensor([[1, 0, -1], [3, -1, -1]], dtype=torch.int8),
        colour=torch.tensor([[0, 5, 0], [2, 0, 0]], dtype=torch.int8),
        size=torch.tensor([[0, 1, 2], [2, 2, 2]], dtype=torch.int8),
        centre=torch.tensor([[[-30, -40], [10, 20], [0, 0]], [[5, 5], [0, 0], [0, 0]]]),
        background=torch.tensor([10, 4], dtype=torch.int8),
    )


def perfect(facts: Facts) -> list[torch.Tensor]:
    """What heads that know the facts would say."""

    def sure(index: torch.Tensor, classes: int) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot(index.long().clamp(min=0), classes).float()

    def known(place: torch.Tensor) -> torch.Tensor:
        return torch.cat((place / 32.0, torch.full_like(place, -5.0)), -1)

    centre = facts.centre.float()
    none = torch.full((2, 3), COLOURS)
    before, after = none.clone(), none.clone()
    before[0, 1], after[0, 0] = facts.colour[0, 0], facts.colour[0, 1]
    pairs = torch.full((2, COLOURS * len(KINDS)), -20.0)
    for row, i in ((0, 0), (0, 1), (1, 0)):
        pairs[row, facts.colour[row, i].long() * len(KINDS) + facts.kind[row, i]] = 20.0
    return [
        sure(facts.colour, COLOURS),
        sure(facts.kind, len(KINDS)),
        sure(facts.size, 3),
        known(centre),
        sure(before, COLOURS + 1),
        known(centre.roll(1, 1) - centre),
        sure(after, COLOURS + 1),
        known(centre.roll(-1, 1) - centre),
        sure(facts.background, COLOURS),
        pairs,
        sure(facts.background, COLOURS),
    ]


RELATION = torch.tensor([[0, -1], [-1, -1]])


def test_heads_that_know_everything_are_right_and_each_part_counts():
    facts = some_facts()
    parts = perfect(facts)
    assert [part.shape[-1] for part in parts[:8]] == list(NOUN_PARTS)
    report = text_report(parts, facts, RELATION)
    assert report.pop("off_px") == 0
    assert set(report.values()) == {1.0}, report
    best = text_loss(parts, facts)
    for i in range(len(parts)):
        worse = [part.clone() for part in parts]
        worse[i] = worse[i].roll(1, -1)
        assert text_loss(worse, facts) > best + 0.5, i


def test_a_turned_relation_is_seen():
    facts = some_facts()
    assert text_report(perfect(facts), facts, RELATION + 1)["relation"] == 0.0


def test_dropped_prompts_teach_nothing():
    facts = some_facts()
    parts = perfect(facts)
    keep = torch.tensor([True, False])
    wrong = [part.clone() for part in parts]
    for part in wrong:
        part[1] = part[1].roll(1, -1)
    assert text_loss(wrong, facts) > text_loss(parts, facts) + 1
    assert text_loss(wrong, facts, keep) == text_loss(parts, facts, keep)
    assert text_loss(wrong, facts, torch.tensor([False, False])) == 0


def test_heads_read_at_the_nouns():
    torch.manual_seed(0)
    heads = TextHeads(8, 4)
    noun = torch.tensor([[2, 5, 0]], dtype=torch.int8)
    states = torch.randn(1, 10, 8)
    before = heads(states, torch.randn(1, 4), noun)
    states[0, 5] += 1.0
    after = heads(states, torch.randn(1, 4), noun)
    changed = (before[0] != after[0]).any(-1)
    assert changed.tolist() == [[False, True, False]]


def test_centres_are_kept_to_a_pixel():
    centre = np.array([[[0.0, 128.0], [63.6, 64.4]]])
    assert whole_pixels(centre).tolist() == [[[-64, 64], [0, 0]]]


@pytest.mark.parametrize(
    ("name", "muon"),
    [
        ("model.transformer.transformer_blocks.0.attn.to_q.weight", True),
        ("model.transformer.single_transformer_blocks.0.proj_out.weight", True),
        ("model.transformer.context_embedder.weight", True),
        ("model.text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.weight", True),
        ("model.transformer.proj_out.weight", False),
        ("model.transformer.x_embedder.weight", False),
        ("model.text_encoder_2.shared.weight", False),
        ("model.text_encoder.embeddings.token_embedding.weight", False),
        ("heads.noun.weight", False),
    ],
)
def test_muon_is_for_inner_matrices(name, muon):
    assert is_matrix(name, torch.zeros(4, 4)) is muon
    assert not is_matrix(name, torch.zeros(4))
