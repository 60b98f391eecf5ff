"""Qwen-Image and its editing models in miniature, with their tokenizer and picture processor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

from parity.family import OTHER_VALUES, Family
from parity.tiny_checkpoints import write_model_index
from parity.tiny_tokenizers import WORDS

TEXT_WIDTH = 32
CHANNELS = 16
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>")  # fmt: skip
TEMPLATE_WORDS = """system\n Describe the key features of the input image ( color , shape , size ,
 texture , objects , background ), then explain how the user 's text instruction should alter or
 modify the image . Generate a new image that meets the user 's requirements while maintaining
 consistency with the original input where appropriate . by detailing quantity text spatial
 relationships and background : user assistant Picture a"""
"""Words that are one token, so that the templates are about as long as with the published one."""

TEXT = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_heads": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "out_hidden_size": TEXT_WIDTH,
}
MEAN = [0.07 * (index - 7) for index in range(CHANNELS)]
STD = [0.5 + 0.04 * index for index in range(CHANNELS)]


@dataclass(frozen=True)
class TinyQwenImage:
    """Two blocks of 3 heads x 16; Qwen2.5-VL of two layers; 8x causal VAE with means of its own."""

    name: str
    pipeline: str = "QwenImagePipeline"
    transformer: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write the whole checkpoint under `folder`."""
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        parts = {
            "text_encoder": self._text_encoder(tokenizer),
            "transformer": self._dit(),
            "vae": self._vae(),
        }
        for name, module in parts.items():
            torch.nn.Module.to(module, self.dtype)
            module.save_pretrained(folder / name)
        scheduler = {
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 0.9,
            "base_image_seq_len": 256,
            "max_image_seq_len": 8192,
            "shift_terminal": 0.02,
            "time_shift_type": "exponential",
        }
        FlowMatchEulerDiscreteScheduler(**scheduler | dict(self.scheduler)).save_pretrained(
            folder / "scheduler"
        )
        index = {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
            "tokenizer": ("transformers", "Qwen2Tokenizer"),
            "transformer": ("diffusers", "QwenImageTransformer2DModel"),
            "vae": ("diffusers", "AutoencoderKLQwenImage"),
        }
        if self.pipeline != "QwenImagePipeline":
            tokenizer.save_pretrained(str(folder / "processor"))
            tiny_picture_processor().save_pretrained(str(folder / "processor"))
            index["processor"] = ("transformers", "Qwen2VLProcessor")
        write_model_index(folder, self.pipeline, index)

    def _text_encoder(self, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
        ids = tokenizer.convert_tokens_to_ids
        config = Qwen2_5_VLConfig(
            text_config={
                **TEXT,
                **self.text,
                "vocab_size": len(tokenizer),
                "bos_token_id": None,
                "eos_token_id": ids("<|im_end|>"),
            },
            vision_config={**VISION, **self.vision},
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        # Attention that picks; pictures as loud as words.
        fill_with_noise(model, self.seed + 1, {r"[qk]_proj\.weight": 2.0, r"merger\.mlp\.2": 2.0})
        return model

    def _dit(self) -> QwenImageTransformer2DModel:
        config: dict[str, Any] = {
            "in_channels": 4 * CHANNELS,
            "out_channels": CHANNELS,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 6, 6),
            **self.transformer,
        }
        model = QwenImageTransformer2DModel(**config)
        fill_with_noise(
            model, self.seed + 2, {r"norm_(added_)?[qk]\.": 1.6, r"to_(add_)?out\b": 2.0}
        )
        return model

    def _vae(self) -> AutoencoderKLQwenImage:
        model = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            latents_mean=MEAN,
            latents_std=STD,
        )
        fill_with_noise(model, self.seed + 3, {r"decoder\.conv_out": 1.0})  # within -1..1
        return model


def tiny_tokenizer() -> Qwen2Tokenizer:
    """Byte-level, as the published one; the words of the templates and of the tests are whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*WORDS, *TEMPLATE_WORDS.split()]
    merges: dict[tuple[str, str], None] = {}
    # Those behind a space first: their merges all start at the space, so none cuts another.
    for word in dict.fromkeys([*(f"\u0120{piece}" for piece in pieces), *pieces]):
        joined = word[0]
        for letter in word[1:]:
            merges[(joined, letter)] = None
            joined += letter
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=list(merges),
        model_max_length=2048,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    return tokenizer


def tiny_picture_processor() -> Qwen2VLImageProcessorPil:
    """Few tokens a picture; the least and the most are both met by the tests' pictures."""
    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 24)


def with_pictures(reference: str, folder: Path) -> Any:
    """An editing pipeline of Diffusers, whose encoder stands its picture tokens at 3-D positions.

    The pipelines leave ``mm_token_type_ids`` out, and Transformers 5 then counts positions up;
    before, and in training, they were 3-D. Its processor wants torchvision for clips, which nobody
    has here: it gets none.
    """
    with patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
        processor = transformers.Qwen2VLProcessor(
            Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
            Qwen2Tokenizer.from_pretrained(folder / "tokenizer"),
        )
    pipeline = getattr(diffusers, reference).from_pretrained(
        folder, processor=processor, dtype=torch.float32
    )
    encoder = pipeline.text_encoder
    forward = encoder.forward

    def injected(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        kinds = (input_ids == encoder.config.image_token_id).int()
        return forward(input_ids=input_ids, mm_token_type_ids=kinds, **kwargs)

    injected.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    encoder.forward = injected
    return pipeline


INPUTS = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep")
QWEN_IMAGE = Family(reference="QwenImagePipeline", inputs=INPUTS)


def editing(reference: str, size: tuple[int, int], other_image: Any) -> Family:
    """An editing family for results of one size, whose tokens come before those of pictures."""
    tokens = (size[0] // 16) * (size[1] // 16)
    return Family(
        reference=reference,
        inputs=INPUTS,
        latents_of=lambda inputs: inputs["hidden_states"][:, :tokens],
        other={**OTHER_VALUES, "image_path": other_image},
        load=with_pictures,
    )


def qwen_image(name: str = "qwen-image", **changes: Any) -> TinyQwenImage:
    """Text to image."""
    return TinyQwenImage(name, **changes)


def qwen_image_for_ranks(name: str = "qwen-image-for-ranks", **changes: Any) -> TinyQwenImage:
    """Whose heads divide over two and four ranks, in each of its models."""
    heads = {
        "transformer": {"num_attention_heads": 4},
        "text": {"num_key_value_heads": 4},
        "vision": {"num_heads": 4, "hidden_size": 64},
    }
    return TinyQwenImage(name, **{**heads, **changes})


class EditPlusReference:
    """For ``sglang verify --reference parity.tiny_qwen_image:EditPlusReference``."""

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> Any:
        """The pipeline, told where pictures are."""
        return with_pictures("QwenImageEditPlusPipeline", Path(folder))
