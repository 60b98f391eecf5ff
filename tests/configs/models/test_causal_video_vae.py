from __future__ import annotations

import pytest

from sglang.multimodal_gen.configs.models.causal_video_vae import CausalVideoVAEConfig
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

FACTS = {
    "z_dim": 3,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 8,
    "latents_mean": [0.0, 1.0, 2.0],
    "latents_std": [1.0, 1.0, 2.0],
}


def test_the_checkpoints_facts_are_taken():
    config = CausalVideoVAEConfig().with_checkpoint(FACTS)
    assert config.latents_mean == (0.0, 1.0, 2.0)
    assert config.latent_channels == 3
    assert (config.spatial_compression_ratio, config.temporal_compression_ratio) == (16, 8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"latents_std": [1.0]}, "latents_std has 1 values for z_dim=3"),
        ({"scale_factor_spatial": 0}, "scale_factor_spatial=0 must be 1 or more"),
        ({"scale_factor_temporal": "4"}, "temporal_compression_ratio='4'"),
    ],
)
def test_facts_that_make_no_sense_are_the_checkpoints_fault(wrong, message):
    with pytest.raises(CheckpointError, match=message):
        CausalVideoVAEConfig().with_checkpoint({**FACTS, **wrong})
