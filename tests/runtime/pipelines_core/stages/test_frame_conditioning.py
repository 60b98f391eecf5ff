"""Given images and clips on their way to the denoiser, each stage by itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from PIL import Image
from torch import nn

from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    FrameVAEEncodingStage,
    ImageEncodingStage,
    StrengthStage,
    TimestepPreparationStage,
    VideoVAEEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.experts import Experts
from sglang.multimodal_gen.runtime.pipelines_core.stages.strength import steps_of
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, NonFiniteOutput
from sglang.multimodal_gen.runtime.utils.video_file import encode_video

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


class EchoVAE(nn.Module):
    """Latents are the pixels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def encode(self, x):
        moments = torch.cat([x, torch.full_like(x, -30.0)], dim=1)
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments))


class Config:
    frame_multiple = 4

    def __init__(self, *, alone=False):
        self.encodes_images_alone = alone

    def get_decode_scale_and_shift(self, device, dtype, vae):
        return 2.0, 0.5

    def prepare_sigmas(self, sigmas, steps):
        return None

    def prepare_extra_set_timesteps_kwargs(self, batch, config):
        return {}


def args(**config):
    return SimpleNamespace(pipeline_config=Config(**config))


def plain(level):
    return Image.new("RGB", (20, 10), (level,) * 3)


def batch(**values):
    given = {"width": 8, "height": 6, "num_frames": 9, "batch_size": 2, "video_path": [],
             "condition_image": [], "warnings": [], "request": SimpleNamespace()}  # fmt: skip
    return SimpleNamespace(**{**given, **values})


def test_first_and_last_frame_stand_in_a_clip_of_grey():
    b = batch(condition_image=[plain(255), plain(0)])
    latents = FrameVAEEncodingStage(EchoVAE()).forward(b, args()).image_latent
    assert latents.shape == (2, 3, 9, 6, 8)
    levels = (latents / 2 + 0.5)[0, 0, :, 0, 0].tolist()
    assert levels == [1.0, *[0.0] * 7, -1.0]


def test_an_image_alone_is_one_frame_and_none_is_none():
    stage = FrameVAEEncodingStage(EchoVAE())
    assert stage.forward(
        batch(condition_image=[plain(9)]), args(alone=True)
    ).image_latent.shape == ((2, 3, 1, 6, 8))
    assert stage.forward(batch(), args()).image_latent is None


@pytest.fixture
def clip(tmp_path):
    frames = np.repeat(np.arange(0, 220, 20, dtype=np.uint8), 16 * 16 * 3)
    path = tmp_path / "clip.mp4"
    path.write_bytes(encode_video(frames.reshape(11, 16, 16, 3), 8))
    return str(path)


@pytest.mark.parametrize(("asked", "made"), [(5, 5), (9, 9), (13, 9)])
def test_of_a_clip_the_first_frames_are_taken_as_many_as_can_be_made(clip, asked, made):
    b = VideoVAEEncodingStage(EchoVAE()).forward(batch(video_path=[clip], num_frames=asked), args())
    assert b.video_latent.shape == (2, 3, made, 6, 8)
    brightness = b.video_latent.mean(dim=(0, 1, 3, 4))
    assert (brightness.diff() > 0).all(), "frames in another order"
    assert (b.num_frames, bool(b.warnings)) == (made, asked > 11)


def test_two_clips_are_refused(clip):
    with pytest.raises(InvalidRequest, match="2 clips"):
        VideoVAEEncodingStage(EchoVAE()).forward(batch(video_path=[clip, clip]), args())


class Seer(nn.Module):
    def __init__(self, bad=False):
        super().__init__()
        self.weight, self.bad = nn.Parameter(torch.ones(1)), bad

    def forward(self, pixel_values, output_hidden_states):
        layers = [pixel_values.flatten(1)[:, None] + k for k in range(3)]
        return SimpleNamespace(hidden_states=[k * float("nan") if self.bad else k for k in layers])


def processor(images, return_tensors):
    pixels = [torch.tensor(np.asarray(image.resize((2, 2)))) for image in images]
    return SimpleNamespace(pixel_values=torch.stack(pixels).float())


def test_an_encoder_sees_every_image_and_its_last_layer_is_left_out():
    b = batch(condition_image=[plain(7), plain(30).convert("L")])
    embeds = ImageEncodingStage(Seer(), processor).forward(b, args()).image_embeds
    assert embeds.shape == (2, 1, 12)
    assert embeds.mean(dim=(1, 2)).tolist() == [8, 31]
    assert ImageEncodingStage(Seer(), processor).forward(batch(), args()).image_embeds is None
    with pytest.raises(NonFiniteOutput, match="Seer's view"):
        ImageEncodingStage(Seer(bad=True), processor).forward(b, args())


def scheduled(scheduler, steps=4, **request):
    b = batch(latents=torch.randn(2, 3), num_inference_steps=steps,
              request=SimpleNamespace(**request))  # fmt: skip
    return TimestepPreparationStage(scheduler).forward(b, args())


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        (UniPCMultistepScheduler(**FLOW, flow_shift=3.0), "flow_shift"),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), "shift"),
    ],
)
def test_a_request_shifts_its_own_schedule(scheduler, name):
    own = scheduled(scheduler)
    shifted = scheduled(scheduler, flow_shift=7.0)
    fresh = type(scheduler).from_config(scheduler.config, **{name: 7.0})
    fresh.set_timesteps(4)
    assert torch.equal(shifted.timesteps, fresh.timesteps)
    assert not torch.equal(shifted.timesteps, own.timesteps)
    assert scheduler.config[name] == 3.0


def test_a_shift_that_a_scheduler_does_not_have_is_refused():
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    with pytest.raises(InvalidRequest, match="computes its shift itself"):
        scheduled(dynamic, flow_shift=2.0)


@pytest.mark.parametrize(("strength", "left"), [(1.0, 4), (0.8, 3), (0.5, 2), (0.25, 1)])
def test_strength_says_how_far_back_the_schedule_goes(strength, left):
    b = scheduled(UniPCMultistepScheduler(**FLOW), strength=strength)
    whole, noise = b.timesteps, b.latents
    b.video_latent = torch.randn(2, 3)
    StrengthStage().forward(b, args())
    assert steps_of(4, strength) == b.num_inference_steps == len(b.sigmas) == left
    assert torch.equal(b.timesteps, whole[-left:])
    sigma = b.scheduler.sigmas[4 - left]
    assert torch.allclose(b.latents, (1 - sigma) * b.video_latent + sigma * noise)
    assert b.scheduler.begin_index == 4 - left


def test_without_a_clip_strength_changes_nothing():
    b = scheduled(UniPCMultistepScheduler(**FLOW), strength=0.5)
    b.video_latent, noise = None, b.latents
    StrengthStage().forward(b, args())
    assert (len(b.timesteps), b.latents is noise) == (4, True)


def experts_of(boundary, low=True, **request):
    b = SimpleNamespace(
        request=SimpleNamespace(**request),
        true_cfg_scale=4.0,
        timesteps=torch.tensor([999, 875, 874, 100]),
        scheduler=SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000)),
    )
    experts = Experts(nn.Identity(), nn.Identity() if low else None)
    chosen = experts.of_steps(b, SimpleNamespace(boundary_ratio=boundary))
    return [(expert.name[-2:], expert.scale) for expert in chosen]


def test_the_boundary_itself_is_the_first_experts():
    high, low = ("er", 4.0), ("_2", 3.0)
    assert experts_of(0.875, guidance_scale_2=3.0) == [high, high, low, low]
    assert experts_of(0.875) == [high, high, ("_2", 4.0), ("_2", 4.0)]
    assert experts_of(0.875, boundary_ratio=0.0, guidance_scale_2=3.0) == [high] * 4
    assert experts_of(None) == experts_of(0.875, low=False) == [high] * 4
