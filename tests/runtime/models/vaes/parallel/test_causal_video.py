"""Causal video autoencoders of Diffusers on bands of rows: chunks of frames, caches and all."""

from __future__ import annotations

import copy
from types import ModuleType, SimpleNamespace

import pytest
from diffusers.models.autoencoders import autoencoder_kl_qwenimage, autoencoder_kl_wan
from torch import nn

from sglang.multimodal_gen.runtime.layers.row_shard import Edges, RowShards, split_evenly
from sglang.multimodal_gen.runtime.models.vaes.parallel.causal_video import (
    causal_video_planners,
    plan_causal_convolution,
)
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import (
    RowsNotSeparable,
    spread_rows,
)
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise
from thread_ranks import run_threads
from vae_cases import noise, relative

TINY = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
RESIDUAL = {
    "decoder_base_dim": 8,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 8,
}
CASES: dict[str, tuple[ModuleType, str, str, dict]] = {
    "2.1": (autoencoder_kl_wan, "Wan", "AutoencoderKLWan", TINY),
    "2.2": (autoencoder_kl_wan, "Wan", "AutoencoderKLWan", TINY | RESIDUAL),
    "image": (autoencoder_kl_qwenimage, "QwenImage", "AutoencoderKLQwenImage", TINY),
}
PARTS = ("encoder", "quant_conv", "decoder", "post_quant_conv")


def make(name):
    library, prefix, cls, config = CASES[name]
    vae = getattr(library, cls)(**config)
    fill_with_noise(vae, 1, {r"decoder\.conv_out": 0.3})  # within the -1..1 that it cuts to
    return vae.eval().requires_grad_(False), causal_video_planners(library, prefix)


def on_bands(name, z, x, ranks):
    vae, planners = make(name)
    unit = x.shape[-2] // z.shape[-2]

    def rank(group):
        own, shards = copy.deepcopy(vae), RowShards(group)
        least = spread_rows({part: getattr(own, part) for part in PARTS}, shards, planners)
        with shards.holding(split_evenly(z.shape[-2], ranks)):
            decoded = shards.everyones(own.decode(shards.mine(z)).sample)
            moments = own.encode(shards.mine(x, unit)).latent_dist.parameters
            return decoded, shards.everyones(moments), least, group.traffic

    return run_threads(ranks, rank)[-1]


@pytest.mark.parametrize(("ranks", "height"), [(2, 5), (3, 7), (4, 4)])
@pytest.mark.parametrize("name", CASES)
def test_a_clip_on_bands_equals_the_whole(name, ranks, height):
    vae, _ = make(name)
    z = noise(1, 4, 3, height, 3)
    clip = vae.decode(z).sample
    assert clip.shape[2] == 5, "three chunks: the caches of frames are used"
    assert (clip.abs() == 1).float().mean() < 0.2, "cut to -1..1 it would hide errors"
    unit = clip.shape[-2] // height
    x = noise(1, 3, 5, height * unit, 3 * unit)
    moments = vae.encode(x).latent_dist.parameters
    decoded, encoded, least, traffic = on_bands(name, z, x, ranks)
    assert least == 1
    assert relative(decoded, clip) < 1e-5
    assert relative(encoded, moments) < 1e-5
    assert traffic["exchange"] > 50
    assert traffic["all_gather"] > 3


@pytest.mark.parametrize("name", CASES)
def test_the_neighbours_rows_matter(name, monkeypatch):
    vae, _ = make(name)
    z = noise(1, 4, 2, 6, 3)
    clip = vae.decode(z).sample
    x = noise(1, 3, 1, 6 * clip.shape[-2] // 6, clip.shape[-1])
    monkeypatch.setattr(RowShards, "exchange_edges", lambda *_: Edges(None, None, (), ()))
    decoded, encoded, _, _ = on_bands(name, z, x, 2)
    assert relative(decoded, clip) > 0.02
    assert relative(encoded, vae.encode(x).latent_dist.parameters) > 0.02


def test_what_it_does_not_know_is_refused_by_name():
    vae, planners = make("2.1")
    shards = RowShards(run_threads(2, lambda group: group)[0])
    vae.decoder.mid_block.attentions[0] = nn.MultiheadAttention(16, 1)
    with pytest.raises(RowsNotSeparable, match=r"decoder\.mid_block\.attentions\.0 is a Multihead"):
        spread_rows({"decoder": vae.decoder}, shards, planners)


def test_upsampling_that_looks_at_neighbours_is_refused():
    vae, planners = make("image")
    shards = RowShards(run_threads(2, lambda group: group)[0])
    up = next(m for m in vae.decoder.modules() if isinstance(m, nn.Upsample))
    up.mode = "bilinear"
    with pytest.raises(RowsNotSeparable, match="'bilinear', which looks at neighbours"):
        spread_rows({"decoder": vae.decoder}, shards, planners)


def test_a_convolution_that_pads_twice_is_refused():
    conv = nn.Conv3d(1, 1, 3, padding=1)
    with pytest.raises(ValueError, match="pads twice"):
        plan_causal_convolution(conv)


def test_a_library_without_such_modules_is_no_causal_video_autoencoder():
    with pytest.raises(AttributeError, match="OtherCausalConv3d"):
        causal_video_planners(SimpleNamespace(__name__="x"), "Other")
