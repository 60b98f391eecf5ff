"""Runs of the VAE's modes, of many ranks and of offload, each against the plain run.

Every one of them asks for a proof beside the numbers: ranks that each did all the work would agree
too. The proof is a counter: what was sent, which tiles were decoded, how much was streamed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import ParallelTiledVAE
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.verify.baseline import Baseline
from sglang.multimodal_gen.runtime.verify.evidence import Finding
from sglang.multimodal_gen.runtime.verify.measure import FINAL_LIMIT, FORWARD_LIMIT, relative_l2
from sglang.multimodal_gen.runtime.verify.on_ranks import CannotRun, RankRun, counted_tiles
from sglang.multimodal_gen.runtime.verify.port import Port, denoiser_names
from sglang.multimodal_gen.runtime.verify.recorder import first

ENCODER, DENOISER = "text_encoder", "transformer"
SEQUENCE = ("ulysses", "ring", "sp")


def run_tiled(port: Port, baseline: Baseline) -> Finding:
    """Tiles dealt to two ranks against the same tiles on one.

    How far tiles are from the whole picture is the VAE's own affair, and only told.
    """
    vae, latents = port.decoder, baseline.decoded
    assert isinstance(vae, ParallelTiledVAE)
    unit = vae.spatial_compression_ratio
    tile = max(1, min(latents.shape[-2:]) // 2) * unit
    vae.enable_tiling(tile, tile)
    try:
        with torch.inference_mode(), counted_tiles(vae) as here:
            z = latents.to(next(vae.parameters()).device)
            alone = first(vae.decode(z, return_dict=False)).cpu()
    finally:
        vae.disable_tiling()
    tiles = here["tiles"]
    if tiles < 2:
        return Finding(0.0, skipped=f"one tile holds a picture of {tuple(latents.shape)} latents")
    ranks = baseline.ranks.decode("tiled", tile, latents)
    dealt = [rank.tiles for rank in ranks]
    if sum(dealt) != tiles or not all(dealt):
        return Finding(float("inf"), f"{tiles} tiles, of which the ranks decoded {_and(dealt)}")
    away = relative_l2(alone, baseline.picture)
    words = f"{tiles} tiles of {tile} pixels on 2 ranks ({_and(dealt)}) against 1"
    return Finding(
        relative_l2(ranks[0].picture, alone), f"{words}; {away:.1e} from the whole picture"
    )


def run_spatial_shard(port: Port, baseline: Baseline) -> Finding:
    """The same latents decoded in bands of rows against the whole picture."""
    ranks = baseline.ranks.decode("spatial_shard", None, baseline.decoded)
    if any(rank.mode != "spatial_shard" for rank in ranks):
        rows = baseline.decoded.shape[-2]
        return Finding(0.0, skipped=f"{rows} rows of latents are too few for 2 ranks; see --size")
    sent = [rank.exchanges for rank in ranks]
    if not all(sent):
        return Finding(float("inf"), f"no edge was exchanged ({_and(sent)}): nothing was shared")
    error = relative_l2(ranks[0].picture, baseline.picture)
    return Finding(error, f"bands of rows on 2 ranks, {_and(sent)} exchanges")


def run_encoder_tp(port: Port, baseline: Baseline) -> Finding:
    """What two ranks' text encoders make of the prompts.

    A denoiser without a plan keeps tensor parallelism away from the whole pipeline; encoders are
    spread over the ranks of a sequence too.
    """
    try:
        runs = baseline.ranks.run("tp", baseline.request)
    except CannotRun as refused:
        try:
            runs = baseline.ranks.run("sp", baseline.request)
        except CannotRun:
            raise refused from None
    calls = [run.calls(ENCODER) for run in runs]
    if not all(calls):
        return _unsent(ENCODER, calls)
    expected = baseline.record.embeddings
    if not expected:
        return Finding(0.0, skipped="no stage writes embeddings of the prompt into the batch")
    errors = {
        name: max(_error(run.embeddings.get(name), value) for run in runs)
        for name, value in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return Finding(errors[worst], f"{worst} on {len(runs)} ranks, {_and(calls)} calls")


def run_dit_tp(port: Port, baseline: Baseline) -> Finding:
    """The denoiser's weights on two ranks."""
    return _agreement(baseline, "tp", ("tp",))


def run_sp(port: Port, baseline: Baseline) -> Finding:
    """The sequence on two ranks: by heads where these divide, else in a ring."""
    return _agreement(baseline, "sp", SEQUENCE)


def run_tp_sp(port: Port, baseline: Baseline) -> Finding:
    """Weights and sequence on two times two ranks."""
    return _agreement(baseline, "tp-sp", ("tp",), SEQUENCE)


def run_cfg_parallel(port: Port, baseline: Baseline) -> Finding:
    """One branch of guidance on each of two ranks."""
    if baseline.record.branch_count != 2:
        return Finding(0.0, skipped="the model runs one branch: no classifier-free guidance")
    return _agreement(baseline, "cfg", ("cfg",))


def run_layerwise_offload(port: Port, baseline: Baseline) -> Finding:
    """The denoisers' blocks streamed from host memory: the same bits."""
    pipeline = port.pipeline
    names = [n for n in denoiser_names(pipeline) if pipeline.get_module(n) is not None]
    args = dataclasses.replace(
        port.model.server_args, memory=MemoryArgs(layerwise_offload_components=tuple(names))
    )
    streamed = Port(dataclasses.replace(port.model, server_args=args))
    try:
        picture = streamed.picture(baseline.request)
        homes = streamed.pipeline.residency.components
        counted = {
            name: 0 if counters is None else counters.bytes
            for name in names
            for counters in [homes[name].stream_counters if name in homes else None]
        }
    finally:
        streamed.worker.close()
    still = [name for name, size in counted.items() if size == 0]
    if still:
        return Finding(float("inf"), f"nothing of {' and '.join(still)} was streamed")
    megabytes = sum(counted.values()) / 1e6
    return Finding(relative_l2(picture, baseline.picture), f"{megabytes:.1f} MB streamed")


def _agreement(baseline: Baseline, layout: str, *proofs: tuple[str, ...]) -> Finding:
    """Step 1's prediction and the last latents of all ranks, and the first one's picture.

    ``proofs`` are groups; in one of each the denoising stage of every rank must have called.
    """
    runs = baseline.ranks.run(layout, baseline.request)
    for groups in proofs:
        calls = [run.calls(DENOISER, *groups) for run in runs]
        if not all(calls):
            return _unsent(DENOISER, calls, groups)
    errors = _errors(runs, baseline)
    worst = max(errors, key=lambda what: errors[what][0] / errors[what][1])
    error, bound = errors[worst]
    sent = sum(run.calls(DENOISER, *(g for groups in proofs for g in groups)) for run in runs)
    verbs = sorted({key[1] for run in runs for key in run.traffic if key[0] == DENOISER})
    words = f"{worst}; {len(runs)} ranks, {sent} calls ({', '.join(verbs)})"
    return Finding(error, words, bound=bound)


def _errors(runs: Sequence[RankRun], baseline: Baseline) -> dict[str, tuple[float, float]]:
    """What -> its error and bound: the loop makes the round-off of one step larger."""
    errors: dict[str, tuple[float, float]] = {}
    expected = baseline.record.steps[0].prediction
    for rank, run in enumerate(runs):
        prediction = _error(run.first_prediction, expected)
        errors[f"prediction of step 1, rank {rank}"] = (prediction, FORWARD_LIMIT)
        latents = _error(run.latents, baseline.latents)
        errors[f"final latents, rank {rank}"] = (latents, FINAL_LIMIT)
    errors["picture"] = (_error(runs[0].picture, baseline.picture), FINAL_LIMIT)
    return errors


def _error(measured: Tensor | None, expected: Tensor) -> float:
    return float("inf") if measured is None else relative_l2(measured, expected)


def _unsent(role: str, calls: Sequence[int], groups: Sequence[str] = ()) -> Finding:
    where = f" in {' or '.join(groups)}" if groups else ""
    words = f"the stage of the {role} called {_and(calls)} times{where}: a rank worked by itself"
    return Finding(float("inf"), words)


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
