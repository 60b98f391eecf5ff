"""FLUX.1-dev's components with random weights, made where they rest: in pinned host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import CLIPTextConfig, T5Config

from flux_floor import FLUX_DEV, TOY
from flux_sides import make_scheduler
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta, default_dtype
from sglang.multimodal_gen.runtime.memory.host_home import HostHome
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import Placement, Residency
from sglang.multimodal_gen.runtime.memory.weight_group import WeightSpec
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.encoders.clip import CLIPTextModel
from sglang.multimodal_gen.runtime.models.encoders.t5 import T5EncoderModel
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane, copy_lane


class Tokens:
    """A tokenizer of nothing: the same tokens for every prompt, as many as are asked for."""

    def __init__(self, model_max_length: int, vocabulary: int) -> None:
        self.model_max_length = model_max_length
        self.vocabulary = vocabulary

    def __call__(self, _prompt: str, max_length: int | None = None, **_: Any) -> SimpleNamespace:
        """As Transformers' tokenizers, with ``return_tensors="pt"`` where a length is given."""
        if max_length is None:
            return SimpleNamespace(input_ids=[1, 2])
        ids = torch.arange(max_length)[None] * 7 % self.vocabulary
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))


@dataclass
class Model:
    """All components of a pipeline; ``parts`` are those that rest in host memory."""

    config: Mapping[str, Any]
    text_tokens: int
    dtype: torch.dtype
    modules: dict[str, Any]
    parts: dict[str, OffloadedComponent] = field(default_factory=dict)
    pin_seconds: float = 0.0


def full_size(device: torch.device, prefetch: int) -> Model:
    """FLUX.1-dev's published sizes, bf16: 12 + 4.7 + 0.12 + 0.08 billion weights."""
    t5 = T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, vocab_size=32128,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    clip = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768, eos_token_id=2,
    )  # fmt: skip
    vae = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    return _made(FLUX_DEV, t5, clip, vae, 512, torch.bfloat16, device, prefetch)


def toy(device: torch.device) -> Model:
    """The same in miniature, fp32."""
    t5 = T5Config(
        d_model=40, d_kv=8, d_ff=48, num_layers=3, num_heads=3, vocab_size=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    clip = CLIPTextConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=24, vocab_size=64, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    vae = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return _made(TOY, t5, clip, vae, 32, torch.float32, device, 1)


def resident_twin(model: Model, device: torch.device) -> nn.Module:
    """The denoiser again, with the same weights on the device for good."""
    twin = _built(lambda: FluxTransformer2DModel(**model.config), model.dtype)
    original = model.modules["transformer"].state_dict()
    state = {name: tensor.to(device, copy=True) for name, tensor in original.items()}
    twin.load_state_dict(state, assign=True)
    return twin.requires_grad_(False).eval()


def _made(
    config: Mapping[str, Any],
    t5: T5Config,
    clip: CLIPTextConfig,
    vae: Mapping[str, Any],
    text_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    prefetch: int,
) -> Model:
    image = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 16,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    makers: dict[str, Callable[[], nn.Module]] = {
        "text_encoder": lambda: CLIPTextModel(clip),
        "text_encoder_2": lambda: T5EncoderModel(t5),
        "transformer": lambda: FluxTransformer2DModel(**config),
        "vae": lambda: AutoencoderKL(**{**image, **vae}),
    }
    modules: dict[str, Any] = {
        "tokenizer": Tokens(77, clip.vocab_size or 64),
        "tokenizer_2": Tokens(text_tokens, t5.vocab_size),
        "scheduler": make_scheduler(),
    }
    model = Model(config, text_tokens, dtype, modules)
    lane = copy_lane(device)
    generator = torch.Generator(device).manual_seed(0)
    for name, make in makers.items():
        module = modules[name] = _built(make, dtype)
        slots = prefetch + 1 if name == "transformer" else 2
        _fill(model, name, module, lane, slots, generator)
    return model


def _built(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with default_dtype(dtype):
        return build_on_meta(make).eval().requires_grad_(False)


@torch.no_grad()
def _fill(
    model: Model,
    name: str,
    module: nn.Module,
    lane: CopyLane,
    slots: int,
    generator: torch.Generator,
) -> None:
    """Normal weights of deviation 0.02, norm weights around one, drawn on the device and copied."""
    device = lane.device
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
        parameters[id(parameter)] = parameter
    specs = [WeightSpec(tuple(names[key]), p.shape, model.dtype) for key, p in parameters.items()]
    home = HostHome(name, Placement(Residency.LAYERWISE, slots), lane, pin=True)
    home.prepare(module, specs)
    assert home.component is not None
    if device.type == "cuda":
        start = time.perf_counter()
        home.component.host.pin()  # before filling: copies from the device are then fast
        model.pin_seconds += time.perf_counter() - start
    for spec in specs:
        is_norm = len(spec.shape) == 1 and spec.names[0].endswith("weight")
        value = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        value.normal_(1.0 if is_norm else 0.0, 0.02, generator=generator)
        assert home.take(spec.names, [value], 0, spec.dtype)
    for owner in module.modules():
        for path, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, path, buffer.to(device))
    home.finish()
    model.parts[name] = home.component
