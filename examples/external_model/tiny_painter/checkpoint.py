"""A small checkpoint with random weights: ``python -m tiny_painter.checkpoint FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from .model import TinyPainterTransformer2DModel

TEXT_WIDTH = 16
LATENT_CHANNELS = 4
INDEX = {
    "_class_name": "TinyPainterPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["tiny_painter", "TinyPainterTransformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_checkpoint(folder: Path) -> None:
    """Write the five components and ``model_index.json``; the same weights each time."""
    torch.manual_seed(0)
    vocabulary = _write_tokenizer(folder / "tokenizer")
    _write_text_encoder(folder / "text_encoder", vocabulary)
    _write_transformer(folder / "transformer")
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    _vae().save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text(json.dumps(INDEX, indent=2))


def _write_tokenizer(folder: Path) -> int:
    """A token a character; returns the vocabulary's size."""
    characters = [chr(code) for code in range(32, 127)]
    ids = {token: index for index, token in enumerate(["<pad>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=16
    )
    fast.save_pretrained(str(folder))
    return len(ids)


def _write_text_encoder(folder: Path, vocabulary: int) -> None:
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    CLIPTextModel(config).save_pretrained(str(folder))


def _write_transformer(folder: Path) -> None:
    config = {"in_channels": 4 * LATENT_CHANNELS, "joint_attention_dim": TEXT_WIDTH}
    model = TinyPainterTransformer2DModel(**config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    config_json = {"_class_name": type(model).__name__, **config}
    (folder / "config.json").write_text(json.dumps(config_json, indent=2))


def _vae() -> AutoencoderKL:
    config: dict[str, Any] = {
        "block_out_channels": (8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": LATENT_CHANNELS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return AutoencoderKL(**config)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
