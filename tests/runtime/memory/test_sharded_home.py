"""Denoisers sharded over ranks: the same prediction, half of the bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.loader.residency import check_sharding
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.memory.plan import ComponentFacts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError

from parity.tiny_adapters import diffusers_adapter
from parity.tiny_checkpoints import flux_for_ranks

REQUEST = {"prompt": "a fox", "seed": 3, "num_inference_steps": 3, "height": 64, "width": 96,
           "max_sequence_length": 32, "negative_prompt": "fog", "true_cfg_scale": 2.0}  # fmt: skip


def build(folder: Path, parallel: ParallelState | None, **flags: Any) -> tuple[Any, Any]:
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32", **flags)
    model = ModelDescription.find(args)
    return model, model.open_pipeline(parallel=parallel)


def picture(model: Any, pipeline: Any, **changes: Any) -> Tensor:
    (batch,) = model.admit(model.sampling_params(REQUEST | changes))
    return pipeline.forward(batch, pipeline.server_args).output


def sharded(rank: int, folder: Path, adapter: Path) -> dict[str, Any]:
    parallel = ParallelState.create(ParallelLayout(ulysses=2), "cpu")
    model, pipeline = build(folder, parallel, use_fsdp_inference=True)
    transformer = pipeline.get_module("transformer")

    def held() -> int:
        return sum(
            p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes
            for p in transformer.parameters()
        )

    gathered = []
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.register_forward_pre_hook(
            lambda module, _: gathered.append(sum(p.nbytes for p in module.parameters()))
        )
    report: dict[str, Any] = {"held": held(), "kind": type(transformer).__name__}
    report["pictures"] = [picture(model, pipeline) for _ in range(2)]
    report["gathered"] = gathered[: len(gathered) // 2]
    report["held after"] = held()
    pipeline.set_lora("style", str(adapter), merge_mode="auto")
    report["with adapter"] = picture(model, pipeline)
    report["status"] = pipeline.get_lora_status()["active"]["transformer"][0]["merged"]
    try:
        pipeline.set_lora("style", merge_mode="merge")
    except UserError as error:
        report["refused"] = str(error)
    pipeline.unset_lora()
    report["base again"] = picture(model, pipeline)
    report["note"] = pipeline.plan.sharded
    return report


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.slow
def test_two_ranks_hold_half_each_and_predict_what_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    flux_for_ranks().write(folder)
    model, pipeline = build(folder, None)
    transformer = pipeline.get_module("transformer")
    whole = sum(p.nbytes for p in transformer.parameters())
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    adapter = diffusers_adapter(transformer, 5).save(tmp_path / "adapter.safetensors")
    want = picture(model, pipeline)
    assert relative(picture(model, pipeline, seed=4), want) > 0.05, "the seed must matter"
    pipeline.set_lora("style", str(adapter), merge_mode="dynamic")
    adapted = picture(model, pipeline)
    assert relative(adapted, want) > 0.01, "the adapter must matter"

    reports = run_ranks(2, sharded, folder, adapter, timeout=180)
    assert sum(report["held"] for report in reports) == whole
    for report in reports:
        assert 0.45 * whole < report["held"] < 0.55 * whole
        assert report["held after"] == report["held"], "resharded after each forward"
        assert report["gathered"] == sizes * 6, "each block is whole while it runs, and only then"
        assert report["kind"].startswith("FSDP")
        assert report["note"] == {"transformer"}
        assert report["status"] is False, "'auto' runs live where weights are sharded"
        assert "use merge_mode 'dynamic'" in report["refused"]
    lead = reports[0]  # the picture is on it alone
    for made in (*lead["pictures"], lead["base again"]):
        assert relative(made, want) <= 1e-5
    assert relative(lead["with adapter"], adapted) <= 1e-5


ARGS = MemoryArgs(use_fsdp_inference=True)
DIT = ComponentFacts("transformer", "dit", 100, (10, 10), streams=True)


def ranks(**sizes: int) -> ParallelState:
    groups = {name: Group(name, 0, tuple(range(size))) for name, size in sizes.items()}
    return dataclasses.replace(ParallelState.single(), **groups)


def test_where_sharding_cannot_be_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"one rank alone.*--sp-degree 2"):
        check_sharding(ARGS, [DIT], [], ranks())
    with pytest.raises(InvalidArgument, match=r"tensor parallelism \(2 ranks\).*one of the two"):
        check_sharding(ARGS, [DIT], [], ranks(tp=2, sp=2))
    plain = dataclasses.replace(DIT, streams=False)
    with pytest.raises(InvalidArgument, match="its class lists no blocks"):
        check_sharding(ARGS, [plain], [], ranks(sp=2))
    with pytest.raises(InvalidArgument, match="was handed in ready"):
        check_sharding(ARGS, [], [DIT], ranks(sp=2))
    check_sharding(ARGS, [DIT], [], ranks(sp=2))
