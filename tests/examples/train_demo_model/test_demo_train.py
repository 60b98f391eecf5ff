"""The trainer at toy scale: pieces that resume, a folder that both runtimes can load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.train_demo_model.checkpoint import unpack_archive
from examples.train_demo_model.clock import Clock, learning_rate
from examples.train_demo_model.models import FULL, TOY, DemoModel, build_vae, count_parameters, pack
from examples.train_demo_model.models import unpack as unpack_tokens
from examples.train_demo_model.sampling import Settings, sigmas
from examples.train_demo_model.train import main
from examples.train_demo_model.vocabulary import (
    T5_LENGTH,
    build_clip_tokenizer,
    build_t5_tokenizer,
    encode_clip,
    encode_t5,
)

COMPONENTS = ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae")


def test_any_text_tokenises_and_grammar_words_are_one_token():
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    prompt = "A small red circle above a large blue square."
    assert (encode_t5(t5, [prompt])[0] != 0).sum() == len(prompt.split()) + 2  # full stop, end
    assert (encode_clip(clip, [prompt])[0] != clip.eos_token_id).sum() == len(prompt.split()) + 2
    for text in ("", "Zebra #7 & <b>", "naïve 日本"):
        assert encode_t5(t5, [text]).shape == (1, T5_LENGTH)
        ids = encode_clip(clip, [text])[0]
        assert ids[0] == clip.bos_token_id
        assert clip.eos_token_id in ids
    assert build_clip_tokenizer().get_vocab() == clip.get_vocab()


def test_the_full_model_fits_the_budget():
    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()
    with torch.device("meta"):
        vae = build_vae(FULL)
    model = DemoModel(FULL, len(clip), len(t5))
    assert 2 * (count_parameters(vae) + count_parameters(model)) < 14_500_000


def test_packing_is_flux_packing_and_inverts():
    latents = torch.randn(2, 16, 16, 16)
    tokens = pack(latents)
    assert tokens.shape == (2, 64, 64)
    # Channel c*4 + dy*2 + dx of token (y, x).
    assert tokens[1, 8 * 3 + 5, 4 * 7 + 2 * 1 + 0] == latents[1, 7, 2 * 3 + 1, 2 * 5]
    assert torch.equal(unpack_tokens(tokens), latents)


def test_sigmas_are_the_schedulers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 20, 20).tolist())
    assert scheduler.sigmas.tolist() == pytest.approx(sigmas(Settings(shift=2.0)), abs=1e-6)


def test_learning_rate_warms_up_stays_and_falls():
    def rate(fraction: float, steps: int) -> float:
        return learning_rate(1.0, fraction, steps, warmup=10, decay_from=0.5)

    assert [rate(0.0, 0), rate(0.1, 100), rate(0.75, 100), rate(1.0, 100)] == [0.1, 1.0, 0.5, 0.0]


def test_a_clock_that_is_told_to_finish_does(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock(total_seconds=1000.0, total_steps=None, deadline=200.0, seconds=100.0)
    assert clock.fraction == pytest.approx(0.1)
    clock.finish_here()
    assert clock.fraction == pytest.approx(0.5)
    now = 200.0
    assert clock.done
    assert clock.out_of_time


def test_an_untrained_denoiser_predicts_zero():
    model = DemoModel(TOY, 600, 150)
    ids = torch.full((2, 8), 599)
    ids_t5 = torch.ones(2, T5_LENGTH, dtype=torch.long)
    velocity = model(torch.randn(2, 64, 64), ids_t5, ids, torch.rand(2))
    assert velocity.shape == (2, 64, 64)
    assert not velocity.any(), "adaLN-Zero: gates and output start at zero"


@pytest.mark.slow
def test_training_in_pieces_gives_one_model_folder(tmp_path, capsys):
    out, state = tmp_path / "out", tmp_path / "state"
    command = ["--toy", "--device", "cpu", "--out", str(out), "--state-dir", str(state)]

    # Piece 1 has time for nothing but steps of the autoencoder; on a busy machine, for one or two.
    short = ["--budget-seconds", "5", "--reserve-seconds", "0", "--vae-steps", "100000"]
    assert main([*command, *short]) == 0
    assert "NOT FINISHED" in capsys.readouterr().out
    assert (state / "vae.pt").exists()
    steps = torch.load(state / "vae.pt", weights_only=True)["clock"]["steps"]
    assert steps > 0

    # Piece 2 resumes and finishes.
    assert main([*command, "--vae-steps", str(steps + 5)]) == 0
    assert "FINISHED" in capsys.readouterr().out
    progress = json.loads((out / "progress.json").read_text())
    assert progress["finished"]
    assert progress["of"] == 8
    assert progress["clock"]["steps"] == 12
    assert sum(int(share.split("/")[1]) for share in progress["forms"].values()) == 8
    assert (out / "samples.png").exists()
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["stage"] == "text"] == [10]

    # The folder loads in Diffusers and makes a picture.
    from diffusers import FluxPipeline

    folder = tmp_path / "model"
    unpack_archive(out / "checkpoint.tar", folder)
    assert all((folder / name).is_dir() for name in COMPONENTS)
    pipeline = FluxPipeline.from_pretrained(folder).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    defaults = json.loads((folder / "sampling_params.json").read_text()) | {
        "num_inference_steps": 2
    }
    (picture,) = pipeline("a red circle", output_type="np", **defaults).images
    assert picture.shape == (128, 128, 3)

    # With the state lost, the output alone continues the training.
    lost = ["--state-dir", str(tmp_path / "new"), "--resume-from", str(out), "--dit-steps", "14"]
    assert main([*command, *lost]) == 0
    assert json.loads((out / "progress.json").read_text())["clock"]["steps"] == 14

    # The autoencoder of a model folder serves another model, as it is.
    taken = ["--state-dir", str(tmp_path / "taken"), "--vae-from", str(folder)]
    assert main([*command, *taken, "--out", str(tmp_path / "out2")]) == 0
    again = tmp_path / "model2"
    unpack_archive(tmp_path / "out2" / "checkpoint.tar", again)
    vae_weights = "vae/diffusion_pytorch_model.safetensors"
    assert (again / vae_weights).read_bytes() == (folder / vae_weights).read_bytes()
