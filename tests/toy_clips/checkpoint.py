"""Its checkpoint, with random weights: ``python -m toy_clips.checkpoint FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from .model import CHANNELS, TIME, ToyClipsTransformer, ToyClipsVAE

TEXT_WIDTH = 16
INDEX = {
    "_class_name": "ToyClipsPipeline",
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["toy_clips", "ToyClipsTransformer"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "vae": ["toy_clips", "ToyClipsVAE"],
}


def write_checkpoint(folder: Path) -> Path:
    """Write the five components and ``model_index.json``; the same weights each time."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        _write_text(folder)
        _write(ToyClipsTransformer(TEXT_WIDTH), folder / "transformer",
               {"joint_attention_dim": TEXT_WIDTH})  # fmt: skip
    _write(ToyClipsVAE(), folder / "vae", {
        "latent_channels": CHANNELS,
        "block_out_channels": [1, 1, 1],
        "temporal_compression_ratio": TIME,
    })  # fmt: skip
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(INDEX, indent=2))
    return folder


def _write(model: nn.Module, folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": type(model).__name__, **config}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_text(folder: Path) -> None:
    """A token a character, and CLIP in miniature."""
    characters = [chr(code) for code in range(32, 127)]
    ids = {token: index for index, token in enumerate(["<pad>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", model_max_length=16
    ).save_pretrained(str(folder / "tokenizer"))
    config = CLIPTextConfig(
        vocab_size=len(ids),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    CLIPTextModel(config).save_pretrained(str(folder / "text_encoder"))


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
