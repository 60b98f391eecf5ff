"""The command's own manners: what it refuses, what it stops at, what it reports."""

from __future__ import annotations

import dataclasses
import json

import pytest
from safetensors.torch import load_file, save_file

from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, OutOfMemory
from sglang.multimodal_gen.runtime.verify import on_ranks, verification
from sglang.multimodal_gen.runtime.verify.evidence import Finding
from sglang.multimodal_gen.runtime.verify.measure import relative_l2
from sglang.multimodal_gen.runtime.verify.mechanisms import MECHANISMS, Mechanism


@pytest.mark.slow
def test_the_bundled_model_is_green(verified):
    code, report = verified("demo")
    assert code == 0, report
    assert {row["verdict"] for row in report["checks"]} == {"ok"}, report
    # Under a minute on two cores that do nothing else; a run that hangs is what is meant here.
    assert report["seconds"] < 240


@pytest.mark.slow
def test_the_bundled_models_own_weights_are_green(verified):
    """Its five heads cannot be dealt over two ranks: that is said, and is no failure."""
    code, report = verified("demo", "--weights", "real")
    assert code == 0, report
    rows = {row["name"]: row for row in report["checks"]}
    assert rows["vae-decode"]["verdict"] == rows["lora"]["verdict"] == rows["sp"]["verdict"] == "ok"
    assert "ring" in rows["sp"]["detail"]
    assert rows["encoder-tp"]["verdict"] == "ok"  # over the ranks of the sequence
    for name in ("dit-tp", "tp-sp"):
        assert rows[name]["verdict"] == "not supported here"
        assert "does not divide over tp_size=2" in rows[name]["detail"]


def test_only_the_checks_asked_for_run(root, verified, capsys):
    code, report = verified(
        root, "--weights", "real", "--checks", "noise,vae-decode,layerwise-offload"
    )
    assert code == 0
    names = [row["name"] for row in report["checks"]]
    assert names == ["sensitivity", "noise", "vae-decode", "layerwise-offload"]
    assert report["sizes"] == ["64x64", "64x96"]
    said = capsys.readouterr()
    assert "reference: another prompt" in said.err
    assert "likely cause" not in said.out


def test_sizes_are_the_callers(root, verified):
    _, report = verified(root, "--weights", "real", "--checks", "noise", "--size", "32x48")
    assert report["sizes"] == ["32x48"]


REFUSED = {
    "no such check": (("--checks", "noize"), "--checks='noize': there is no such check. Did you"),
    "no such size": (("--size", "64"), "--size='64': must be HEIGHTxWIDTH"),
    "absurd size": (("--size", "99999x99999"), "9999800001 pixels; at most 16777216"),
    "report is a folder": (("--json", "/tmp"), "--json /tmp: is a folder; give the file"),
    "off the grid": (("--size", "64x65"), "width=65: must be a multiple of 16"),
    "no such reference": (("--reference", "oracle"), "--reference='oracle': use diffusers, none"),
    "no such module": (("--reference", "no.such:Thing"), "cannot be imported: No module named"),
    "no such class": (("--reference", "json:Thing"), "json has no class Thing with a from_pre"),
    "no such seed": (("--seed", "x"), "--seed='x': must be a whole number"),
    "no such folder": (("--json", "/no/such/folder/x.json"), "there is no folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_users_mistake_is_one_line(root, capsys, case):
    arguments, message = REFUSED[case]
    assert main(["verify", str(root), "--weights", "real", "--device", "cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_no_such_model_is_one_line(capsys):
    assert main(["verify", "demoo"]) == 2
    assert "Did you mean 'demo'?" in capsys.readouterr().err
    assert main(["verify"]) == 2
    assert "which model?" in capsys.readouterr().err


def test_the_checks_can_be_listed(capsys):
    assert main(["verify", "any", "--checks", "list"]) == 0
    assert capsys.readouterr().out.split() == verification.check_names()


@pytest.mark.slow
def test_a_reference_without_a_diffusers_class_is_one_line(root, tmp_path, ports, capsys):
    import shutil

    folder = shutil.copytree(root, tmp_path / "other")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "WholePipeline"}))
    assert main(["verify", str(folder), "--weights", "real"]) == 2
    said = capsys.readouterr().err
    assert "Diffusers" in said
    assert "--reference MODULE:CLASS, or check without one: --reference none" in said
    assert main(["verify", str(folder), "--weights", "real", "--reference", "none"]) == 0
    assert "no reference was asked for" in capsys.readouterr().out
    named = "diffusers:FluxPipeline"
    more = ("--weights", "real", "--reference", named, "--checks", "vae-decode")
    assert main(["verify", str(folder), *more]) == 0


def test_weights_that_hide_the_prompt_prove_nothing(root, tmp_path, verified):
    import shutil

    folder = shutil.copytree(root, tmp_path / "deaf")
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.startswith(("context_embedder", "time_text_embed.text_embedder")):
            tensors[name].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    code, report = verified(folder, "--weights", "real")
    assert code == 1
    first, *others = report["checks"]
    assert (first["name"], first["verdict"]) == ("sensitivity", "proves nothing")
    assert "prompt" in first["detail"]
    assert {row["verdict"] for row in others} == {"not run"}


def test_a_model_of_the_diffusers_backend_has_no_port(tmp_path, capsys):
    from parity.tiny_pipelines import write_dit

    write_dit(tmp_path / "pixart")
    assert main(["verify", str(tmp_path / "pixart"), "--device", "cpu"]) == 2
    assert "so there is no port to verify" in capsys.readouterr().err


def mechanism(name, run, why=None):
    return Mechanism(name, name, lambda port: why, run, bound=1e-4)


def test_a_mechanism_is_one_entry(root, verified, monkeypatch):
    """Its run gets the port and the plain picture; what is over the bound stops the rest."""
    seen = []

    def same(port, baseline):
        again = port.picture(baseline.request)
        seen.append(again.shape)
        return Finding(relative_l2(again, baseline.picture))

    entries = (
        mechanism("same", same),
        mechanism("impossible", same, "this pipeline has no such thing"),
        mechanism("off", lambda port, baseline: Finding(2e-4, "an eighth of it")),
        mechanism("later", same),
    )
    monkeypatch.setattr(verification, "MECHANISMS", entries)
    code, report = verified(root, "--weights", "real", "--reference", "none")
    assert code == 1
    rows = {row["name"]: row for row in report["checks"]}
    assert (rows["same"]["verdict"], rows["same"]["error"]) == ("ok", 0.0)
    assert rows["impossible"]["detail"] == "this pipeline has no such thing"
    assert (rows["off"]["verdict"], rows["off"]["bound"]) == ("FAILED", 1e-4)
    assert rows["later"]["verdict"] == "not run"
    assert len(seen) == 1


def test_lora_that_merges_wrongly_fails(root, verified, monkeypatch):
    from sglang.multimodal_gen.runtime.layers.lora.lora_linear import LoRALinear

    merge = LoRALinear.merge

    def twice(self, terms):
        return merge(self, [*terms, *terms])

    monkeypatch.setattr(LoRALinear, "merge", twice)
    code, report = verified(root, "--weights", "real", "--checks", "lora")
    assert code == 1
    (row,) = report["checks"]
    assert row["verdict"] == "FAILED"
    assert row["detail"].startswith("merged")


def test_every_mechanism_of_the_porters_contract_has_a_row():
    assert [m.name for m in MECHANISMS] == [
        "vae-tiled", "vae-spatial-shard", "cfg-parallel", "encoder-tp", "dit-tp", "sp", "tp-sp",
        "layerwise-offload", "lora",
    ]  # fmt: skip


def test_a_reference_that_heeds_the_request_is_no_check_of_the_port(root, verified, monkeypatch):
    check = verification.REFERENCE_CHECKS[0]
    skipping = dataclasses.replace(check, measure=lambda one: Finding(0.0, skipped="nothing there"))
    monkeypatch.setattr(verification, "REFERENCE_CHECKS", (skipping,))
    monkeypatch.setattr(verification, "MECHANISMS", ())
    code, report = verified(root, "--weights", "real")
    verdicts = [row["verdict"] for row in report["checks"]]
    assert verdicts == ["ok", "not compared"]
    assert (code, report["passed"]) == (1, False)


def test_a_port_that_fails_by_itself_is_a_row(root, ports, verified, capsys):
    more = ("--pipeline", "MisnamedPipeline", "--reference", "none", "--checks", "lora")
    code, report = verified(root, "--weights", "real", *more)
    assert code == 1
    first, later = report["checks"]
    assert (first["name"], first["verdict"], first["error"]) == ("plain-run", "FAILED", "infinite")
    assert "pooled_projection" in first["detail"]
    assert (later["name"], later["verdict"]) == ("lora", "not run")
    assert "FAILED: plain-run" in capsys.readouterr().out


MISFIT = InvalidArgument("tp_size", 2, "number=3 of Net does not divide over tp_size=2")


@pytest.mark.parametrize(
    ("heads", "error", "verdict"),
    [
        ("odd", MISFIT, "not supported here"),  # the checkpoint's own number
        ("even", MISFIT, "FAILED"),  # all its heads divide: it is the port that cannot
        ("even", OutOfMemory("no room for two"), "not compared"),  # this machine cannot
    ],
)
def test_who_refuses_a_layout_makes_a_difference(
    root, shared_root, verified, monkeypatch, heads, error, verdict
):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(on_ranks, "open_worker", refuse)
    folder = {"odd": root, "even": shared_root}[heads]
    more = ("--weights", "real", "--reference", "none", "--checks", "dit-tp,vae-decode")
    code, report = verified(folder, *more)
    rows = {row["name"]: row for row in report["checks"]}
    assert rows["dit-tp"]["verdict"] == verdict
    assert str(error) in rows["dit-tp"]["detail"]
    assert code == 1


def test_every_component_that_lists_blocks_is_streamed(root, verified):
    code, report = verified(root, "--weights", "real", "--checks", "layerwise-offload")
    (row,) = report["checks"]
    assert (code, row["verdict"], row["error"]) == (0, "ok", 0.0)
    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        assert f"{name} " in row["detail"]


def test_a_component_without_blocks_is_named_and_not_green(root, verified, monkeypatch):
    monkeypatch.setattr(AutoencoderKL, "layer_names", [])
    code, report = verified(root, "--weights", "real", "--checks", "layerwise-offload")
    (row,) = report["checks"]
    assert (code, row["verdict"]) == (1, "not supported here")
    assert "vae (AutoencoderKL): no LayerwiseOffloadableModuleMixin" in row["detail"]
    assert "transformer" in row["detail"]


def test_a_reference_that_makes_no_picture_is_said_as_such(root, tmp_path, verified):
    import shutil

    folder = shutil.copytree(root, tmp_path / "damaged")
    (path,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors["x_embedder.weight"][:] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    code, report = verified(folder, "--weights", "real", "--checks", "noise")
    assert code == 1
    assert "picture holds NaN or infinity" in report["checks"][0]["detail"]
    assert [row["verdict"] for row in report["checks"]] == ["proves nothing", "not run"]


def test_a_refusal_does_not_advise_flags_of_another_command():
    advice = "tp_size=2: X has no TP_PLAN, so each rank would hold all; use --tp-size 1, or write"
    assert verification.without_flags(advice) == (
        "tp_size=2: X has no TP_PLAN, so each rank would hold all"
    )
    advice = "5 heads do not divide over 2 ranks. Choose another --tp-size or --sp-degree"
    assert verification.without_flags(advice) == "5 heads do not divide over 2 ranks"
    assert verification.without_flags("5 heads do not divide") == "5 heads do not divide"
