"""The checkpoint's scheduler runs as the checkpoint says, or one that may stand for it."""

from __future__ import annotations

import warnings

import diffusers
import numpy as np
import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

SMALL = {"prompt": "a red fox", "height": 16, "width": 24, "num_inference_steps": 3}


def direct(folder, scheduler=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
        if scheduler is not None:
            cls = getattr(diffusers, scheduler)
            pipeline.scheduler = cls.from_config(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        (image,) = pipeline(generator=torch.Generator().manual_seed(7), **SMALL).images
    return np.asarray(image)


def ours(folder, **arguments):
    generator = DiffGenerator.from_pretrained(str(folder), device="cpu", **arguments)
    try:
        scheduler = generator.pipeline.get_module("pipeline").scheduler
        return generator.generate(seed=7, **SMALL)[0].array, type(scheduler).__name__
    finally:
        generator.close()


def test_each_checkpoint_runs_on_its_own_scheduler(tiny):
    pictures = []
    for name, scheduler in (
        ("unet", "PNDMScheduler"),
        ("unet-ancestral", "EulerAncestralDiscreteScheduler"),
    ):
        made, used = ours(tiny(name))
        assert used == scheduler
        assert (made == direct(tiny(name))).all()
        pictures.append(made)
    assert (pictures[0] != pictures[1]).any(), "the weights are the same, the schedulers are not"


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DDIMScheduler"])
def test_another_takes_its_place_with_the_checkpoints_settings(tiny, name):
    made, used = ours(tiny("unet"), pipeline_config={"scheduler": name})
    assert used == name
    assert (made == direct(tiny("unet"), name)).all()
    assert (made != direct(tiny("unet"))).any()


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        ("unet", "EulerDiscretScheduler", "PNDMScheduler.* Did you mean 'EulerDiscreteScheduler'"),
        ("unet", "FlowMatchEulerDiscreteScheduler", "cannot stand for the checkpoint's PNDM"),
        ("unet", "UNet2DModel", "These can: .*DDIMScheduler"),
        ("unet", 3, "must be of type str"),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused_before_loading(tiny, folder, name, message):
    with pytest.raises(InvalidArgument, match=message):
        DiffGenerator.from_pretrained(
            str(tiny(folder)), device="cpu", pipeline_config={"scheduler": name}
        )
