"""A convolution on bands of rows makes what it makes of the whole map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from sglang.multimodal_gen.runtime.layers.parallel_conv import (
    RowWindow,
    convolve_padded_rows,
    convolve_rows,
    pad_rows,
    row_window,
)
from sglang.multimodal_gen.runtime.layers.row_shard import Edges, RowShards, split_evenly
from thread_ranks import run_threads


def relative(measured, expected):
    return ((measured - expected).norm() / expected.norm()).item()


def on_bands(function, x, ranks, rows, unit=1):
    """``function(shards, band)`` on each rank, joined; and what the ranks sent."""

    def rank(group):
        shards = RowShards(group)
        with shards.holding(split_evenly(rows, ranks)):
            out = shards.everyones(function(shards, shards.mine(x, unit)))
        return out, group.traffic["exchange"]

    results = run_threads(ranks, rank)
    return results[-1]


windows = st.builds(
    RowWindow,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    above=st.integers(0, 4),
    below=st.integers(0, 4),
)


@settings(deadline=None)
@given(window=windows, rows=st.integers(1, 8))
def test_windows_say_what_a_look_at_each_row_says(window, rows):
    height = rows * window.stride
    made = (height + window.above + window.below - window.span) // window.stride + 1
    if height + window.above + window.below < window.span:
        made = 0
    assume(made > 0 or window.keeps_shares)
    assert window.keeps_shares == (made == rows)
    if not window.keeps_shares:
        return
    looks = [
        [o * window.stride - window.above + window.dilation * k for k in range(window.kernel)]
        for o in range(rows)
    ]
    above, below = window.halo
    assert above == max(0, -looks[0][0])
    assert below == max(0, looks[-1][-1] - height + 1)
    upper, lower = window.touched
    big = [o for o in range(rows) if looks[o][0] < 0]
    assert min(upper, rows) == len(big)
    assert min(lower, rows) == len([o for o in range(rows) if looks[o][-1] >= height])


@st.composite
def kept_windows(draw):
    """Windows that keep shares, with as much padding above as below."""
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 3, 3))
    span = dilation * (kernel - 1) + 1
    paddings = [p for p in range(9) if -stride <= 2 * p - span <= -1]
    assume(paddings)
    padding = draw(st.sampled_from(paddings))
    return RowWindow(kernel, stride, dilation, padding, padding)


@settings(deadline=None, max_examples=60)
@given(
    window=kept_windows(),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 20),
    channels_last=st.booleans(),
    groups=st.sampled_from([1, 2]),
)
def test_a_convolution_on_bands_equals_the_whole(window, ranks, extra, channels_last, groups):
    assert window.keeps_shares
    least = max(1, *window.halo)
    rows = ranks * least + extra
    torch.manual_seed(rows)
    conv = nn.Conv2d(
        4,
        6,
        (window.kernel, 3),
        (window.stride, 1),
        (window.above, 1),
        (window.dilation, 1),
        groups=groups,
    ).requires_grad_(False)
    x = torch.randn(2, 4, rows * window.stride, 5)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    whole = conv(x)
    found, sent = on_bands(
        lambda shards, band: convolve_rows(conv, shards, band), x, ranks, rows, window.stride
    )
    assert found.shape == whole.shape
    assert relative(found, whole) < 1e-5
    assert (sent > 0) == (ranks > 1 and max(window.halo) > 0)
    assert sent <= 1, "one exchange a convolution"


@pytest.mark.parametrize("rows", [4, 40])
def test_without_the_neighbours_rows_it_would_be_wrong(rows, monkeypatch):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
    x = torch.randn(1, 4, rows, 5)
    whole = conv(x)
    monkeypatch.setattr(RowShards, "exchange_edges", lambda *_: Edges(None, None, (), ()))
    found, _ = on_bands(lambda shards, band: convolve_rows(conv, shards, band), x, 2, rows)
    assert relative(found, whole) > 0.02


def test_the_map_is_not_copied():
    """Beside the map and the result there is a strip or two, and no second map."""
    conv = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function in (torch.cat, F.pad, torch.Tensor.contiguous, torch.Tensor.clone):
                sizes.append(result.numel())
            return result

    x = torch.randn(1, 4, 64, 5)

    def rank(group):
        shards = RowShards(group)
        with shards.holding((32, 32)), Watch():
            convolve_rows(conv, shards, shards.mine(x).contiguous())

    run_threads(2, rank)
    assert sizes
    assert max(sizes) <= x.numel() // 2, "the band itself, made contiguous by the test"
    assert sorted(sizes)[-3] <= 4 * 3 * 5, "all else are strips of three rows"


@pytest.mark.parametrize(("ranks", "rows"), [(1, 3), (2, 5), (3, 7), (4, 4)])
def test_downsampling_that_pads_below_and_right_alone(ranks, rows):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, stride=2).requires_grad_(False)
    x = torch.randn(1, 3, 2 * rows, 6)
    whole = conv(F.pad(x, (0, 1, 0, 1)))
    found, _ = on_bands(
        lambda shards, band: convolve_padded_rows(conv, shards, band, (0, 1, 0, 1)),
        x,
        ranks,
        rows,
        2,
    )
    assert relative(found, whole) < 1e-6


@pytest.mark.parametrize(("ranks", "rows"), [(2, 5), (3, 7), (4, 4)])
@pytest.mark.parametrize("front", [0, 2])
def test_a_causal_convolution_over_frames(ranks, rows, front):
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 4, 3).requires_grad_(False)
    x = torch.randn(1, 3, 4, rows, 5)
    padding = (1, 1, 1, 1, front, 0)
    whole = conv(F.pad(x, padding))
    found, sent = on_bands(
        lambda shards, band: convolve_padded_rows(conv, shards, band, padding), x, ranks, rows
    )
    assert relative(found, whole) < 1e-6
    assert sent == 1


@pytest.mark.parametrize(("ranks", "rows"), [(2, 5), (3, 30)])
def test_a_convolution_over_frames_with_its_own_padding(ranks, rows):
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 4, 3, padding=1).requires_grad_(False)
    x = torch.randn(1, 3, 4, rows, 5)
    found, _ = on_bands(lambda shards, band: convolve_rows(conv, shards, band), x, ranks, rows)
    assert relative(found, conv(x)) < 1e-6


def test_padding_puts_zeros_at_the_pictures_edges_alone():
    x = torch.arange(1.0, 13).view(1, 1, 4, 3)
    whole = F.pad(x, (1, 0, 1, 1))

    def rank(group):
        shards = RowShards(group)
        with shards.holding((2, 2)):
            return pad_rows(shards.mine(x), shards, (1, 0, 1, 1))

    upper, lower = run_threads(2, rank)
    assert torch.equal(upper, whole[:, :, :4])
    assert torch.equal(lower, whole[:, :, 2:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": 1, "padding_mode": "reflect"}, "'reflect'"),
        ({"padding": "same"}, "'same'"),
        ({"padding": 0}, "do not make h rows"),
        ({"padding": 0, "stride": 2}, "do not make h rows h / 2"),
        ({"padding": 3}, "do not make h rows"),
    ],
)
def test_what_cannot_be_done_on_bands_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        row_window(nn.Conv2d(1, 1, 3, **options))


def test_a_band_that_does_not_divide_by_the_stride_is_refused():
    shards = RowShards(run_threads(1, lambda group: group)[0])
    conv = nn.Conv2d(1, 1, 3, stride=2, padding=1)
    with shards.holding((1,)), pytest.raises(ValueError, match="5 rows does not divide"):
        convolve_rows(conv, shards, torch.zeros(1, 1, 5, 4))
