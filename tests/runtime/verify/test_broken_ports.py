"""A deliberately broken port of each common kind is caught, with the right cause named."""

from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.verify.evidence import Failure
from sglang.multimodal_gen.runtime.verify.verification import check_names

ON_RANKS = (
    "vae-tiled", "vae-spatial-shard", "cfg-parallel", "encoder-tp", "dit-tp", "sp", "tp-sp",
)  # fmt: skip

BROKEN = {
    "ShiftlessPipeline": ("latent-scale", Failure.SCALE, "the shift is left out"),
    "ReversedPipeline": ("timesteps", Failure.TIMESTEPS, "the port's timesteps are reversed"),
    "DtypePipeline": ("timesteps", Failure.TIMESTEPS, "torch.float64, the reference's torch.float"),
    "PositiveTwicePipeline": ("prompt-embeddings", Failure.NEGATIVE, "given the prompt's own"),
    "UnencodedPipeline": ("kwargs", Failure.NEGATIVE, "no stage wrote negative_prompt_embeds"),
    "MisnamedPipeline": ("kwargs", Failure.KWARGS, "Did you mean 'pooled_projections'?"),
    "TurnedPipeline": ("first-prediction", Failure.ROTARY, "the style differs"),
    "UnscaledPipeline": ("first-prediction", Failure.NETWORK, "transformer_blocks.1.attn.norm_k"),
    "PackedPipeline": ("final-latents", Failure.PACKED, "the raw_latent_shape is [1, 16, 8, 8]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_port_is_caught_with_its_cause(root, ports, verified, capsys, name):
    check, failure, because = BROKEN[name]
    code, report = verified(root, "--pipeline", name, "--weights", "real")
    assert code == 1
    assert not report["passed"]
    rows = {row["name"]: row for row in report["checks"]}
    assert rows["sensitivity"]["verdict"] == "ok"
    failed = [row["name"] for row in report["checks"] if row["verdict"] == "FAILED"]
    assert failed == [check]
    assert report["cause"]["failure"] == failure
    assert because in report["cause"]["because"]
    names = list(rows)
    after = names[names.index(check) + 1 :]
    assert {rows[name]["verdict"] for name in after} == {"not run"}
    said = capsys.readouterr().out
    assert f"likely cause: {failure}" in said
    assert f"FAILED: {check}" in said


def test_the_whole_port_passes(root, ports, verified, capsys):
    checks = [name for name in check_names() if name not in ON_RANKS]
    more = ("--weights", "real", "--checks", ",".join(checks))
    code, report = verified(root, "--pipeline", "WholePipeline", *more)
    assert code == 0
    assert report["passed"]
    assert report["cause"] is None
    verdicts = {row["name"]: row["verdict"] for row in report["checks"]}
    assert set(verdicts.values()) == {"ok"}, verdicts
    assert verdicts.keys() >= {"lora", "layerwise-offload", "vae-decode"}
    assert "passed: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_port_passes_on_ranks(shared_root, ports, verified, capsys):
    """A package of somebody else, which the ranks import by themselves."""
    wanted = ("--weights", "real", "--checks", ",".join(ON_RANKS))
    code, report = verified(shared_root, "--pipeline", "WholePipeline", *wanted)
    rows = {row["name"]: row for row in report["checks"]}
    assert list(rows) == list(ON_RANKS)
    assert {row["verdict"] for row in rows.values()} == {"ok"}, rows
    assert code == 0
    assert rows["vae-tiled"]["detail"].startswith("9 tiles of 32 pixels on 2 ranks (5 and 4)")
    assert "ulysses" in rows["sp"]["detail"]
    assert "4 ranks" in rows["tp-sp"]["detail"]
    said = capsys.readouterr().err
    starts = [line.split("starting ")[1] for line in said.splitlines() if "starting " in line]
    assert starts == [
        "2 ranks: cfg 2", "2 ranks: TP 2", "2 ranks: Ulysses 2", "4 ranks: Ulysses 2 x TP 2",
    ]  # fmt: skip


BROKEN_ON_RANKS = {
    "BiasTwicePipeline": ("dit-tp", "; 2 ranks, "),
    "WrongHeadsPipeline": ("dit-tp", "planned_heads=3 of WrongHeads does not divide over tp_size"),
    "AlonePipeline": ("cfg-parallel", "called 0 and 0 times in cfg: a rank worked by itself"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_ON_RANKS)
def test_a_broken_mechanism_is_caught(shared_root, ports, verified, name):
    check, detail = BROKEN_ON_RANKS[name]
    more = ("--weights", "real", "--checks", f"{check},layerwise-offload")
    code, report = verified(shared_root, "--pipeline", name, *more)
    assert code == 1
    row, later = report["checks"]
    assert (row["name"], row["verdict"], later["verdict"]) == (check, "FAILED", "not run")
    assert detail in row["detail"]


def test_ranks_are_not_started_for_a_class_of_the_script(root, ports, verified, monkeypatch):
    from broken_ports.pipelines import WholePipeline

    for cls in (WholePipeline, FluxTransformer2DModel):
        with monkeypatch.context() as patched:
            patched.setattr(cls, "__module__", "__main__")
            more = ("--weights", "real", "--checks", "cfg-parallel")
            code, report = verified(root, "--pipeline", "WholePipeline", *more)
        (row,) = report["checks"]
        assert (code, row["verdict"]) == (1, "not compared")
        assert f"{cls.__name__} is defined in the script that runs" in row["detail"]
