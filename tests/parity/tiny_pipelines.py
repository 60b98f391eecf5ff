"""Tiny pipelines of Diffusers that have no native family here, saved as folders."""

from __future__ import annotations

from pathlib import Path

from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from transformers import CLIPTokenizer, T5TokenizerFast

from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

from parity.tiny_checkpoints import CLIP_WIDTH, T5_WIDTH, TinyFlux
from parity.tiny_tokenizers import write_clip_tokenizer, write_t5_tokenizer


def write_unet(folder: Path, *, img2img: bool = False, ancestral: bool = False) -> None:
    """Stable Diffusion in miniature: CLIP, a U-Net, a scheduler that keeps state."""
    size = write_clip_tokenizer(folder / "tokenizer")
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=CLIP_WIDTH,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    fill_with_noise(unet, 1, {"conv_out": 2.0})
    scheduler = (
        EulerAncestralDiscreteScheduler(steps_offset=1)
        if ancestral
        else PNDMScheduler(skip_prk_steps=True, steps_offset=1)
    )
    cls = StableDiffusionImg2ImgPipeline if img2img else StableDiffusionPipeline
    pipeline = cls(
        vae=_vae(),
        text_encoder=TinyFlux("any")._clip(size),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)


def write_dit(folder: Path) -> None:
    """PixArt-alpha in miniature: T5, a transformer, a multistep scheduler."""
    size = write_t5_tokenizer(folder / "tokenizer")
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=T5_WIDTH,
        cross_attention_dim=24,
        in_channels=4,
        out_channels=8,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    fill_with_noise(transformer, 2)
    pipeline = PixArtAlphaPipeline(
        tokenizer=T5TokenizerFast.from_pretrained(folder / "tokenizer"),
        text_encoder=TinyFlux("any")._t5(size),
        vae=_vae(),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(folder)


def write_unconditional(folder: Path) -> None:
    """A denoiser without any text."""
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    fill_with_noise(unet, 3)
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(folder)


def _vae() -> AutoencoderKL:
    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    fill_with_noise(model, 4)
    return model
