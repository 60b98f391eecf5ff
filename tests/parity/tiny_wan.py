"""Wan 2.1 and 2.2 in miniature, every published variant, in the Diffusers layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import nn
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

from parity.tiny_tokenizers import write_t5_tokenizer

TEXT_WIDTH, CLIP_WIDTH = 40, 24
CLIP_EDGE, CLIP_PATCH = 28, 14
CLIP_TOKENS = (CLIP_EDGE // CLIP_PATCH) ** 2 + 1
UNIPC = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_order": 2,
    "flow_shift": 3.0,
}


@dataclass(frozen=True)
class TinyWan:
    """Two blocks of 4 heads x 12, an autoencoder of 6 channels; no two widths are equal.

    ``image``: "" for text alone, "clip" for CLIP and channels beside the latents, "channels" for
    the channels alone, "both" for two pictures' positions, "first" for a first frame in place of
    the latents' (the 5B).
    """

    name: str
    image: str = ""
    experts: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=lambda: UNIPC)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    boundary_ratio: float = 0.875
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def channels(self) -> int:
        """Latent channels."""
        return 8 if self.image == "first" else 6

    def write(self, folder: Path) -> None:
        """Write the whole checkpoint under `folder`."""
        size = write_t5_tokenizer(folder / "tokenizer")
        self._save(self._umt5(size), folder / "text_encoder")
        self._save(self._dit(3), folder / "transformer")
        self._save(self._vae(), folder / "vae")
        euler = "shift" in self.scheduler
        scheduler = FlowMatchEulerDiscreteScheduler if euler else UniPCMultistepScheduler
        scheduler(**self.scheduler).save_pretrained(folder / "scheduler")
        parts: dict[str, Any] = {
            "scheduler": ("diffusers", scheduler.__name__),
            "text_encoder": ("transformers", "UMT5EncoderModel"),
            "tokenizer": ("transformers", "T5TokenizerFast"),
            "transformer": ("diffusers", "WanTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLWan"),
            "transformer_2": (None, None),
            "boundary_ratio": None,
            "expand_timesteps": self.image == "first",
        }
        if self.experts:
            self._save(self._dit(7), folder / "transformer_2")
            parts["transformer_2"] = parts["transformer"]
            parts["boundary_ratio"] = self.boundary_ratio
        if self.image in ("clip", "both"):
            self._save(self._clip(), folder / "image_encoder")
            processor = CLIPImageProcessorPil(
                size={"shortest_edge": CLIP_EDGE},
                crop_size={"height": CLIP_EDGE, "width": CLIP_EDGE},
            )
            processor.save_pretrained(folder / "image_processor")
            parts["image_encoder"] = ("transformers", "CLIPVisionModel")
            parts["image_processor"] = ("transformers", "CLIPImageProcessor")
        with_frames = self.image in ("clip", "channels", "both")
        name = "WanImageToVideoPipeline" if with_frames else "WanPipeline"
        index = {"_class_name": name, "_diffusers_version": "0.34.0.dev0", **parts}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _save(self, module: Any, folder: Path) -> None:
        nn.Module.to(module, self.dtype)
        module.save_pretrained(folder)

    def _umt5(self, vocabulary: int) -> UMT5EncoderModel:
        config = UMT5Config(
            vocab_size=vocabulary,
            d_model=TEXT_WIDTH,
            d_kv=8,
            d_ff=56,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            pad_token_id=0,
            eos_token_id=1,
        )
        model = UMT5EncoderModel(config)
        gains = {r"\.q\.": 3 * 8**-0.5, "relative_attention": 0.3}
        fill_with_noise(model, self.seed + 2, gains)
        return model

    def _dit(self, seed: int) -> WanTransformer3DModel:
        beside = 4 + self.channels if self.image in ("clip", "channels", "both") else 0
        config: dict[str, Any] = {
            "num_attention_heads": 4,
            "attention_head_dim": 12,
            "in_channels": self.channels + beside,
            "out_channels": self.channels,
            "text_dim": TEXT_WIDTH,
            "freq_dim": 32,
            "ffn_dim": 72,
            "num_layers": 2,
            "cross_attn_norm": True,
        }
        if self.image in ("clip", "both"):
            config |= {"image_dim": CLIP_WIDTH, "added_kv_proj_dim": 48}
        if self.image == "both":
            config["pos_embed_seq_len"] = 2 * CLIP_TOKENS
        model = WanTransformer3DModel(**config | dict(self.transformer))
        gains = {
            r"norm_(added_)?[qk]\.": 1.6,
            r"to_out\b": 2.0,
            # One prompt in 512 tokens of zeros: it must be heard.
            r"attn2\.to_out": 12.0,
            "scale_shift_table": 5.0,
            r"pos_embed": 10.0,
        }
        fill_with_noise(model, self.seed + seed, _present(gains, model))
        return model

    def _clip(self) -> CLIPVisionModel:
        config = CLIPVisionConfig(
            hidden_size=CLIP_WIDTH,
            intermediate_size=52,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=CLIP_EDGE,
            patch_size=CLIP_PATCH,
        )
        model = CLIPVisionModel(config)
        fill_with_noise(model, self.seed + 5)
        return model

    def _vae(self) -> AutoencoderKLWan:
        ramp = torch.linspace(-1, 1, self.channels)
        config: dict[str, Any] = {
            "base_dim": 8,
            "z_dim": self.channels,
            "dim_mult": [1, 1, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
            "latents_mean": (0.3 * ramp).tolist(),
            "latents_std": (1.2 + 0.4 * ramp).tolist(),
        }
        if self.image == "first":
            config |= {
                "decoder_base_dim": 12,
                "is_residual": True,
                "patch_size": 2,
                "in_channels": 12,
                "out_channels": 12,
                "scale_factor_spatial": 16,
            }
        model = AutoencoderKLWan(**config)
        fill_with_noise(model, self.seed + 4, {r"decoder\.conv_out": 0.4})
        return model


def _present(gains: Mapping[str, float], model: nn.Module) -> dict[str, float]:
    import re

    names = [name for name, _ in model.named_parameters()]
    return {p: gain for p, gain in gains.items() if any(re.search(p, name) for name in names)}
