"""The text encoders' own lesson: heads that must read off each noun what its shape is, and where.

The denoiser alone teaches the encoders too little: without this stage they stayed a bag of words
(README.md, "What was measured"). The heads are linear, and dropped after the training: what they
can read, the denoiser can read too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_demo_model.layout import CANVAS
from examples.train_demo_model.pool import Pool
from examples.train_demo_model.scenes import KINDS, PALETTE, SIZES

COLOURS = len(PALETTE)
LENGTH_UNIT = 32.0
"""Pixels; what the heads count positions in."""
NOUN_PARTS = (COLOURS, len(KINDS), len(SIZES) + 1, 4, COLOURS + 1, 4, COLOURS + 1, 4)
"""Of a noun: colour, kind, size (or open), centre; of the shape before and after it: colour (or
none) and offset. Places are means of x and y, then logarithms of their variances."""
LEAST_LOG_VARIANCE = -5.0


class Facts(NamedTuple):
    """What is true of a batch of scenes and prompts, int8."""

    noun: Tensor
    """[B, 3] index of each shape's noun among the prompt's T5 tokens."""
    kind: Tensor
    """[B, 3], -1 for no shape."""
    colour: Tensor
    """[B, 3]."""
    size: Tensor
    """[B, 3], 2 where the prompt leaves it open."""
    centre: Tensor
    """[B, 3, 2] pixels from the middle of the canvas, rounded."""
    background: Tensor
    """[B]."""


class TextHeads(nn.Module):
    """Linear readers of the T5 states and of CLIP's pooled output."""

    def __init__(self, t5_width: int, clip_width: int) -> None:
        super().__init__()
        self.noun = nn.Linear(t5_width, sum(NOUN_PARTS))
        self.ground = nn.Linear(t5_width, COLOURS)
        self.pooled = nn.Linear(clip_width, COLOURS * len(KINDS) + COLOURS)

    def forward(self, states_BTD: Tensor, pooled_BP: Tensor, noun_B3: Tensor) -> list[Tensor]:
        """The parts of each noun [B, 3, part], then ground [B, 11], pairs [B, 55], ground."""
        index = noun_B3.long()[..., None].expand(-1, -1, states_BTD.shape[-1])
        parts = self.noun(states_BTD.gather(1, index)).float().split(NOUN_PARTS, dim=-1)
        pooled = self.pooled(pooled_BP).float()
        pairs, ground = pooled[:, :-COLOURS], pooled[:, -COLOURS:]
        return [*parts, self.ground(states_BTD.mean(1)).float(), pairs, ground]


def facts_of(pool: Pool, chosen: Tensor, saying: Tensor) -> Facts:
    """What is true of the chosen scenes, each said in one of its ways."""
    rows = (pool.kind, pool.colour, pool.size, pool.centre, pool.background)
    return Facts(pool.noun[chosen, saying], *(field[chosen] for field in rows))


def whole_pixels(centre: np.ndarray) -> np.ndarray:
    """Centres from the middle of the canvas, rounded to whole pixels, int8."""
    return (centre - CANVAS / 2).round().clip(-127, 127).astype(np.int8)


def text_loss(parts: list[Tensor], facts: Facts, keep_B: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of the facts, mean over shapes; of the rows to ``keep`` (0 or 1)."""
    colour, kind, size, centre, colour_before, before, colour_after, after = parts[:8]
    weight_B = torch.ones_like(parts[8][:, 0]) if keep_B is None else keep_B.float()
    present = facts.kind >= 0
    weight = present.float() * weight_B[:, None]
    place = facts.centre.float() / LENGTH_UNIT

    def entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")

    known = facts.colour.long()
    loss = entropy(colour, known) + entropy(kind, facts.kind.long().clamp(min=0))
    loss = loss + entropy(size, facts.size.long()) + _gauss(centre, place).flatten()
    for step, logits, offset in ((1, colour_before, before), (-1, colour_after, after)):
        shifted = present[:, :-1] if step == 1 else present[:, 1:]
        there = present & F.pad(shifted, (1, 0) if step == 1 else (0, 1))
        target = known.roll(step, 1).masked_fill(~there, COLOURS)
        away = _gauss(offset, place.roll(step, 1) - place) * there
        loss = loss + 0.5 * (entropy(logits, target) + away.flatten())
    shapes = (loss * weight.flatten()).sum() / weight.sum().clamp(min=1)

    ground = facts.background.long()
    pair = known * len(KINDS) + facts.kind.long().clamp(min=0)
    pairs = torch.zeros_like(parts[9]).scatter_add_(1, pair, present.float())
    rows = F.binary_cross_entropy_with_logits(parts[9], pairs, reduction="none").sum(1)
    for logits in (parts[8], parts[10]):
        rows = rows + F.cross_entropy(logits, ground, reduction="none")
    return shapes + 0.5 * (rows * weight_B).sum() / weight_B.sum().clamp(min=1)


@torch.no_grad()
def text_report(parts: list[Tensor], facts: Facts, relation_B2: Tensor) -> dict[str, float]:
    """Shares that the heads read right; ``relation`` [B, 2] as in ``RELATIONS``, -1 for none."""
    present = facts.kind >= 0

    def right(logits: Tensor, target: Tensor) -> float:
        return float((logits.argmax(-1) == target)[present].float().mean())

    report = {
        "colour": right(parts[0], facts.colour),
        "kind": right(parts[1], facts.kind),
        "size": right(parts[2], facts.size),
    }
    mean = parts[3][..., :2] * LENGTH_UNIT
    report["off_px"] = float((mean - facts.centre).abs()[present].mean())
    step = mean[:, :2] - mean[:, 1:]
    # above: y smaller; below: y larger; left of: x smaller; right of: x larger.
    along = torch.stack((-step[..., 1], step[..., 1], -step[..., 0], step[..., 0]), -1)
    holds = along.gather(-1, relation_B2.clamp(min=0)[..., None])[..., 0] > 0
    related = relation_B2 >= 0
    report["relation"] = float(holds[related].float().mean())
    before = parts[4].argmax(-1)[:, 1:] == facts.colour[:, :-1]
    report["neighbour"] = float(before[present[:, 1:]].float().mean())
    report["ground"] = float((parts[8].argmax(-1) == facts.background).float().mean())
    pair = facts.colour.long() * len(KINDS) + facts.kind.long().clamp(min=0)
    pairs = torch.zeros_like(parts[9]).scatter_add_(1, pair, present.float())
    report["pooled_pairs"] = float(((parts[9] > 0) == (pairs > 0)).all(1).float().mean())
    report["pooled_ground"] = float((parts[10].argmax(-1) == facts.background).float().mean())
    return report


def _gauss(predicted: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood, without its constant, summed over x and y: [B, 3]."""
    mean, log_variance = predicted.chunk(2, dim=-1)
    log_variance = log_variance.clamp(LEAST_LOG_VARIANCE, 4.0)
    error = (target - mean).square() * torch.exp(-log_variance)
    return 0.5 * (error + log_variance).sum(-1)
