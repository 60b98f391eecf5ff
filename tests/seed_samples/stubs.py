"""Stub components with the interfaces that the shared stages use; weights are random, not zero."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

TEXT_TOKENS = 6
TEXT_WIDTH = 8


class StubTokenizer:
    """A token a character, at most ``TEXT_TOKENS``."""

    model_max_length = TEXT_TOKENS

    def num_special_tokens_to_add(self):
        return 0

    def __call__(
        self,
        prompt,
        padding=None,
        max_length=0,
        truncation=False,
        return_offsets_mapping=False,
        **_,
    ):
        ids = [1 + ord(c) % 50 for c in prompt]
        if return_offsets_mapping:
            return SimpleNamespace(
                input_ids=ids, offset_mapping=[(i, i + 1) for i in range(len(prompt))]
            )
        if truncation:
            ids = ids[:max_length]
        if padding != "max_length":
            return SimpleNamespace(input_ids=ids)
        mask = [1] * len(ids) + [0] * (max_length - len(ids))
        ids = ids + [0] * (max_length - len(ids))
        return SimpleNamespace(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask]))


class StubTextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, TEXT_WIDTH)

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(last_hidden_state=self.embed(input_ids))


class StubTransformer(nn.Module):
    """Takes exactly the arguments that the seed's pipeline config hands over."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(64, 64)
        self.text = nn.Linear(TEXT_WIDTH, 64)
        self.calls = 0

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        self.calls += 1
        text = self.text(encoder_hidden_states.mean(1, keepdim=True))
        if hidden_states.dim() == 4:  # latents that a custom stage did not pack
            return hidden_states * 0.5 + text.mean() + timestep[:, None, None, None] / 1000
        return self.image(hidden_states) + text + timestep[:, None, None] / 1000


class StubVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.ConvTranspose2d(16, 3, 8, 8)
        self.inward = nn.Conv2d(3, 16, 8, 8)

    def decode(self, latents, return_dict=True):
        return (self.out(latents).tanh(),)

    def encode(self, pixels):
        latents = self.inward(pixels)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))


def stub_modules() -> dict[str, object]:
    """The five components that the seed's pipelines require, the same on every call."""
    torch.manual_seed(0)
    return {
        "text_encoder": StubTextEncoder().requires_grad_(False),
        "tokenizer": StubTokenizer(),
        "transformer": StubTransformer().requires_grad_(False),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": StubVAE().requires_grad_(False),
    }


def stub_request() -> Req:
    """An admitted request for one small picture."""
    return Req(
        request=ImageSamplingParams(),
        request_id="r",
        prompt=["a"],
        negative_prompt=None,
        seeds=[1],
        height=16,
        width=16,
        num_inference_steps=1,
        guidance_scale=1.0,
        true_cfg_scale=1.0,
        do_classifier_free_guidance=False,
    )
