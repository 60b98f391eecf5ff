"""Which tensors can be moved in words; the copy itself is torch's."""

from __future__ import annotations

import torch

from sglang.multimodal_gen.runtime.layers.wide_copy import _has_words, copy_wide


def test_aligned_runs_have_words_and_moving_them_moves_the_same_bits():
    x = torch.randn(2, 3, 4, 8, dtype=torch.float32).bfloat16().permute(1, 0, 2, 3)
    assert _has_words(x)
    target = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16)
    target.view(torch.int64).copy_(x.view(torch.int64))
    assert torch.equal(target, x)
    target.zero_()
    copy_wide(target, x)
    assert torch.equal(target, x)


def test_what_is_not_aligned_has_none():
    x = torch.randn(4, 16).bfloat16()
    assert not _has_words(x[:, 1:9])  # starts between words
    assert not _has_words(x[:, :6])  # ends between words
    assert not _has_words(x.t())
    assert not _has_words(torch.randn(4, 10).bfloat16()[:, :8])  # rows start between words
