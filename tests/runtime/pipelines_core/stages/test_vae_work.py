"""How a VAE works: what is chosen, why, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from thread_ranks import run_threads
from vae_cases import noise, relative, tiny_vae

from seed_samples.stubs import StubVAE

ONE = Group("replica")
TWO = run_threads(2, lambda group: group)[0]


@pytest.mark.parametrize(
    ("args", "group", "mode", "reason"),
    [
        (VAEArgs(), ONE, "plain", "there is one rank"),
        (VAEArgs(), TWO, "spatial_shard", "each of 2 ranks holds a band of rows"),
        (VAEArgs(vae_mode="plain"), TWO, "plain", "as asked for"),
        (VAEArgs(vae_mode="tiled"), ONE, "tiled", "tiles of 64x64 pixels, as asked for"),
        (VAEArgs(vae_mode="tiled", vae_tile_size=32), TWO, "tiled", "tiles of 32x32 pixels, as"),
        (VAEArgs(vae_mode="spatial_shard"), TWO, "spatial_shard", "each of 2 ranks"),
    ],
)
def test_a_vae_of_this_runtime(args, group, mode, reason):
    work = VAEWork(tiny_vae(), group, args)
    assert work.mode == mode
    assert work.reason.startswith(reason)


def test_a_class_of_the_library_works_on_one_rank():
    assert VAEWork(StubVAE(), ONE, VAEArgs()).mode == "plain"
    work = VAEWork(StubVAE(), TWO, VAEArgs())
    assert work.mode == "plain"
    assert work.reason == "on one of 2 ranks: StubVAE is the library's own class"
    for wish in ("tiled", "spatial_shard"):
        with pytest.raises(InvalidArgument, match=f"vae_mode='{wish}': StubVAE is the library's"):
            VAEWork(StubVAE(), TWO, VAEArgs(vae_mode=wish))


def test_bands_need_ranks():
    with pytest.raises(InvalidArgument, match="needs several ranks"):
        VAEWork(tiny_vae(), ONE, VAEArgs(vae_mode="spatial_shard"))


def test_layers_that_cannot_be_spread():
    vae = tiny_vae()
    vae.decoder.conv_act = nn.Softmax2d()
    work = VAEWork(vae, TWO, VAEArgs())
    assert work.mode == "plain"
    assert "decoder.conv_act is a Softmax2d" in work.reason
    with pytest.raises(InvalidArgument, match=r"decoder\.conv_act is a Softmax2d.*Use 'tiled'"):
        VAEWork(vae, TWO, VAEArgs(vae_mode="spatial_shard"))


def test_tiles_must_be_whole_latents():
    with pytest.raises(InvalidArgument, match="tile_height=36: must be a multiple of 8"):
        VAEWork(tiny_vae(), ONE, VAEArgs(vae_mode="tiled", vae_tile_size=36))


@pytest.mark.parametrize("mode", ["plain", "tiled", "spatial_shard"])
def test_pictures_are_encoded_on_every_rank_alike(mode):
    vae, x = tiny_vae(), noise(1, 3, 72, 40)
    expected = vae.encode(x).latent_dist.mode()
    if mode == "tiled":
        vae.enable_tiling()
        whole, expected = expected, vae.encode(x).latent_dist.mode()
        assert relative(expected, whole) > 0.01
        vae.disable_tiling()

    def rank(group):
        own = copy.deepcopy(vae)
        return VAEWork(own, group, VAEArgs(vae_mode=mode)).encode(x), dict(group.traffic)

    for found, traffic in run_threads(2, rank):
        assert relative(found, expected) < 1e-5
        assert bool(traffic) == (mode != "plain")


def test_too_few_rows_are_the_first_ranks_work():
    vae, z = tiny_vae(), noise(1, 4, 2, 5)
    whole = vae.decode(z).sample
    moments = vae.encode(whole).latent_dist.mode()

    def rank(group):
        work = VAEWork(copy.deepcopy(vae), group, VAEArgs())
        assert work.mode == "spatial_shard"
        assert work.mode_for(z) == "plain"
        assert work.needs_this_rank(z) == group.is_first
        assert torch.equal(work.encode(whole), moments)
        assert not group.traffic
        return torch.equal(work.decode(z), whole)

    assert all(run_threads(3, rank))
