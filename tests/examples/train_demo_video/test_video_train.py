"""The trainer at toy scale: a folder of Wan's layout that the runtime runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.train_demo_model.checkpoint import unpack_archive
from examples.train_demo_model.models import count_parameters
from examples.train_demo_video.lessons import Pupil
from examples.train_demo_video.models import (
    FULL,
    LATENT_SHAPE,
    TOY,
    DemoVideoModel,
    build_vae,
)
from examples.train_demo_video.train import main
from examples.train_demo_video.vocabulary import build_tokenizer, encode_prompts


def test_the_full_model_fits_the_budget():
    with torch.device("meta"):
        vae = build_vae(FULL)
    model = DemoVideoModel(FULL, len(build_tokenizer()))
    assert 2 * (count_parameters(vae) + count_parameters(model)) < 15_500_000


def test_text_is_encoded_as_transformers_does_with_a_plain_mask():
    torch.manual_seed(0)
    model = DemoVideoModel(TOY, len(build_tokenizer()))
    ids = torch.from_numpy(encode_prompts(build_tokenizer(), ["a red star growing", ""])).long()
    mask = (ids != 0).long()
    plain = model.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    unmasked = model.text_encoder(input_ids=ids).last_hidden_state
    states = model.encode(ids)
    assert not torch.allclose(unmasked[mask.bool()], plain[mask.bool()], atol=1e-3)
    assert torch.allclose(states[mask.bool()], plain[mask.bool()], atol=1e-6)
    assert not states[~mask.bool()].any()


def test_an_untrained_denoiser_predicts_zero_and_its_gates_can_learn():
    model = DemoVideoModel(TOY, 100)
    text = torch.randn(2, 5, TOY.text_width)
    velocity = model.denoise(torch.randn(2, *LATENT_SHAPE), text, torch.rand(2))
    assert velocity.shape == (2, *LATENT_SHAPE)
    assert not velocity.any()
    velocity.sum().backward()
    assert model.transformer.proj_out.weight.grad.abs().sum() > 0


def test_the_heads_learn_what_a_prompt_says():
    """Eight prompts by heart, in a moment: gradients reach the encoder."""
    torch.manual_seed(0)
    pupil = Pupil(DemoVideoModel(TOY, 100))
    ids = torch.randint(3, 90, (8, 6))
    facts = torch.stack([torch.randint(0, n, (8,)) for n in (11, 11, 5, 7, 3)], dim=1)
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=1e-2)
    before = pupil.read(ids, facts)
    for _ in range(60):
        loss = pupil.text_loss(pupil.model.encode(ids), facts, torch.ones(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before < 0.5
    assert pupil.read(ids, facts) == 1.0


@pytest.mark.slow
def test_training_in_pieces_gives_a_folder_that_the_runtime_runs(tmp_path, capsys):
    from sglang.multimodal_gen import DiffGenerator

    out, state = tmp_path / "out", tmp_path / "state"
    command = ["--toy", "--device", "cpu", "--out", str(out), "--state-dir", str(state)]
    assert main([*command, "--budget-seconds", "0.1", "--vae-steps", "100000"]) == 0
    assert "NOT FINISHED" in capsys.readouterr().out
    assert main([*command, "--vae-steps", "3"]) == 0
    assert "FINISHED" in capsys.readouterr().out
    progress = json.loads((out / "progress.json").read_text())
    assert progress["finished"]
    assert (out / "samples.png").stat().st_size > 1000

    folder = tmp_path / "model"
    unpack_archive(out / "checkpoint.tar", folder)
    settings = json.loads((folder / "sampling_params.json").read_text())
    assert (settings["num_frames"], settings["height"]) == (17, 64)
    with DiffGenerator.from_pretrained(model_path=str(folder), device="cpu") as generator:
        made = generator.generate(prompt="a red circle growing", num_inference_steps=2, seed=1)
    (video,) = made.videos
    assert video.frames.shape == (17, 64, 64, 3)
    assert video.frames.dtype == np.uint8
    assert video.frames.std() > 1
