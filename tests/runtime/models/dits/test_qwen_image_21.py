"""Qwen-Image 2.1's networks: their tables on the published sizes, and what the denoiser refuses."""

from __future__ import annotations

import pytest
import torch
import transformers

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.dits.qwen_image_21 import (
    QwenImage21Transformer2DModel,
)
from sglang.multimodal_gen.runtime.models.encoders.qwen3_vl import (
    Qwen3VLForConditionalGeneration,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "context_in_dim": 8,
    "axes_dims_rope": (4, 6, 6),
}


def test_a_rank_holds_its_part_of_the_published_sizes() -> None:
    """Which counts of heads divide, and what stays whole."""
    config = transformers.Qwen3VLConfig(
        text_config={
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        vision_config={"out_hidden_size": 4096},
    )
    with torch.device("meta"):
        models = (QwenImage21Transformer2DModel(), Qwen3VLForConditionalGeneration(config))
    for model, billions in zip(models, (7.1, 8.1), strict=True):
        whole = sum(parameter.numel() for parameter in model.parameters())
        assert whole == pytest.approx(billions * 1e9, rel=0.02)
        planned = PlannedModel(model, plan_of(type(model)))
        assert planned.misfit(4) == ""
        planned.apply(Group("weights", 0, (0, 1, 2, 3)))
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held < 1.02 * whole / 4, type(model)


@pytest.mark.parametrize(
    "change", [{"patch_size": 2}, {"eps": 1e-5}, {"causal_condition": False}], ids=str
)
def test_another_network_is_refused(change):
    with pytest.raises(ValueError, match="is another network than this one"):
        QwenImage21Transformer2DModel(**TINY, **change)


def test_pictures_that_text_and_vae_see_at_other_sizes_are_refused():
    model = QwenImage21Transformer2DModel(**TINY)
    text, latents = torch.zeros(9, 8), torch.zeros(1, 24, 4)
    assert model.prefix([text], latents, [(2, 6)], [(4, 6)]).mask is None
    with pytest.raises(CheckpointError, match="makes 5 tokens of a picture of 4 x 6 latents"):
        model.prefix([text], latents, [(2, 5)], [(4, 6)])


@torch.no_grad()
def test_a_text_is_read_causally_and_a_picture_as_a_whole():
    """What a token of the prefix says depends on itself and what stands before, but in pictures."""
    model = QwenImage21Transformer2DModel(**TINY).eval()
    generator = torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(generator=generator)
    text = torch.randn(9, 8, generator=generator)
    picture = torch.randn(1, 8, 4, generator=generator)

    def values(text, picture):
        return model.prefix([text], picture, [(3, 2)], [(2, 4)]).blocks[1][1][0]

    def moved(change_text, change_picture):
        """Tokens of the second block that move: 3 of text, 8 of the picture, 4 of text."""
        other, seen = text.clone(), picture.clone()
        if change_text is not None:
            other[change_text] += 1
        if change_picture is not None:
            seen[:, change_picture] += 1
        off = (values(other, seen) - values(text, picture)).flatten(1).norm(dim=1) > 1e-4
        return off.nonzero().flatten().tolist()

    assert moved(1, None) == list(range(1, 15))
    assert moved(None, 7) == list(range(3, 15)), "the picture's first token sees its last"
    assert moved(6, None) == [12, 13, 14]
    assert moved(3, None) == [], "the language model's own tokens of the picture are not read"
