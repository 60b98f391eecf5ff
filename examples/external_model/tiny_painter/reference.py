"""The reference that `sglang verify` compares this family with; it uses nothing of the runtime.

Stands for a model's official code: the components by name, and a call that returns ``images``. The
denoiser is the package's own, because there is no other; a real reference would bring its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPTextModel, PreTrainedTokenizerFast

from .model import TinyPainterTransformer2DModel


class TinyPainterReference:
    """Flow matching with classifier-free guidance, written out plainly."""

    def __init__(self, **components: Any) -> None:
        self.text_encoder = components["text_encoder"]
        self.tokenizer = components["tokenizer"]
        self.transformer = components["transformer"]
        self.scheduler = components["scheduler"]
        self.vae = components["vae"]

    @classmethod
    def from_pretrained(cls, folder: str, dtype: torch.dtype) -> Self:
        """Load the five components of a checkpoint."""
        root = Path(folder)
        fields = json.loads((root / "transformer/config.json").read_text())
        transformer = TinyPainterTransformer2DModel(
            **{key: value for key, value in fields.items() if not key.startswith("_")}
        )
        weights = load_file(root / "transformer/diffusion_pytorch_model.safetensors")
        transformer.load_state_dict(weights)
        return cls(
            text_encoder=CLIPTextModel.from_pretrained(root / "text_encoder", dtype=dtype),
            tokenizer=PreTrainedTokenizerFast.from_pretrained(root / "tokenizer"),
            transformer=transformer.to(dtype).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(root / "scheduler"),
            vae=AutoencoderKL.from_pretrained(root / "vae", dtype=dtype),
        )

    def to(self, device: str) -> Self:
        """Move the modules."""
        for module in (self.text_encoder, self.transformer, self.vae):
            module.to(device)
        return self

    @torch.inference_mode()
    def __call__(
        self,
        prompt: str,
        negative_prompt: str,
        height: int,
        width: int,
        num_inference_steps: int,
        guidance_scale: float,
        generator: torch.Generator,
        max_sequence_length: int = 16,
        output_type: str = "pt",
    ) -> SimpleNamespace:
        """One picture: ``images`` [1, 3, H, W] in 0..1."""
        device = self.vae.device
        positive, negative = (
            self._encode(text, max_sequence_length) for text in (prompt, negative_prompt)
        )
        ratio = 2 ** (len(self.vae.config.block_out_channels) - 1)
        shape = (1, self.vae.config.latent_channels, height // ratio, width // ratio)
        noise = torch.randn(shape, generator=generator).to(device)
        tokens = F.pixel_unshuffle(noise, 2)
        grid = tokens.shape[2:]
        latents = tokens.flatten(2).transpose(1, 2)

        sigmas = [1 - i / num_inference_steps for i in range(num_inference_steps)]
        self.scheduler.set_timesteps(sigmas=sigmas, device=device)
        for t in self.scheduler.timesteps:
            with_prompt = self.transformer(latents, positive, t[None])
            without = self.transformer(latents, negative, t[None])
            velocity = without + guidance_scale * (with_prompt - without)
            latents = self.scheduler.step(velocity, t, latents, return_dict=False)[0]

        unpacked = F.pixel_shuffle(latents.transpose(1, 2).unflatten(2, grid), 2)
        return SimpleNamespace(images=self._decode(unpacked))

    def _encode(self, text: str, length: int) -> Tensor:
        tokens = self.tokenizer(
            text, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(self.text_encoder.device)
        return self.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state

    def _decode(self, latents: Tensor) -> Tensor:
        picture = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return (picture / 2 + 0.5).clamp(0, 1)
