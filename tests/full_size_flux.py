"""FLUX.1-dev at full size as a folder: true configs and headers, and no weights on the disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torch import nn

from parity.tiny_checkpoints import flux_dev

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_flux_dev(folder: Path) -> Path:
    """The folder of a checkpoint whose files are sparse: they take no room."""
    import diffusers
    import transformers

    flux_dev().write(folder)  # tokenizers, scheduler and index are of a tiny one
    with torch.device("meta"):
        parts: dict[str, nn.Module] = {
            "transformer": diffusers.FluxTransformer2DModel(guidance_embeds=True),
            "vae": diffusers.AutoencoderKL(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=2, latent_channels=16, sample_size=1024,
                use_quant_conv=False, use_post_quant_conv=False,
                scaling_factor=0.3611, shift_factor=0.1159,
            ),
            "text_encoder": transformers.CLIPTextModel(
                transformers.CLIPTextConfig(
                    hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                    num_attention_heads=12, projection_dim=768,
                )
            ),
            "text_encoder_2": transformers.T5EncoderModel(
                transformers.T5Config(
                    vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24,
                    num_heads=64, feed_forward_proj="gated-gelu",
                )
            ),
        }  # fmt: skip
    for name, module in parts.items():
        place = folder / name
        for old in place.glob("*.safetensors*"):
            old.unlink()
        config = dict(module.config) if name in ("transformer", "vae") else module.config.to_dict()
        config["_class_name"] = type(module).__name__
        (place / "config.json").write_text(json.dumps(config, default=str))
        _write_sparse(place / "model.safetensors", module)
    return folder


def _write_sparse(path: Path, module: nn.Module) -> None:
    header, at = {}, 0
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue  # tied
        seen.add(id(tensor))
        nbytes = tensor.numel() * 2
        header[name] = {
            "dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]
        }  # fmt: skip
        at += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
