"""The model that ships inside, with all its weights streamed."""

from __future__ import annotations

import numpy as np

from sglang.multimodal_gen import DiffGenerator


def test_the_demos_picture_is_the_same_to_the_bit():
    def picture(**flags):
        with DiffGenerator.from_pretrained("demo", device="cpu", **flags) as generator:
            made = generator.generate(prompt="a red circle", seed=1, num_inference_steps=2)
            return made[0].array, generator.pipeline.residency.components

    want, _ = picture()
    streamed, parts = picture(layerwise_offload_components=["all"])
    assert np.array_equal(streamed, want)
    assert all(part.stream_counters.bytes > 0 for part in parts.values())
    assert parts["transformer"].stream_counters.misses == 0
    whole, parts = picture(cpu_offload_components=["all"])
    assert np.array_equal(whole, want)
    assert all(part.counters.uses == 1 for part in parts.values())
