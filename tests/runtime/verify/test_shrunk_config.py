from __future__ import annotations

from sglang.multimodal_gen.runtime.verify.shrunk_config import common_divisor, shrunk

CLIP = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 49408}
T5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24}
DIT = {
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "num_layers": 19,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "in_channels": 64,
    "axes_dims_rope": [16, 56, 56],
}
VAE = {"block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32, "latent_channels": 16}


def test_all_components_are_divided_by_one_number():
    configs = {"clip": CLIP, "t5": T5, "dit": DIT, "vae": VAE}
    divisor = common_divisor(configs)
    clip, t5, dit, vae = (shrunk(config, divisor) for config in configs.values())
    assert divisor == 4
    assert clip == {**CLIP, "hidden_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2}
    assert dit["pooled_projection_dim"] == clip["hidden_size"]
    assert dit["joint_attention_dim"] == t5["d_model"] == 1024
    assert (t5["d_kv"], dit["attention_head_dim"]) == (64, 128)
    assert (dit["in_channels"], dit["axes_dims_rope"]) == (64, [16, 56, 56])
    assert vae["block_out_channels"] == [32, 64, 128, 128]
    assert vae["latent_channels"] == 16


def test_odd_heads_become_even_where_nothing_speaks_against_it():
    def heads(**config):
        return shrunk(config, 1)["num_heads"]

    assert heads(num_heads=5, head_dim=32, joint_attention_dim=128) == 6
    assert heads(num_heads=5, head_dim=32, hidden_size=160) == 5  # the product is said too
    assert heads(num_heads=3, hidden_size=192) == 4
    assert heads(num_heads=3, hidden_size=90) == 3  # 4 does not divide it
    assert heads(num_heads=3, head_dim=8, num_key_value_heads=1) == 3
    assert heads(num_heads=1, head_dim=8) == 1
    assert heads(num_heads=4, head_dim=8) == 4


def test_nothing_is_divided_that_one_component_cannot_follow():
    assert common_divisor({"clip": CLIP, "odd": {"num_attention_heads": 5}}) == 1
    assert common_divisor({"few": {"num_attention_heads": 4, "hidden_size": 64}}) == 2


def test_lists_by_layer_and_nested_configs_follow():
    config = {
        "text_config": {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]},
        "num_layers": 1,
        "other": [1, 2, 3, 4],
    }
    assert shrunk(config, 1) == {
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"]},
        "num_layers": 1,
        "other": [1, 2, 3, 4],
    }


def test_an_autoencoder_is_divided_as_far_as_its_groups_allow():
    assert shrunk({**VAE, "block_out_channels": [64, 96]}, 4)["block_out_channels"] == [64, 96]
