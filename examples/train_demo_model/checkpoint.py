"""The model folder: in the Diffusers layout of FLUX, bf16; packing and unpacking it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

from examples.train_demo_model.layout import CANVAS
from examples.train_demo_model.models import DemoModel, transformer_config
from examples.train_demo_model.sampling import Settings
from examples.train_demo_model.vocabulary import T5_LENGTH, load_tokenizers

LIMIT_BYTES = 15_000_000
MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
WEIGHTS_METADATA = {"format": "pt"}
DIFFUSERS_WEIGHTS = "diffusion_pytorch_model.safetensors"


def write_tokenizers(folder: Path, clip: CLIPTokenizer, t5: T5Tokenizer) -> None:
    """Both tokenizers; CLIP's also as ``vocab.json`` and ``merges.txt``."""
    clip.save_pretrained(folder / "tokenizer")
    clip.backend_tokenizer.model.save(str(folder / "tokenizer"))
    t5.save_pretrained(folder / "tokenizer_2")


def write_checkpoint(
    folder: Path, model: DemoModel, vae: AutoencoderKL, tokenizers: Path, settings: Settings
) -> int:
    """Writes the whole model folder; returns its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizers(folder, *load_tokenizers(tokenizers))
    write_json(folder / "model_index.json", MODEL_INDEX)
    write_json(
        folder / "sampling_params.json",
        {
            "height": CANVAS,
            "width": CANVAS,
            "num_inference_steps": settings.steps,
            "true_cfg_scale": settings.guidance,
            "negative_prompt": "",
            "max_sequence_length": T5_LENGTH,
        },
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.shift, use_dynamic_shifting=False)
    scheduler.save_pretrained(folder / "scheduler")

    # The released FLUX checkpoints keep the prefix that newer Transformers drop in memory.
    clip_weights = {
        "text_model." + name.removeprefix("text_model."): tensor
        for name, tensor in model.text_encoder.state_dict().items()
    }
    t5_weights = model.text_encoder_2.state_dict()
    t5_weights.pop("encoder.embed_tokens.weight", None)  # is shared.weight
    for name, weights in (("text_encoder", clip_weights), ("text_encoder_2", t5_weights)):
        (folder / name).mkdir(exist_ok=True)
        config = getattr(model, name).config.to_diff_dict()
        config |= {"architectures": [MODEL_INDEX[name][1]], "dtype": "bfloat16"}
        write_json(folder / name / "config.json", config)
        write_weights(folder / name / "model.safetensors", weights)

    (folder / "transformer").mkdir(exist_ok=True)
    write_json(
        folder / "transformer" / "config.json",
        {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"}
        | transformer_config(model.sizes),
    )
    write_weights(folder / "transformer" / DIFFUSERS_WEIGHTS, model.transformer.state_dict())
    vae.save_config(folder / "vae")
    write_weights(folder / "vae" / DIFFUSERS_WEIGHTS, vae.state_dict())
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def pack_folder(folder: Path, archive: Path) -> None:
    """One tar of the folder's content: what comes home from a lent machine."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w") as tar:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                tar.add(file, arcname=str(file.relative_to(folder)))
    part.rename(archive)


def unpack_archive(archive: Path, folder: Path) -> None:
    """Writes the content of a packed folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        # Python 3.11 learnt of filters in its fourth release; from 3.14 on this is its default.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)


def read_weights(folder: Path, model: DemoModel, vae: AutoencoderKL) -> None:
    """Loads a model folder into fresh networks; the way to resume without the optimiser's state."""
    encoders = (
        (model.text_encoder, CLIPTextModel, "text_encoder"),
        (model.text_encoder_2, T5EncoderModel, "text_encoder_2"),
    )
    for target, cls, name in encoders:
        loaded = cls.from_pretrained(folder / name, dtype=torch.float32)
        target.load_state_dict(loaded.state_dict())
    model.transformer.load_state_dict(load_file(folder / "transformer" / DIFFUSERS_WEIGHTS))
    read_vae(folder, vae)


def read_vae(folder: Path, vae: AutoencoderKL) -> None:
    """The autoencoder of a model folder, with its shift and scale."""
    vae.load_state_dict(load_file(folder / "vae" / DIFFUSERS_WEIGHTS))
    config = json.loads((folder / "vae" / "config.json").read_text())
    vae.register_to_config(
        shift_factor=config["shift_factor"], scaling_factor=config["scaling_factor"]
    )


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Tensors as bf16, in one safetensors file."""
    stored = {
        name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()
    }
    save_file(stored, file, metadata=WEIGHTS_METADATA)


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """A JSON file for people: indented, sorted."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
