"""Whole pipelines whose sequence or guidance is spread over ranks: the latents of one rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranks import run_ranks
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import IDLE_BRANCH
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

from parity.tiny_checkpoints import flux_dev, flux_for_ranks
from seed_samples.my_model import MyModelPipelineConfig
from seed_samples.stubs import StubTransformer, StubVAE

STEPS = 2
LIMIT = 1e-5
PLAIN: dict[str, Any] = {
    "prompt": "a red fox",
    "seed": 5,
    "height": 48,
    "width": 80,  # 15 image tokens
    "max_sequence_length": 7,
    "num_inference_steps": STEPS,
}
GUIDED = {**PLAIN, "negative_prompt": "blue", "true_cfg_scale": 3.0}
EVEN = {**PLAIN, "height": 64, "width": 64, "max_sequence_length": 16, "num_outputs_per_prompt": 2}
DEMO = {
    "prompt": "a small red circle above a large blue square",
    "seed": 3,
    "height": 96,
    "width": 80,  # 30 image tokens
    "num_inference_steps": STEPS,
    "max_sequence_length": 31,
}
"""The checkpoint's own defaults turn guidance on."""
DEMO_PLAIN = {**DEMO, "true_cfg_scale": 1.0}


CACHED = {**PLAIN, "num_inference_steps": 6, "step_cache": "first-block",
          "step_cache_threshold": 0.75}  # fmt: skip
CACHED_GUIDED = {**CACHED, "negative_prompt": "blue", "true_cfg_scale": 3.0,
                 "num_outputs_per_prompt": 2}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Of one request on one rank."""

    latents: np.ndarray
    calls: int
    traffic: dict[str, dict[str, int]]
    warnings: list[str]
    step_cache: StepCacheUse | None = None


def describe(model: str) -> ModelDescription:
    return ModelDescription.find(
        ServerArgs.from_flat(model_path=model, device="cpu", precision="fp32")
    )


@torch.inference_mode()
def run(pipeline: Any, description: ModelDescription, request: dict[str, Any]) -> Result:
    """The final latents, by the stages before decoding."""
    (batch,) = description.admit(description.sampling_params(request).seal())
    parallel, calls = pipeline.parallel, []
    groups = {name: getattr(parallel, name) for name in ("cfg", "sp", "ulysses", "ring")}
    before = {name: group.traffic.copy() for name, group in groups.items()}
    transformer = pipeline.get_module("transformer")
    hook = transformer.register_forward_pre_hook(lambda *_: calls.append(None))
    for name, stage in pipeline.stages.items():
        if name != "decoding_stage":
            batch = stage(batch, pipeline.server_args)
    hook.remove()
    traffic = {name: dict(group.traffic - before[name]) for name, group in groups.items()}
    latents = batch.latents.float().numpy()
    return Result(latents, len(calls), traffic, batch.warnings, batch.step_cache)


def _on_rank(
    _rank: int, work: list[tuple[str, ParallelLayout, list[dict[str, Any]]]]
) -> list[list[Result]]:
    results = []
    for model, layout, requests in work:
        description = describe(model)
        pipeline = description.open_pipeline(parallel=ParallelState.create(layout, "cpu"))
        results.append([run(pipeline, description, request) for request in requests])
    return results


def compared(
    world_size: int, work: list[tuple[str, ParallelLayout, list[dict[str, Any]]]]
) -> list[list[list[Result]]]:
    """Results by rank, after all were found equal bit by bit, and equal to one rank's."""
    ranks = run_ranks(world_size, _on_rank, work)
    for number, (model, layout, requests) in enumerate(work):
        description = describe(model)
        alone = description.open_pipeline()
        for index, request in enumerate(requests):
            single = run(alone, description, request)
            expected = single.latents
            found = [rank[number][index].latents for rank in ranks]
            for rank in ranks:
                assert rank[number][index].step_cache == single.step_cache
            off = np.linalg.norm(found[0] - expected) / np.linalg.norm(expected)
            assert off < LIMIT, f"{model}, {layout}, {request}: {off:.1e}"
            for other in found:
                assert np.array_equal(other, found[0]), f"{layout}: ranks end with other latents"
    return ranks


@pytest.fixture(scope="session")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "four-heads"
    flux_for_ranks().write(path)
    return str(path)


@pytest.mark.slow
def test_two_ranks(four_heads: str) -> None:
    ulysses, ring, cfg = (ParallelLayout(**{d: 2}) for d in ("ulysses", "ring", "cfg"))
    ranks = compared(
        2,
        [
            (four_heads, ulysses, [PLAIN, GUIDED, EVEN]),
            (four_heads, ring, [PLAIN, GUIDED]),
            (four_heads, cfg, [PLAIN, GUIDED, EVEN]),
            ("demo", ring, [DEMO]),
            ("demo", cfg, [DEMO, DEMO_PLAIN]),
        ],
    )
    blocks, demo_blocks = 4, 8
    for rank, ((plain, guided, _), (ringed, _), branches, (demo,), demo_branches) in enumerate(
        ranks
    ):
        assert (plain.calls, guided.calls) == (STEPS, 2 * STEPS)
        assert plain.traffic["ulysses"] == {"all_to_all": 2 * blocks * STEPS}
        assert guided.traffic["ulysses"] == {"all_to_all": 2 * blocks * 2 * STEPS}
        assert ringed.traffic["ring"] == {"exchange": blocks * STEPS}
        assert demo.traffic["ring"] == {"exchange": demo_blocks * 2 * STEPS}
        for off, on in (branches[:2], reversed(demo_branches)):
            # One branch a rank; without guidance the second rank computes nothing.
            assert on.calls == STEPS
            assert on.traffic["cfg"] == {"all_gather": STEPS}
            assert on.warnings == []
            assert off.calls == (STEPS if rank == 0 else 0)
            assert off.warnings == [IDLE_BRANCH]
        # The dtype is told once.
        assert branches[0].traffic["cfg"] == {"broadcast": STEPS + 1}
        assert branches[2].traffic["cfg"] == {"broadcast": STEPS}


@pytest.mark.slow
def test_two_ranks_skip_the_same_steps_as_one(four_heads: str) -> None:
    """Tokens do not divide, so there is padding; each branch of guidance has a rank of its own."""
    ulysses, cfg, tp = (ParallelLayout(**{d: 2}) for d in ("ulysses", "cfg", "tp"))
    requests = [CACHED, CACHED_GUIDED]
    layouts = [(four_heads, layout, requests) for layout in (ulysses, cfg, tp)]
    ranks = compared(2, layouts)
    for first, *_ in ranks:
        for result in first:
            assert result.step_cache is not None
            assert result.step_cache.left_out > 0
            assert result.step_cache.computed > len(result.step_cache.reused)
        # Two messages for each block that ran: the first of the four always does.
        plain = first[0].step_cache
        assert plain is not None
        ran = plain.forwards + 3 * plain.computed
        assert first[0].traffic["ulysses"] == {"all_to_all": 2 * ran}


@pytest.mark.slow
def test_four_ranks(four_heads: str) -> None:
    ranks = compared(
        4,
        [
            (four_heads, ParallelLayout(ulysses=4), [PLAIN]),
            (four_heads, ParallelLayout(ulysses=2, ring=2), [PLAIN, GUIDED]),
            (four_heads, ParallelLayout(cfg=2, ulysses=2), [PLAIN, GUIDED]),
            ("demo", ParallelLayout(cfg=2, ring=2), [DEMO, DEMO_PLAIN]),
        ],
    )
    for rank, (_, (usp, _), (off, on), (demo, demo_off)) in enumerate(ranks):
        assert usp.traffic["ulysses"] == {"all_to_all": 8 * STEPS}
        assert usp.traffic["ring"] == {"exchange": 4 * STEPS}
        assert on.calls == demo.calls == STEPS
        assert on.traffic["cfg"] == {"all_gather": STEPS}
        assert on.traffic["sp"] == {"all_gather": STEPS}
        first = rank < 2
        assert off.calls == demo_off.calls == (STEPS if first else 0)
        assert off.traffic["ulysses"] == ({"all_to_all": 8 * STEPS} if first else {})


def test_the_requests_differ(four_heads: str) -> None:
    for model, plain, guided in ((four_heads, PLAIN, GUIDED), ("demo", DEMO_PLAIN, DEMO)):
        description = describe(model)
        pipeline = description.open_pipeline()
        latents = [
            run(pipeline, description, request).latents
            for request in (plain, guided, {**plain, "prompt": "two blue birds"})
        ]
        for other in latents[1:]:
            moved = np.linalg.norm(other - latents[0]) / np.linalg.norm(latents[0])
            assert moved > 100 * LIMIT


def test_heads_that_do_not_divide_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    bare = tmp_path / "without-weights"
    flux_dev().write(bare)
    (bare / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    two = Group("ulysses", 0, (0, 1))
    parallel = dataclasses.replace(ParallelState.single(), sp=two, ulysses=two)
    with pytest.raises(InvalidArgument, match=r"ulysses_degree=2: transformer \(Flux.*has 3 att"):
        describe(str(bare)).open_pipeline(parallel=parallel)


def test_a_pipeline_without_a_denoiser_that_can_be_split_is_refused() -> None:
    two = Group("sp", 0, (0, 1))
    parallel = dataclasses.replace(ParallelState.single(), sp=two, ring=two)
    args = ServerArgs.from_flat(device="cpu", pipeline_config=MyModelPipelineConfig())
    modules = {"transformer": StubTransformer(), "vae": StubVAE()}
    with pytest.raises(InvalidArgument, match=r"transformer \(StubTransformer\) has no SP_PLAN"):
        Stub("", args, loaded_modules=modules, parallel=parallel)
    with pytest.raises(
        InvalidArgument, match=r"no component of this pipeline \(vae\) is a denoiser"
    ):
        Stub("", args, loaded_modules={"vae": StubVAE()}, parallel=parallel)
    built = Stub("", args, loaded_modules={"vae": StubVAE()})
    assert not built.stages


class Stub(ComposedPipelineBase):
    pipeline_name = "Stub"

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """None."""
