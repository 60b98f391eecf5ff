"""The model folder: in the Diffusers layout of Wan 2.1, bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from safetensors.torch import load_file
from transformers import UMT5EncoderModel

from examples.train_demo_model.checkpoint import (
    DIFFUSERS_WEIGHTS,
    write_json,
    write_weights,
)
from examples.train_demo_model.sampling import Settings
from examples.train_demo_video.models import (
    TEXT_LENGTH,
    DemoVideoModel,
    transformer_config,
)
from examples.train_demo_video.tracks import CANVAS, FRAMES
from examples.train_demo_video.vocabulary import load_tokenizer

LIMIT_BYTES = 16_000_000
FRAMES_PER_SECOND = 8
MODEL_INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def write_checkpoint(
    folder: Path,
    model: DemoVideoModel,
    vae: AutoencoderKLWan,
    tokenizers: Path,
    settings: Settings,
) -> int:
    """Write the whole model folder; returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    load_tokenizer(tokenizers).save_pretrained(folder / "tokenizer")
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(
        folder / "sampling_params.json",
        {
            "height": CANVAS,
            "width": CANVAS,
            "num_frames": FRAMES,
            "fps": FRAMES_PER_SECOND,
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance,
            "negative_prompt": "",
            "max_sequence_length": TEXT_LENGTH,
        },
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.shift
    )
    scheduler.save_pretrained(folder / "scheduler")

    weights = model.text_encoder.state_dict()
    weights.pop("encoder.embed_tokens.weight", None)  # is shared.weight
    config = model.text_encoder.config.to_diff_dict()
    config |= {"architectures": ["UMT5EncoderModel"], "dtype": "bfloat16"}
    write_json(_folder(folder, "text_encoder") / "config.json", config)
    write_weights(folder / "text_encoder" / "model.safetensors", weights)
    named = {"_class_name": "WanTransformer3DModel", "_diffusers_version": "0.42.1"}
    config = named | transformer_config(model.sizes)
    write_json(_folder(folder, "transformer") / "config.json", config)
    write_weights(folder / "transformer" / DIFFUSERS_WEIGHTS, model.transformer.state_dict())
    vae.save_config(folder / "vae")
    write_weights(folder / "vae" / DIFFUSERS_WEIGHTS, vae.state_dict())
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read_weights(folder: Path, model: DemoVideoModel, vae: AutoencoderKLWan) -> None:
    """Load a model folder into fresh networks: the way on without the optimiser's state."""
    loaded = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    model.text_encoder.load_state_dict(loaded.state_dict())
    model.transformer.load_state_dict(load_file(folder / "transformer" / DIFFUSERS_WEIGHTS))
    vae.load_state_dict(load_file(folder / "vae" / DIFFUSERS_WEIGHTS))
    config = json.loads((folder / "vae" / "config.json").read_text())
    vae.register_to_config(**{k: config[k] for k in ("latents_mean", "latents_std")})


def _folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name
