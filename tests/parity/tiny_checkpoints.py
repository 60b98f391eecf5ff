"""Tiny checkpoints in the Diffusers layout, made in seconds, with weights that hide nothing.

A checkpoint is a frozen description with a `name` (its folder) and `write`. A new family adds one
such class; what two rows of a test need differently is a field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
)

from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

from parity.tiny_tokenizers import CLIP_POSITIONS, write_clip_tokenizer, write_t5_tokenizer

CLIP_WIDTH, T5_WIDTH = 32, 40


class Checkpoint(Protocol):
    """What the harness needs of a checkpoint: a folder name and a way to write it."""

    @property
    def name(self) -> str:
        """Folder name; two checkpoints of one session with the same name are the same."""
        ...

    def write(self, folder: Path) -> None:
        """Write all files under `folder`, which does not exist yet."""
        ...


@dataclass(frozen=True)
class TinyFlux:
    """FLUX.1 in miniature: 2 double and 2 single blocks of 3 heads x 16, 8x VAE.

    No two widths are equal and none is a published one, so that a number written into the runtime,
    or taken from the wrong component, is found out.
    """

    name: str
    guidance_embeds: bool = True
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    clip: Mapping[str, Any] = field(default_factory=dict)
    t5: Mapping[str, Any] = field(default_factory=dict)
    latent_channels: int = 16
    clip_eos_token_id: int | None = 2
    """In text_encoder/config.json: 2 as published (pool at the highest id), or None: the truth."""
    dtype: torch.dtype = torch.float32
    max_shard_size: str | int = "10GB"
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write the whole checkpoint under `folder`."""
        clip_size = write_clip_tokenizer(folder / "tokenizer")
        t5_size = write_t5_tokenizer(folder / "tokenizer_2")
        self._save(self._clip(clip_size), folder / "text_encoder")
        self._save(self._t5(t5_size), folder / "text_encoder_2")
        self._save(self._dit(), folder / "transformer")
        self._save(self._vae(), folder / "vae")
        FlowMatchEulerDiscreteScheduler(**self.scheduler).save_pretrained(folder / "scheduler")
        write_model_index(
            folder,
            "FluxPipeline",
            {
                "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
                "text_encoder": ("transformers", "CLIPTextModel"),
                "text_encoder_2": ("transformers", "T5EncoderModel"),
                "tokenizer": ("transformers", "CLIPTokenizer"),
                "tokenizer_2": ("transformers", "T5TokenizerFast"),
                "transformer": ("diffusers", "FluxTransformer2DModel"),
                "vae": ("diffusers", "AutoencoderKL"),
            },
        )

    def _save(self, module: ModelMixin | PreTrainedModel, folder: Path) -> None:
        nn.Module.to(module, self.dtype)  # their own `to` warns of modules to be kept in fp32
        module.save_pretrained(folder, max_shard_size=self.max_shard_size)

    def _clip(self, vocabulary: int) -> CLIPTextModel:
        end = vocabulary - 1
        config: dict[str, Any] = {
            "vocab_size": vocabulary,
            "hidden_size": CLIP_WIDTH,
            "intermediate_size": 48,
            "projection_dim": CLIP_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": CLIP_POSITIONS,
            "hidden_act": "quick_gelu",
            "bos_token_id": end - 1,
            "eos_token_id": end if self.clip_eos_token_id is None else self.clip_eos_token_id,
            "pad_token_id": 1,
        }
        model = CLIPTextModel(CLIPTextConfig(**config | dict(self.clip)))
        fill_with_noise(model, self.seed + 1)
        return model

    def _t5(self, vocabulary: int) -> T5EncoderModel:
        config: dict[str, Any] = {
            "vocab_size": vocabulary,
            "d_model": T5_WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 3,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }
        model = T5EncoderModel(T5Config(**config | dict(self.t5)))
        # T5 does not divide by sqrt(head width): its queries carry that factor. Sharp attention and
        # a weak position bias let every pad see the words; else 500 pads drown a prompt of five.
        fill_with_noise(model, self.seed + 2, {r"\.q\.": 3 * 8**-0.5, "relative_attention": 0.3})
        return model

    def _dit(self) -> FluxTransformer2DModel:
        model = FluxTransformer2DModel(**dit_config(self))
        # Attention that picks, and is heard: a near-uniform mean over tokens says nothing.
        gains = {r"norm_(added_)?[qk]\.": 1.6, r"to_(add_)?out\b": 2.0}
        fill_with_noise(model, self.seed + 3, gains)
        return model

    def _vae(self) -> AutoencoderKL:
        config: dict[str, Any] = {
            "block_out_channels": (8, 8, 16, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "latent_channels": self.latent_channels,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        }
        model = AutoencoderKL(**config)
        fill_with_noise(model, self.seed + 4, {r"decoder\.conv_out": 0.8})  # within 0..1
        return model


def dit_config(checkpoint: TinyFlux) -> dict[str, Any]:
    """Constructor arguments of the transformer of `checkpoint`."""
    return {
        "in_channels": 4 * checkpoint.latent_channels,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": T5_WIDTH,
        "pooled_projection_dim": CLIP_WIDTH,
        "guidance_embeds": checkpoint.guidance_embeds,
        "axes_dims_rope": (4, 6, 6),
        **checkpoint.transformer,
    }


def flux_dev(name: str = "flux-dev", **changes: Any) -> TinyFlux:
    """FLUX.1-dev: embedded guidance, schedule shifted by the number of image tokens."""
    scheduler = {
        "shift": 3.0,  # published, and unused with dynamic shifting: reading it is a mistake
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    }
    return TinyFlux(**{"name": name, "scheduler": scheduler, **changes})


def flux_for_ranks(name: str = "flux-for-ranks", **changes: Any) -> TinyFlux:
    """FLUX.1-dev whose heads divide over two and four ranks, in each of its models."""
    heads = {
        "transformer": {"num_attention_heads": 4},
        "clip": {"num_attention_heads": 4},
        "t5": {"num_heads": 4},
    }
    return flux_dev(name, **{**heads, **changes})


def flux_schnell(name: str = "flux-schnell", **changes: Any) -> TinyFlux:
    """FLUX.1-schnell: no guidance embedding, plain schedule."""
    scheduler = {"shift": 1.0, "use_dynamic_shifting": False}
    return TinyFlux(
        **{"name": name, "guidance_embeds": False, "scheduler": scheduler, "seed": 10, **changes}
    )


def write_model_index(folder: Path, pipeline: str, parts: Mapping[str, tuple[str, str]]) -> None:
    """Write model_index.json: the pipeline's class and each component's library and class."""
    index = {"_class_name": pipeline, "_diffusers_version": "0.30.0.dev0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
