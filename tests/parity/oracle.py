"""The reference: a Diffusers pipeline on the same folder, watched while it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sglang.multimodal_gen.runtime.verify.recorder import (
    recorded_calls,
    recorded_decodes,
    recorded_steps,
)

from parity.family import Family, Request, from_folder
from parity.trace import Trace, steps_of

OTHER_NAMES = {"num_outputs_per_prompt": "num_images_per_prompt"}


def run_oracle(folder: Path, family: Family, request: Request) -> Trace:
    """Run the family's reference on `request` in fp32 on the CPU; one generator for each image."""
    return trace_of(load_oracle(folder, family.reference, family.load), family, request)


@lru_cache(maxsize=8)
def load_oracle(
    folder: Path, reference: str, load: Callable[[str, Path], Any] = from_folder
) -> Any:
    """The Diffusers pipeline of class `reference`, shared by the cases that use the folder."""
    pipeline = load(reference, folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def trace_of(pipeline: Any, family: Family, request: Request) -> Trace:
    """Run `pipeline` on `request` and keep what :class:`Trace` holds."""
    seeds = seeds_of(request)
    denoisers = [getattr(pipeline, name) for name in family.denoisers]
    arguments = family.arguments(pipeline, _arguments(request))
    with (
        recorded_steps(type(pipeline.scheduler)) as made,
        recorded_calls(denoisers, family.inputs) as calls,
        recorded_decodes(getattr(pipeline, family.decoder)) as decodes,
    ):
        result = pipeline(
            **arguments,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pt",
        )
    count = len(made)  # the last ones, where a clip is given in place of noise
    timesteps = pipeline.scheduler.timesteps[-count:].clone()
    steps = steps_of(calls, count, len(seeds), family.latents_of, family.target_last)
    pixels = result.frames.movedim(2, 1) if family.clips else result.images
    return Trace(
        noise=steps[0].latents,
        timesteps=timesteps,
        sigmas=pipeline.scheduler.sigmas[-1 - count : -1].clone(),
        steps=steps,
        final_latents=torch.cat([decode.latents for decode in decodes]),
        pixels=pixels,
        images=(pixels * 255).round().to(torch.uint8).movedim(1, -1),
    )


def prompts_of(request: Request) -> list[str]:
    """The prompts as a list."""
    prompt = request["prompt"]
    return [prompt] if isinstance(prompt, str) else list(prompt)


def seeds_of(request: Request) -> list[int]:
    """One seed for each image, prompt by prompt: `seed` counted upwards over all of them."""
    count = len(prompts_of(request)) * request.get("num_outputs_per_prompt", 1)
    return [request["seed"] + index for index in range(count)]


def _arguments(request: Request) -> dict[str, Any]:
    arguments = {OTHER_NAMES.get(name, name): value for name, value in request.items()}
    del arguments["seed"]
    negative = arguments.get("negative_prompt")
    if isinstance(negative, str) and not isinstance(request["prompt"], str):
        # The reference wants one for each prompt; this runtime repeats it.
        arguments["negative_prompt"] = [negative] * len(prompts_of(request))
    return arguments
