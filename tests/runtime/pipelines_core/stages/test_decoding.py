"""Decoding on the ranks of a replica: the first has the pictures, and nobody is left waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import (
    require_finite,
    tell_failure,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InternalError, NonFiniteOutput, OutOfMemory
from thread_ranks import run_threads

from parity.tiny_checkpoints import flux_for_ranks

REQUEST = {"prompt": ["a dog", "two cats"], "seed": 3, "height": 80, "width": 48,
           "num_inference_steps": 2, "max_sequence_length": 16}  # fmt: skip


def build(folder, parallel=None, **flags):
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32", **flags)
    model = ModelDescription.find(args)
    return model, model.open_pipeline(parallel=parallel)


def run(model, pipeline):
    (batch,) = model.admit(model.sampling_params(REQUEST))
    return pipeline.forward(batch, pipeline.server_args)


def _on_ranks(
    rank: int, ranks: int, folder: str, cases: tuple[tuple[str, str], ...]
) -> list[dict[str, Any]]:
    """Each case in turn, a way to decode and a fault, in the same processes."""
    # The branches of guidance leave the latents' bits as they are; a ring does not.
    layout = ParallelLayout(cfg=2) if ranks == 2 else ParallelLayout(ring=ranks)
    parallel = ParallelState.create(layout, "cpu")
    return [_case(parallel, folder, mode, fault) for mode, fault in cases]


def _case(parallel: ParallelState, folder: str, mode: str, fault: str) -> dict[str, Any]:
    flags = {"vae_mode": mode} | ({"vae_tile_size": 32} if mode == "tiled" else {})
    model, pipeline = build(folder, parallel, **flags)
    vae = pipeline.get_module("vae")
    calls: list[int] = []
    vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    if fault == "nan" and parallel.rank == parallel.replica.size - 1:
        vae.decoder.conv_out.bias[0] = float("nan")
    if fault == "memory" and parallel.rank == 0:

        def too_large(*_: Any) -> None:
            raise OutOfMemory("too large")

        vae.decoder.register_forward_pre_hook(too_large)
    parallel.replica.traffic.clear()
    try:
        result = run(model, pipeline)
    except (NonFiniteOutput, InternalError, OutOfMemory) as error:
        return {"error": type(error).__name__}
    return {
        "output": result.output.numpy(),
        "calls": len(calls),
        "exchanges": parallel.replica.traffic["exchange"],
        "mode": pipeline.get_stage("decoding_stage").work.mode,
        "warnings": result.warnings,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    flux_for_ranks().write(path)
    return path


@pytest.fixture(scope="module")
def by_three(tmp_path_factory):
    """CLIP as narrow as three heads of eight; all heads divide by three."""
    path = tmp_path_factory.mktemp("three") / "model"
    clip = {"num_attention_heads": 3, "hidden_size": 24, "projection_dim": 24}
    transformer = {"num_attention_heads": 3, "pooled_projection_dim": 24}
    flux_for_ranks("three", transformer=transformer, clip=clip, t5={"num_heads": 3}).write(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "modes"), [(2, ("auto", "plain", "tiled")), (3, ("auto",))])
def test_a_pipeline_on_ranks_makes_the_pictures_of_one(folder, by_three, ranks, modes):
    folder = folder if ranks == 2 else by_three
    cases = tuple((mode, "none") for mode in modes)
    for mode, results in zip(
        modes,
        zip(*run_ranks(ranks, _on_ranks, ranks, str(folder), cases), strict=True),
        strict=True,
    ):
        first, *others = results
        flags = {"vae_mode": "tiled", "vae_tile_size": 32} if mode == "tiled" else {}
        expected = run(*build(folder, **flags)).output
        found = torch.from_numpy(first["output"])
        assert found.shape == expected.shape == (2, 3, 80, 48)
        # Bands of rows are summed in another order; else the same bits.
        exact = ranks == 2 and mode != "auto"
        assert (found - expected).abs().max() <= (0 if exact else 1e-4)
        assert first["mode"] == {"auto": "spatial_shard"}.get(mode, mode)
        assert not [said for said in first["warnings"] if "decoded" in said]
        assert all(len(other["output"]) == 0 for other in others)
        tiles = 3 * 2
        decodes = {"plain": [2, 0], "tiled": [tiles, tiles]}.get(mode, [2] * ranks)
        assert [result["calls"] for result in results] == decodes
        assert (first["exchanges"] > 0) == (mode != "plain")


@pytest.mark.slow
def test_a_fault_on_one_rank_is_an_error_on_all(folder):
    cases = (("spatial_shard", "nan"), ("tiled", "nan"), ("plain", "memory"), ("auto", "none"))
    first, second = run_ranks(2, _on_ranks, 2, str(folder), cases)
    assert [result.get("error") for result in first[:3]] == ["NonFiniteOutput"] * 2 + [
        "OutOfMemory"
    ]
    assert [result.get("error") for result in second[:3]] == ["NonFiniteOutput"] * 2 + [
        "FollowsFailure"
    ]
    assert len(first[3]["output"]) == 2, "and the next request is served"


def test_too_few_rows_are_said(folder):
    model, pipeline = build(folder)
    stage = pipeline.get_stage("decoding_stage")
    stage.work.mode = "spatial_shard"
    (batch, *_) = model.admit(model.sampling_params(REQUEST))
    result = pipeline.forward(batch, pipeline.server_args)
    assert result.warnings == ["10 rows of latents are too few for 1 ranks: one decoded them"]


def test_a_picture_too_large_for_the_memory_says_what_needs_less(folder):
    model, pipeline = build(folder)
    vae = pipeline.get_module("vae")

    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    vae.decoder.register_forward_pre_hook(too_large)
    with pytest.raises(OutOfMemory, match=r"latents of \(10, 6\) did not fit.*--vae-mode tiled"):
        run(model, pipeline)


def test_not_finite_on_one_rank_is_not_finite_on_all():
    values = [torch.ones(2), torch.tensor([1.0, float("inf")]), torch.empty(0)]

    def rank(group):
        with pytest.raises(NonFiniteOutput, match="it holds NaN or infinity"):
            require_finite(values[group.rank], "it", group)
        require_finite(torch.ones(1), "it", group)

    run_threads(3, rank)


def test_a_rank_that_failed_ends_the_others_wait():
    def rank(group):
        if group.rank == 1:
            tell_failure(group)
            return
        with pytest.raises(InternalError, match="another rank failed before the picture"):
            require_finite(torch.ones(1), "the picture", group)

    run_threads(3, rank)
