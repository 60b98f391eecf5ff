"""Attention over ranks equals attention on one: Ulysses, ring, both; odd lengths, masks, causal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers import qk_norm
from sglang.multimodal_gen.runtime.layers.attention import ring
from sglang.multimodal_gen.runtime.layers.attention.split_sequence import (
    SequenceContext,
    SplitAttention,
    check_heads,
    heads_per_rank,
)
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.qk_norm import HeadStream
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.layers.sequence_shard import join_streams, split_streams
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, PipelineDefinitionError

HEADS, WIDTH = 4, 8


@dataclass(frozen=True)
class Case:
    """Streams with their lengths; ``masked``: the first image of the batch sees half its text."""

    lengths: tuple[tuple[str, int], ...]
    batch: int = 1
    masked: bool = False
    causal: bool = False


CASES = (
    Case((("text", 8), ("image", 24))),
    Case((("text", 7), ("image", 15)), batch=2),
    Case((("image", 5),)),
    Case((("text", 1), ("image", 3)), batch=2),
    Case((("text", 8), ("image", 16)), batch=2, masked=True),
    Case((("text", 7), ("image", 15)), batch=2, masked=True),
    Case((("frames", 13),), batch=2, causal=True),
    Case((("frames", 16),), causal=True),
)


def formula(q, k, v, mask=None, causal=False):
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


def tensors(case):
    generator = torch.Generator().manual_seed(3)
    total = sum(length for _, length in case.lengths)
    shape = (case.batch, total, HEADS, WIDTH)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    mask = None
    if case.masked:
        text = dict(case.lengths)["text"]
        mask = torch.ones(case.batch, 1, 1, total, dtype=torch.bool)
        mask[0, ..., text // 2 : text] = False
    return 2 * q, k, v, mask


def attention(parallel, streams, causal=False):
    layer, context = USPAttention(causal=causal), SequenceContext.of(parallel)
    layer.bind(SplitAttention("blocks.0.attn", streams, context))
    return layer, context


def on_ranks(parallel, case):
    """The whole output, from pieces, as each rank of the group has it."""
    streams = tuple(name for name, _ in case.lengths)
    layer, context = attention(parallel, streams, case.causal)
    context.begin()
    for name, length in case.lengths:
        context.shard = context.shard.with_stream(name, length)
    q, k, v, mask = tensors(case)
    rank = parallel.sp.rank
    q, k, v = (split_streams(x, context.shard, streams, rank, 1) for x in (q, k, v))
    if mask is not None:
        mask = split_streams(mask, context.shard, streams, rank, 3)
    out = parallel.sp.all_gather(layer(q, k, v, mask), 1)
    return join_streams(out, context.shard, streams, 1)


JOINT = (
    Case((("text", 8), ("image", 24))),
    Case((("text", 7), ("image", 15)), batch=2),
    Case((("text", 7), ("image", 15)), batch=2, masked=True),
)
"""Streams that are normed, rotated and joined on their way into the message."""


def norms():
    generator = torch.Generator().manual_seed(5)
    made = [torch.nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(4)]
    for norm in made:
        norm.weight.data = torch.rand(WIDTH, generator=generator) + 0.5
        norm.requires_grad_(False)
    return made


def joint_inputs(case):
    """Whole streams, the mask, and an angle for each joint position."""
    q, k, v, mask = tensors(case)
    lengths = [length for _, length in case.lengths]
    angles = torch.arange(q.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    return list(parts), mask, Rotary(angles.cos(), angles.sin())


def head_streams(parts):
    """The first stream has the first two norms."""
    pairs = norms()[:2], norms()[2:]
    return [HeadStream(*part, *pair) for part, pair in zip(parts, pairs, strict=False)]


def joint_on_ranks(parallel, case, later):
    names = tuple(name for name, _ in case.lengths)
    layer, context = attention(parallel, names)
    context.begin()
    for name, length in case.lengths:
        context.shard = context.shard.with_stream(name, length)
    parts, mask, rotary = joint_inputs(case)
    shard, rank = context.shard, parallel.sp.rank
    own = [
        [split_streams(x, shard, (name,), rank, 1) for x in part]
        for name, part in zip(names, parts, strict=True)
    ]
    rotary = Rotary(*(split_streams(x, shard, names, rank, 0) for x in rotary))
    if mask is not None:
        mask = split_streams(mask, shard, names, rank, 3)
    streams = head_streams(own)
    out = layer.begin(streams, rotary, mask)() if later else layer.joint(streams, rotary, mask)
    return join_streams(parallel.sp.all_gather(out, 1), shard, names, 1)


def _outputs(_rank, layouts):
    results = {}
    for layout in layouts:
        parallel = ParallelState.create(layout, "cpu")
        for case in JOINT:
            sent = parallel.ulysses.traffic["all_to_all"]
            outs = [joint_on_ranks(parallel, case, later) for later in (False, True)]
            results[layout, case, "joint"] = (outs, parallel.ulysses.traffic["all_to_all"] - sent)
        for case in CASES:
            before = {g: sum(getattr(parallel, g).traffic.values()) for g in ("ulysses", "ring")}
            out = on_ranks(parallel, case)
            calls = {
                name: sum(getattr(parallel, name).traffic.values()) - count
                for name, count in before.items()
            }
            results[layout, case] = (out, calls)
    return results


def check(world_size, *layouts):
    ranks = run_ranks(world_size, _outputs, layouts)
    joint = {key: value for key, value in ranks[0].items() if len(key) > 2}
    for (layout, case, _), ((out, later), messages) in joint.items():
        parts, mask, rotary = joint_inputs(case)
        expected = USPAttention().joint(head_streams(parts), rotary, mask)
        assert ((out - expected).norm() / expected.norm()).item() < 1e-6, f"{layout}, {case}"
        assert torch.equal(out, later)
        assert messages == (4 if layout.ulysses > 1 else 0)  # there and back, two times
    for (layout, case), (out, calls) in ((k, v) for k, v in ranks[0].items() if len(k) == 2):
        q, k, v, mask = tensors(case)
        expected = formula(q, k, v, mask, case.causal)
        off = ((out - expected).norm() / expected.norm()).item()
        assert off < 1e-6, f"{layout}, {case}: {off:.1e}"
        # One message of q, k and v, one back; keys pass round once.
        assert calls["ulysses"] == (2 if layout.ulysses > 1 else 0)
        assert calls["ring"] == layout.ring - 1
        assert all(torch.equal(out, other[layout, case][0]) for other in ranks)


def test_two_ranks():
    check(2, ParallelLayout(ulysses=2), ParallelLayout(ring=2))


@pytest.mark.slow
def test_four_ranks():
    check(4, ParallelLayout(ulysses=4), ParallelLayout(ring=4), ParallelLayout(ulysses=2, ring=2))


def test_the_cases_feel_mask_and_order():
    for case in CASES:
        q, k, v, mask = tensors(case)
        plain = formula(q, k, v, mask, case.causal)
        if case.masked:
            assert (formula(q, k, v) - plain).norm() > 1e-2 * plain.norm()
        if case.causal:
            assert (formula(q, k, v) - plain).norm() > 1e-2 * plain.norm()
        assert (formula(q, k.flip(1), v, mask, case.causal) - plain).norm() > 1e-2 * plain.norm()


def test_the_joint_cases_feel_norms_angles_and_order():
    parts, mask, rotary = joint_inputs(JOINT[2])
    right = USPAttention().joint(head_streams(parts), rotary, mask)
    q, k, v, _ = tensors(JOINT[2])
    wrong = (
        formula(q, k, v, mask),
        USPAttention().joint(head_streams(parts), Rotary(*(x.flip(0) for x in rotary)), mask),
        USPAttention().joint(head_streams([(k, q, v) for q, k, v in parts]), rotary, mask),
        USPAttention().joint(head_streams(parts), rotary),
    )
    assert all((other - right).norm() > 1e-2 * right.norm() for other in wrong)


class Echo(Group):
    """Two ranks of which the other one sends the same."""

    def deal(self, x):
        assert x.is_contiguous()
        return x


class Copies(TorchDispatchMode):
    """Counts what moves values from one layout to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copying = (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat)
        self.count += func._overloadpacket in copying
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 2])
def test_nothing_is_copied_on_the_way_into_the_message(monkeypatch, batch):
    """The operator writes it; one copy is left, of what comes back."""
    monkeypatch.setattr(qk_norm, "_has_kernel", lambda x: True)
    two = Echo("ulysses", 0, (0, 1))
    context = SequenceContext(sp=two, ulysses=two, ring=Group("ring"))
    case = Case((("text", 4), ("image", 6)), batch=batch)
    for name, length in case.lengths:
        context.shard = context.shard.with_stream(name, 2 * length)
    layer = USPAttention()
    layer.bind(SplitAttention("blocks.0.attn", ("text", "image"), context))
    parts, _, rotary = joint_inputs(case)
    streams = head_streams(parts)
    with Copies() as before:
        apart = layer(*qk_norm.norm_rotate_join(streams, rotary))
    with Copies() as now:
        out = layer.joint(streams, rotary)
    assert torch.equal(out, apart)
    assert before.count >= 4  # queries, keys, values, and back; values of two streams joined first
    assert now.count == 1


def _last_part_wins(first, second):
    return second


def _wrong_merge(_rank):
    parallel = ParallelState.create(ParallelLayout(ring=2), "cpu")
    right = on_ranks(parallel, CASES[0])
    ring.merge = _last_part_wins
    wrong = on_ranks(parallel, CASES[0])
    return ((wrong - right).norm() / right.norm()).item()


def _other_shapes(rank):
    """Queries of one stream and keys of another; keys that all ranks hold; more on a mask."""
    parallel = ParallelState.create(ParallelLayout(ulysses=2), "cpu")
    layer, context = attention(parallel, ("video",))
    context.shard = context.shard.with_stream("video", 9).with_stream("sound", 5)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, n, HEADS, WIDTH, generator=generator) for n in (5, 9, 9))
    own_q = split_streams(q, context.shard, ("sound",), rank, 1)
    own_k, own_v = (split_streams(x, context.shard, ("video",), rank, 1) for x in (k, v))
    gathered = parallel.sp.all_gather(layer(own_q, own_k, own_v), 1)
    cross = join_streams(gathered, context.shard, ("sound",), 1)
    sent = parallel.ulysses.traffic["all_to_all"]

    replicated = USPAttention(replicated_keys=True)
    replicated.bind(SplitAttention("blocks.0.cross", ("video",), context))
    alone = join_streams(
        parallel.sp.all_gather(replicated(own_q, k, v), 1), context.shard, ("sound",), 1
    )
    more = parallel.ulysses.traffic["all_to_all"] - sent

    mask = torch.ones(2, 1, 1, own_k.shape[1], dtype=torch.bool)
    before = parallel.sp.traffic["all_gather"]
    for _ in range(3):
        layer(own_q, own_k, own_v, mask)
    masks_sent = parallel.sp.traffic["all_gather"] - before
    return (q, k, v), cross, alone, sent, more, masks_sent


def test_a_wrong_merge_is_seen():
    assert min(run_ranks(2, _wrong_merge)) > 1e-2


def test_cross_attention():
    (q, k, v), cross, alone, sent, more, masks_sent = run_ranks(2, _other_shapes)[0]
    expected = formula(q, k, v)
    torch.testing.assert_close(cross, expected)
    torch.testing.assert_close(alone, expected)
    assert sent == 3  # queries, keys with values, and back
    assert more == 0
    assert masks_sent == 1  # for all layers of a forward pass


def of_two_ranks(streams=("text", "image"), causal=False):
    """An attention layer of rank 0 of two, which can refuse but not send."""
    two = Group("ulysses", 0, (0, 1))
    context = SequenceContext(sp=two, ulysses=two, ring=Group("ring"))
    context.shard = context.shard.with_stream("text", 4).with_stream("image", 6)
    layer = USPAttention(causal=causal)
    layer.bind(SplitAttention("blocks.0.attn", streams, context))
    return layer


def piece(length, heads=HEADS):
    return torch.randn(1, length, heads, WIDTH)


def test_keys_that_are_not_the_streams_are_refused():
    layer, x = of_two_ranks(), piece(10)
    with pytest.raises(PipelineDefinitionError, match=r"blocks.0.attn attends to 10 keys .* 5 tok"):
        layer(x, x, x)


def test_a_mask_that_differs_between_queries_is_refused():
    layer, x = of_two_ranks(), piece(5)
    with pytest.raises(PipelineDefinitionError, match=r"\(1, 1, 5, 5\) differs between"):
        layer(x, x, x, torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_causal_over_joined_streams_is_refused():
    layer, x = of_two_ranks(causal=True), piece(5)
    with pytest.raises(PipelineDefinitionError, match=r"causal over text \+ image"):
        layer(x, x, x)


def test_heads_that_do_not_divide_are_refused_by_name():
    layer, x = of_two_ranks(), piece(5, heads=3)
    with pytest.raises(InvalidArgument, match=r"ulysses_degree=2: blocks.0.attn has 3 attention"):
        layer(x, x, x)
    check_heads("a", 6, 3)


def test_a_group_of_one_gets_its_own_tensors_back():
    x = piece(3)
    assert heads_per_rank(Group("ulysses"), x, x) == (x, x)
