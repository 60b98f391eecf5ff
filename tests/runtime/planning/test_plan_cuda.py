"""FLUX.1-dev's size with random weights on a GPU: what a request takes is what was planned.

Peaks are torch's (``max_memory_allocated``), by phase: before the loop, in it, decoding.
"""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from full_size_flux import write_flux_dev
from sglang.multimodal_gen.runtime.entrypoints.bench.sides import describe, our_side
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.planning.estimate import estimate
from sglang.multimodal_gen.runtime.planning.gpus import GPUS
from sglang.multimodal_gen.runtime.server_args import ServerArgs

GIB = 1 << 30
VALUES = {"prompt": "a", "height": 1024, "width": 1024, "num_inference_steps": 2, "seed": 0}
PHASES = {
    "before": ("text_encoding_stage", "latent_preparation_stage", "timestep_preparation_stage"),
    "loop": ("denoising_stage",),
    "decoding": ("decoding_stage",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_flux_dev(tmp_path_factory.mktemp("flux"))


def this_gpu():
    name = torch.cuda.get_device_name().lower()
    found = next((gpu for key, gpu in GPUS.items() if key.split("-")[0] in name), None)
    if found is None or found.gib < 40:
        pytest.skip(f"{name} is not in the table, or too small for the resident model")
    return found


def measured(args):
    """Peak bytes of each phase, of a request after one that warmed up."""
    side = our_side(describe(args), VALUES, random_weights=True)
    side.run()
    peaks: dict[str, int] = {}

    def listen(event):
        ended = {("denoise", 0): "before", ("denoise", event.total): "loop",
                 ("decode", event.total): "decoding"}.get((event.phase, event.done))  # fmt: skip
        if ended is not None:
            peaks[ended] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    (batch,) = side.model.admit(side.model.sampling_params(VALUES), RequestControl(listen))
    side.pipeline.forward(batch, side.pipeline.server_args)
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_a_request_takes_what_was_planned(folder, streamed):
    flags = {"layerwise_offload_components": ["all"]} if streamed else {}
    # A recording's activations live in a pool that torch does not count as allocated.
    args = ServerArgs.from_flat(
        model_path=str(folder), device="cuda", enable_cuda_graph=False, **flags
    )
    made = estimate(args, VALUES, this_gpu())
    stages = {stage.name: stage for stage in made.stages}
    peaks = measured(args)
    gc.collect()
    told = {}
    for phase, names in PHASES.items():
        told[phase] = (max(stages[name].bytes for name in names) / GIB, peaks[phase] / GIB)
    for phase, (planned, seen) in told.items():
        assert planned == pytest.approx(seen, rel=0.1), f"{phase}: {told}"
    if not streamed:  # 31 GiB of weights would hide any error
        weights = stages["decoding_stage"].weight_bytes
        activations = peaks["decoding"] - weights
        assert stages["decoding_stage"].activation_bytes == pytest.approx(activations, rel=0.1)
