"""Qwen-Image 2.1 in miniature: Qwen3-VL, the single-stream denoiser, the VAE with transparency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sglang.multimodal_gen.runtime.utils.image_file import load_input_image
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

from parity.family import OTHER_VALUES, Family
from parity.tiny_checkpoints import write_model_index
from parity.tiny_qwen_image import TEXT_WIDTH, tiny_tokenizer

CHANNELS = 12
PIPELINE = "QwenImage21Pipeline"
TEXT = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 36,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "out_hidden_size": TEXT_WIDTH,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


@dataclass(frozen=True)
class TinyQwenImage21:
    """Two blocks of 3 heads x 16; Qwen3-VL of three layers; a 16x VAE of 12 channels."""

    name: str = "qwen-image-21"
    transformer: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    sample_sigmas: tuple[float, ...] | None = None
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write the whole checkpoint under `folder`."""
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(str(folder / "processor"))
        tiny_processor().save_pretrained(str(folder / "processor"))
        (folder / "processor" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        for name, module in {
            "text_encoder": self._text_encoder(tokenizer),
            "transformer": self._dit(),
            "vae": self._vae(),
        }.items():
            module.save_pretrained(folder / name)
        FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ).save_pretrained(folder / "scheduler")
        sigmas = None if self.sample_sigmas is None else list(self.sample_sigmas)
        write_model_index(
            folder,
            PIPELINE,
            {
                "processor": ("transformers", "Qwen3VLProcessor"),
                "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
                "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
                "transformer": ("diffusers", "QwenImage21Transformer2DModel"),
                "vae": ("diffusers", "AutoencoderKLQwenImage21"),
                "sample_sigmas": sigmas,
            },
        )

    def _text_encoder(self, tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
        ids = tokenizer.convert_tokens_to_ids
        config = Qwen3VLConfig(
            text_config={**TEXT, **self.text, "vocab_size": len(tokenizer)},
            vision_config={**VISION, **self.vision},
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        model = Qwen3VLForConditionalGeneration(config)
        # Attention that picks; pictures as loud as words; a last norm that would be missed.
        loud = {r"[qk]_proj\.weight": 2.0, r"merger.*linear_fc2": 2.0, r"language_model\.norm": 2.0}
        fill_with_noise(model, self.seed + 1, loud)
        return model

    def _dit(self) -> QwenImage21Transformer2DModel:
        config: dict[str, Any] = {
            "in_channels": CHANNELS,
            "out_channels": CHANNELS,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "context_in_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 6, 6),
            **self.transformer,
        }
        model = QwenImage21Transformer2DModel(**config)
        fill_with_noise(model, self.seed + 2, {r"norm_[qk]\.": 1.6, r"to_out\b": 2.0})
        return model

    def _vae(self) -> AutoencoderKLQwenImage21:
        model = AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 2, 2, 2],
            num_res_blocks=1,
            latents_mean=[0.07 * (index - 5) for index in range(CHANNELS)],
            latents_std=[0.5 + 0.04 * index for index in range(CHANNELS)],
        )
        fill_with_noise(model, self.seed + 3, {r"decoder\.conv_out": 0.6})  # within -1..1
        return model


def tiny_processor() -> Qwen2VLImageProcessorPil:
    """A token for 32 x 32 pixels; no picture of the tests is made smaller or larger."""
    return Qwen2VLImageProcessorPil(min_pixels=32 * 32, max_pixels=2**24, patch_size=16)


def load_reference(reference: str, folder: Path) -> Any:
    """Diffusers' pipeline. Its processor wants torchvision for clips: it gets none."""
    with patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
        processor = transformers.Qwen3VLProcessor(
            Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
            Qwen2Tokenizer.from_pretrained(folder / "processor"),
            chat_template=CHAT_TEMPLATE,
        )
    return getattr(diffusers, reference).from_pretrained(
        folder, processor=processor, dtype=torch.float32
    )


def with_alpha(pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Pictures in place of paths, as transparent as they are."""
    if "image_path" in arguments:
        paths = arguments.pop("image_path")
        arguments["image"] = [load_input_image(path, keep_alpha=True) for path in paths]
    return arguments


def family(size: tuple[int, int], other_image: Any = None) -> Family:
    """For results of one size, whose tokens come last."""
    tokens = (size[0] // 16) * (size[1] // 16)
    return Family(
        reference=PIPELINE,
        inputs=("hidden_states", "timestep"),
        latents_of=lambda inputs: inputs["hidden_states"][:, -tokens:],
        target_last=True,
        other={**OTHER_VALUES, "image_path": other_image},
        load=load_reference,
        arguments=with_alpha,
    )


def for_ranks(name: str = "qwen-image-21-for-ranks", **changes: Any) -> TinyQwenImage21:
    """Whose heads divide over two and four ranks, in each of its models."""
    heads = {
        "transformer": {"num_attention_heads": 4},
        "text": {"num_key_value_heads": 4},
        "vision": {"num_heads": 4, "hidden_size": 64},
    }
    return TinyQwenImage21(name, **{**heads, **changes})


class Reference:
    """For ``sglang verify --reference parity.tiny_qwen_image_21:Reference``."""

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> Any:
        """The pipeline."""
        return load_reference(PIPELINE, Path(folder))
