"""A published model as a folder without weights: its configs at full size, for --random-weights.

    python benchmarks/model_folders.py flux-dev wan2.1-1.3b qwen-image --out /tmp/models
    sglang bench step --model-path /tmp/models/flux-dev --random-weights
    python benchmarks/model_folders.py flux-dev --weights bf16 --out /tmp/whole    # 34 GB of noise
    sglang bench request --model-path /tmp/whole/flux-dev    # its loading is measured too

``benchmarks/README.md`` has the commands, and what they measured.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from flux_floor import FLUX_DEV
from folder_tokenizers import write_clip, write_qwen2, write_t5
from random_weights import fill

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Facts = Mapping[str, Any]
"""What a config says that its class does not."""

T5_XXL: Facts = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TOY_T5: Facts = T5_XXL | {
    "d_model": 40, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3, "vocab_size": 256,
}  # fmt: skip
TOY_CAUSAL_VAE: Facts = {"base_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}


@dataclass(frozen=True)
class Component:
    """One entry of ``model_index.json``.

    ``toy`` replaces facts for a machine that has no room; ``tokenizer`` writes the files of one.
    """

    library: str
    class_name: str
    facts: Facts = field(default_factory=dict)
    toy: Facts = field(default_factory=dict)
    tokenizer: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Model:
    """A pipeline of Diffusers and its components."""

    pipeline: str
    components: Mapping[str, Component]
    toy_request: Facts = field(default_factory=lambda: {"height": 64, "width": 64})
    """What a toy makes where a request says nothing: at the published sizes a CPU takes minutes."""


FLUX = Model(
    "FluxPipeline",
    {
        "transformer": Component(
            "diffusers",
            "FluxTransformer2DModel",
            FLUX_DEV,
            {
                "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
                "num_attention_heads": 3, "joint_attention_dim": 40, "pooled_projection_dim": 32,
                "axes_dims_rope": [4, 6, 6],
            },
        ),
        "text_encoder": Component(
            "transformers",
            "CLIPTextModel",
            {
                "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072,
                "num_hidden_layers": 12, "num_attention_heads": 12, "projection_dim": 768,
                "max_position_embeddings": 77, "hidden_act": "quick_gelu",
                # As published: 2 is no end, and tells the library to look for the highest id.
                "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
            },
            {
                "vocab_size": 600, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 32,
            },
        ),
        "text_encoder_2": Component(
            "transformers", "T5EncoderModel", T5_XXL | {"vocab_size": 32128}, TOY_T5
        ),
        "vae": Component(
            "diffusers",
            "AutoencoderKL",
            {
                "block_out_channels": [128, 256, 512, 512],
                "down_block_types": ["DownEncoderBlock2D"] * 4,
                "up_block_types": ["UpDecoderBlock2D"] * 4,
                "layers_per_block": 2, "latent_channels": 16, "norm_num_groups": 32,
                "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159,
                "use_quant_conv": False, "use_post_quant_conv": False,
            },
            {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "sample_size": 64},
        ),
        "scheduler": Component(
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {
                "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15,
                "base_image_seq_len": 256, "max_image_seq_len": 4096,
            },
        ),
        "tokenizer": Component("transformers", "CLIPTokenizer", tokenizer=write_clip),
        "tokenizer_2": Component("transformers", "T5TokenizerFast", tokenizer=write_t5),
    },
)  # fmt: skip

WAN = Model(
    "WanPipeline",
    {
        "transformer": Component(
            "diffusers",
            "WanTransformer3DModel",
            {
                "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16,
                "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960,
                "num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
            },
            {
                "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 40,
                "freq_dim": 32, "ffn_dim": 48, "num_layers": 2,
            },
        ),
        "text_encoder": Component(
            "transformers", "UMT5EncoderModel", T5_XXL | {"vocab_size": 256384}, TOY_T5
        ),
        "vae": Component("diffusers", "AutoencoderKLWan", {}, TOY_CAUSAL_VAE),
        "scheduler": Component(
            "diffusers",
            "UniPCMultistepScheduler",
            {
                "prediction_type": "flow_prediction", "use_flow_sigmas": True,
                "solver_order": 2, "flow_shift": 3.0,
            },
        ),
        "tokenizer": Component("transformers", "T5TokenizerFast", tokenizer=write_t5),
    },
    {"height": 64, "width": 64, "num_frames": 5},
)  # fmt: skip

QWEN2_5_VL: Facts = {
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24],
        },
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": False,
}  # fmt: skip
TOY_QWEN2_5_VL: Facts = {
    "text_config": {
        "vocab_size": 1000, "bos_token_id": None, "eos_token_id": None, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
        },
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 36, "num_heads": 2,
        "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1],
    },
    # The published ones lie above this vocabulary.
    "image_token_id": 990, "video_token_id": 991, "vision_start_token_id": 992,
    "vision_end_token_id": 993,
}  # fmt: skip

QWEN_IMAGE = Model(
    "QwenImagePipeline",
    {
        "transformer": Component(
            "diffusers",
            "QwenImageTransformer2DModel",
            {
                "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60,
                "attention_head_dim": 128, "num_attention_heads": 24,
                "joint_attention_dim": 3584, "guidance_embeds": False,
                "axes_dims_rope": [16, 56, 56],
            },
            {
                "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
                "joint_attention_dim": 32, "axes_dims_rope": [4, 6, 6],
            },
        ),
        "text_encoder": Component(
            "transformers", "Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL, TOY_QWEN2_5_VL
        ),
        "vae": Component("diffusers", "AutoencoderKLQwenImage", {}, TOY_CAUSAL_VAE),
        "scheduler": Component(
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {
                "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9,
                "base_image_seq_len": 256, "max_image_seq_len": 8192, "shift_terminal": 0.02,
                "time_shift_type": "exponential",
            },
        ),
        "tokenizer": Component("transformers", "Qwen2Tokenizer", tokenizer=write_qwen2),
    },
)  # fmt: skip

MODELS: Mapping[str, Model] = {"flux-dev": FLUX, "wan2.1-1.3b": WAN, "qwen-image": QWEN_IMAGE}


def write_folder(model: Model, folder: Path, *, toy: bool = False) -> None:
    """``model_index.json``, and each component's files in a folder of its name."""
    folder.mkdir(parents=True)
    index: dict[str, Any] = {
        "_class_name": model.pipeline,
        "_diffusers_version": diffusers.__version__,
    }
    for name, component in model.components.items():
        index[name] = [component.library, component.class_name]
        place = folder / name
        if component.tokenizer is not None:
            component.tokenizer(place)
            continue
        facts = {**component.facts, **(component.toy if toy else {})}
        if component.library == "transformers":
            cls = getattr(transformers, component.class_name)
            config = cls.config_class(**facts)
            config.architectures = [component.class_name]
            config.save_pretrained(str(place))
            continue
        place.mkdir()
        path = "scheduler_config.json" if name == "scheduler" else "config.json"
        _write_json(place / path, _library_config(component.class_name, facts))
    _write_json(folder / "model_index.json", index)
    if toy:
        _write_json(folder / "sampling_params.json", model.toy_request)


def write_weights(model: Model, folder: Path, dtype: torch.dtype) -> int:
    """Random weights beside the configs, in files of at most 5 GB; returns how many bytes.

    They are made on the GPU where there is one, a component at a time.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, written = torch.Generator(device).manual_seed(0), 0
    for name, component in model.components.items():
        library = {"diffusers": diffusers, "transformers": transformers}[component.library]
        cls: Any = getattr(library, component.class_name)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            continue
        place = folder / name
        with torch.device("meta"):
            if library is diffusers:
                made = cls.from_config(cls.load_config(place))  # type: ignore[attr-defined]
            else:
                made = cls(cls.config_class.from_pretrained(place))  # type: ignore[attr-defined]
        module: Any = nn.Module.to(made, dtype).to_empty(device=device)
        if hasattr(module, "tie_weights"):
            module.tie_weights()
        with torch.no_grad():
            fill(module, generator)
            for buffer in module.buffers():
                buffer.zero_()
        module.save_pretrained(str(place), max_shard_size="5GB")
        written += sum(file.stat().st_size for file in place.glob("*.safetensors"))
    return written


def _library_config(class_name: str, facts: Facts) -> dict[str, Any]:
    """What Diffusers writes for an object of that class: its constructor's arguments."""
    constructor = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    unknown = facts.keys() - constructor.keys()
    if unknown:
        raise ValueError(f"{class_name} takes no {', '.join(sorted(unknown))}")
    defaults = {
        name: parameter.default
        for name, parameter in constructor.items()
        if parameter.default is not inspect.Parameter.empty
    }
    head = {"_class_name": class_name, "_diffusers_version": diffusers.__version__}
    return {**head, **defaults, **facts}


def _write_json(path: Path, record: Facts) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", choices=MODELS, help="which, each a folder of --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="tiny, for a machine without a GPU")
    parser.add_argument("--weights", choices=DTYPES, help="random weights too, so many bits each")
    options = parser.parse_args(argv)
    for name in options.models:
        write_folder(MODELS[name], options.out / name, toy=options.toy)
        size = ""
        if options.weights is not None:
            written = write_weights(MODELS[name], options.out / name, DTYPES[options.weights])
            size = f" {written / 1e9:.3g} GB"
        print(f"{options.out / name}{size}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
