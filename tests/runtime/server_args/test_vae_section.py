from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@pytest.mark.parametrize(
    "spelling",
    ["--vae-mode", "--vae_mode", "--vae-decode-mode", "--vae-config.parallel-decode-mode"],
)
def test_names_of_other_releases_are_the_same_flag(spelling):
    parser = FlagParser("test", "")
    parser.add_flags("server", server_flags(), owner="ServerArgs")
    said = parser.parse([spelling, "tiled"])
    values = parser.values_of(said, server_flags())
    assert ServerArgs.from_flat(**values).vae.vae_mode == "tiled"


@pytest.mark.parametrize("mode", ["auto", "plain", "spatial_shard"])
def test_a_tile_size_without_tiles_is_refused(mode):
    with pytest.raises(InvalidArgument, match=f"vae_tile_size=64: needs vae_mode='tiled'.*{mode}"):
        ServerArgs.from_flat(vae_mode=mode, vae_tile_size=64)
