from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import load_file
from torch import nn

from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    NeuralComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource, resolve_model_source
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.verify import verification
from sglang.multimodal_gen.runtime.verify.tiny_checkpoint import write_tiny_checkpoint

from parity.tiny_checkpoints import flux_dev


def config_of(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))
    return config


@pytest.fixture
def configs(tmp_path):
    """A checkpoint without weights: what a hub's configs and tokenizers alone are."""
    folder = tmp_path / "configs"
    flux_dev().write(folder)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    return folder


@pytest.mark.slow
def test_it_is_made_of_configs_alone(configs, tmp_path, verified):
    # Widths of a published kind: 8 heads each, so that half of them are left.
    config_of(configs / "text_encoder", num_attention_heads=4, hidden_size=64, num_hidden_layers=7)
    config_of(configs / "text_encoder_2", num_heads=4, d_model=64, num_layers=5)
    config_of(
        configs / "transformer", num_attention_heads=4, joint_attention_dim=64,
        pooled_projection_dim=64, num_layers=9,
    )  # fmt: skip
    tiny = write_tiny_checkpoint(resolve_model_source(str(configs)), tmp_path / "tiny")
    assert tiny.divisor == 2
    made = {p.name: config_of(p) for p in (tmp_path / "tiny").iterdir() if "encoder" in p.name}
    assert made["text_encoder"]["hidden_size"] == 32
    assert made["text_encoder"]["num_hidden_layers"] == 2
    assert made["text_encoder_2"]["d_model"] == 32
    dit = config_of(tmp_path / "tiny/transformer")
    assert (dit["num_attention_heads"], dit["num_layers"]) == (2, 2)
    assert dit["pooled_projection_dim"] == dit["joint_attention_dim"] == 32
    code, report = verified(configs)
    assert code == 0
    assert "widths / 2" in report["weights"]


def test_of_a_hub_id_the_configs_alone_are_fetched(configs, verified, monkeypatch):
    asked = []

    def fetch(repo_id, revision, *, weights):
        asked.append((repo_id, revision, weights))
        return configs

    monkeypatch.setattr(verification, "fetch_from_hub", fetch)
    code, report = verified("org/model", "--revision", "v2", "--checks", "vae-decode")
    assert code == 0
    assert asked == [("org/model", "v2", False)]
    assert report["model"] == "org/model"


class Picky(nn.Module):
    """Takes no width below 40."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim < 40:
            raise ValueError(f"dim={dim}")
        self.proj = nn.Linear(dim, num_heads)


def picky_source(monkeypatch, folder, dim) -> ModelSource:
    ModelRegistry.knows("any")  # the scan of the package comes before the first look-up
    monkeypatch.setitem(ModelRegistry._models, "Picky", Picky)
    (folder / "transformer").mkdir(parents=True)
    config = {"_class_name": "Picky", "dim": dim, "num_heads": 16}
    (folder / "transformer/config.json").write_text(json.dumps(config))
    index = {"_class_name": "PickyPipeline", "transformer": ["somewhere", "Picky"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return resolve_model_source(str(folder))


def test_widths_that_a_class_refuses_are_divided_by_less(monkeypatch, tmp_path):
    source = picky_source(monkeypatch, tmp_path / "source", 128)
    tiny = write_tiny_checkpoint(source, tmp_path / "tiny")
    assert tiny.divisor == 2
    (weights,) = (tmp_path / "tiny/transformer").glob("*.safetensors")
    assert load_file(weights)["proj.weight"].shape == (8, 64)
    config = json.loads((tmp_path / "tiny/transformer/config.json").read_text())
    assert config == {"_class_name": "Picky", "dim": 64, "num_heads": 8}


def test_a_config_that_its_class_refuses_is_an_error(monkeypatch, tmp_path):
    source = picky_source(monkeypatch, tmp_path / "source", 32)
    with pytest.raises(CheckpointError, match=r"'transformer': Picky cannot be built .*dim=32"):
        write_tiny_checkpoint(source, tmp_path / "tiny")


class OwnAutoencoder(AutoencoderKL):
    """Keeps the library's constructor, which drops fields of other releases."""


class OwnLoader(NeuralComponentLoader):
    """Makes what its class wants of the config, as a porter's own loader may."""

    def model_class(self, spec):
        return Picky

    def build(self, cls, spec):
        return cls(dim=2 * spec.config["half_dim"], num_heads=spec.config["num_heads"])


def test_components_are_built_as_the_loader_builds_them(monkeypatch, tmp_path):
    source = picky_source(monkeypatch, tmp_path / "source", 64)
    monkeypatch.setitem(ModelRegistry._models, "OwnAutoencoder", OwnAutoencoder)
    (source.root / "vae").mkdir()
    vae = {"_class_name": "OwnAutoencoder", "block_out_channels": [8], "norm_num_groups": 4}
    (source.root / "vae/config.json").write_text(json.dumps(vae | {"of_tomorrow": 1}))
    config_of(source.root / "transformer", half_dim=64)
    index = {**source.model_index, "vae": ["somewhere", "OwnAutoencoder"]}
    source = dataclasses.replace(source, model_index=index)
    tiny = write_tiny_checkpoint(source, tmp_path / "tiny", loaders={"transformer": OwnLoader})
    (weights,) = (tmp_path / "tiny/transformer").glob("*.safetensors")
    width = 2 * config_of(tmp_path / "tiny/transformer")["half_dim"]
    assert load_file(weights)["proj.weight"].shape[1] == width
    assert tiny.divisor == 2, "less than the smallest that Picky takes"
    assert list((tmp_path / "tiny/vae").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("tokenizer", "component 'tokenizer' is missing: "),
        ("transformer", "component 'transformer' is missing: "),
        ("vae/config.json", "vae/config.json does not exist"),
        ("tokenizer_2/tokenizer.json", "tokenizer_2 lacks"),
    ],
)
def test_what_the_checkpoint_lacks_is_told_of_its_own_files(configs, capsys, damage, problem):
    path = configs / damage
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["verify", str(configs), "--checks", "noise"]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert str(configs) in said
    assert "sglang-verify-" not in said


def test_a_text_encoders_config_that_makes_no_sense_is_an_error(configs, capsys):
    config_of(configs / "text_encoder", hidden_size=17)
    assert main(["verify", str(configs), "--checks", "noise"]) == 2
    said = capsys.readouterr().err
    assert "'text_encoder': CLIPTextModel cannot be built from its own config.json" in said
    assert "Traceback" not in said
