import math

import torch

from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention


def plain(q, k, v, mask=None):
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


def test_equals_attention_written_out():
    q, k, v = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 3, 8), torch.randn(2, 7, 3, 8)
    torch.testing.assert_close(USPAttention()(q, k, v), plain(q, k, v))


def test_a_masked_key_has_no_say():
    q, k, v = (torch.randn(2, 5, 3, 8) for _ in range(3))
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[..., -1] = False
    out = USPAttention()(q, k, v, mask)
    torch.testing.assert_close(out, plain(q, k, v, mask))
    v[:, -1] = 1e3
    torch.testing.assert_close(USPAttention()(q, k, v, mask), out)


def test_causal_attention_does_not_see_the_future():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    out = USPAttention(causal=True)(q, k, v)
    torch.testing.assert_close(out[:, :1], v[:, :1])
