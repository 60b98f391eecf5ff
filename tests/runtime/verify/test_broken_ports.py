"""A deliberately broken port of each common kind is caught, with the right cause named."""

from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.verify.evidence import Failure

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
    code, report = verified(root, "--pipeline", "WholePipeline", "--weights", "real")
    assert code == 0
    assert report["passed"]
    assert report["cause"] is None
    verdicts = {row["name"]: row["verdict"] for row in report["checks"]}
    for name, verdict in verdicts.items():
        assert verdict in ("ok", "not supported here"), name
    assert verdicts["lora"] == "ok"
    assert "passed: " in capsys.readouterr().out
