from typing import ClassVar

from torch import nn

from sglang.multimodal_gen.runtime.layers.lora.module_index import ModuleIndex, Place


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(4, 6), nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    lora_names: ClassVar = {
        "old.{}.qk": ("blocks.{}.to_q", "blocks.{}.to_k"),
        "old.{}.swapped": ("blocks.{}.to_q[1/2]", "blocks.{}.to_q[0/2]"),
        "old.{}.gone": "blocks.{}.to_x",
    }

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))


INDEX = ModuleIndex(Model())


def test_a_path_of_the_tree_with_dots_or_underscores():
    for name in ("blocks.11.to_k", "blocks_11_to_k"):
        assert INDEX.places(name) == (Place("blocks.11.to_k", 0, 2),)


def test_only_linears_count():
    assert INDEX.places("blocks.0.norm") == ()


def test_a_fused_name_shares_its_rows_by_the_models_own_sizes():
    for name in ("old.3.qk", "old_3_qk"):
        assert INDEX.places(name) == (Place("blocks.3.to_q", 0, 6), Place("blocks.3.to_k", 0, 2))


def test_parts_of_a_target_may_change_places():
    assert INDEX.places("old.0.swapped") == (
        Place("blocks.0.to_q", 3, 6),
        Place("blocks.0.to_q", 0, 3),
    )


def test_names_that_lead_nowhere():
    for name in ("old.12.qk", "old.0.gone", "old.0.qkv", "xold.0.qk", "blocks.0"):
        assert INDEX.places(name) == ()


def test_a_wrapper_that_some_versions_of_a_library_have():
    assert INDEX.places("text_model.blocks.0.to_q") == INDEX.places("blocks.0.to_q")
    assert INDEX.places("text_model_blocks_0_to_q") == INDEX.places("blocks.0.to_q")
