import json

import pytest
import torch
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader.lora_file import find_lora_file
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

TENSORS = {
    "transformer.q.lora_A.weight": torch.ones(2, 4),
    "transformer.q.lora_B.weight": torch.ones(6, 2),
}


def write(path, tensors=TENSORS, **metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata or None)
    return path


def test_a_file_or_the_folder_that_holds_it(tmp_path):
    path = write(tmp_path / "ink.safetensors")
    for given in (path, tmp_path):
        file = find_lora_file(str(given))
        assert file.path == path
        assert file.configs == {}
        assert all(torch.equal(file.read()[name], TENSORS[name]) for name in TENSORS)


def test_usual_names_win_in_a_folder(tmp_path):
    write(tmp_path / "other.safetensors")
    for usual in ("pytorch_lora_weights.safetensors", "adapter_model.safetensors"):
        write(tmp_path / usual)
        assert find_lora_file(str(tmp_path)).path.name == usual
    assert find_lora_file(str(tmp_path), "other.safetensors").path.name == "other.safetensors"


def test_a_choice_that_is_not_clear_is_refused(tmp_path):
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"2 .safetensors files: a.safetensors, b"):
        find_lora_file(str(tmp_path))


@pytest.mark.parametrize("name", ["gone", "gone/x.safetensors"])
def test_what_is_not_there_is_said(tmp_path, name):
    with pytest.raises(CheckpointError, match="does not exist"):
        find_lora_file(str(tmp_path / name))


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match="web page"):
        find_lora_file(str(tmp_path / "a.safetensors"))
    (tmp_path / "a.ckpt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="pickle, which is refused"):
        find_lora_file(str(tmp_path / "a.ckpt"))
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        find_lora_file(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("key", "kind"), [("lokr_w1", "LoKr"), ("hada_w1_a", "LoHa"), ("dora_scale", "DoRA")]
)
def test_other_methods_are_refused_by_name_before_a_tensor_is_read(tmp_path, key, kind):
    path = write(tmp_path / "a.safetensors", TENSORS | {f"lora_unet_q.{key}": torch.ones(2)})
    with pytest.raises(CheckpointError, match=f"is a {kind} adapter. Only LoRA"):
        find_lora_file(str(path))


def test_diffusers_metadata_is_by_component(tmp_path):
    said = {
        "transformer.lora_alpha": 8,
        "transformer.alpha_pattern": {"q": 2},
        "text_encoder.lora_alpha": 4,
        "text_encoder.use_rslora": True,
    }
    path = write(tmp_path / "a.safetensors", lora_adapter_metadata=json.dumps(said))
    configs = find_lora_file(str(path)).configs
    transformer, encoder = configs["transformer"], configs["text_encoder"]
    assert (transformer.alpha_of("x.q"), transformer.alpha_of("x.kq")) == (2.0, 8.0)
    assert not transformer.rank_stabilized
    assert (encoder.alpha_of("q"), encoder.rank_stabilized) == (4.0, True)
    assert transformer.source == "file metadata"


def test_peft_configuration_beside_the_file(tmp_path):
    path = write(tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = find_lora_file(str(path)).configs[""]
    assert (found.alpha, found.rank_stabilized, found.source) == (6.0, True, "adapter_config.json")
    write(tmp_path / "unrelated.safetensors")
    assert find_lora_file(str(tmp_path / "unrelated.safetensors")).configs == {}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "LOKR"}, "is a LOKR adapter"),
        ({"use_dora": True, "lora_alpha": 1}, "is a DoRA adapter"),
        ({"lora_alpha": "8"}, "lora_alpha='8' must be a finite number"),
        ({}, "lora_alpha=None"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan must be a finite number"),
        ({"lora_alpha": float("-inf")}, "lora_alpha=-inf must be a finite number"),
        ({"lora_alpha": 10**400}, r"lora_alpha=1000.*\.\.\. must be a finite number"),
        (
            {"lora_alpha": 1, "alpha_pattern": {"q": float("nan")}},
            r"alpha_pattern\['q'\]=nan must be a finite number",
        ),
        ({"lora_alpha": 1, "alpha_pattern": {"[": 1}}, r"'\[', which is no regular expression"),
        ({"lora_alpha": 1, "alpha_pattern": [1]}, "must be an object"),
        ({"lora_alpha": 1, "use_rslora": "false"}, "use_rslora='false' must be true or false"),
        ({"lora_alpha": 1, "use_dora": "no"}, "use_dora='no' must be true or false"),
        ({"lora_alpha": 1, "peft_type": ["LORA"]}, "is a .* adapter"),
    ],
)
def test_configurations_that_cannot_be_followed_are_refused(tmp_path, config, problem):
    write(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        find_lora_file(str(tmp_path))


def test_the_method_is_named_in_any_case(tmp_path):
    write(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "lora", "lora_alpha": 4}')
    assert find_lora_file(str(tmp_path)).configs[""].alpha == 4.0


def test_numbers_in_the_metadata_must_be_numbers(tmp_path):
    said = '{"transformer.lora_alpha": NaN}'
    path = write(tmp_path / "a.safetensors", lora_adapter_metadata=said)
    with pytest.raises(CheckpointError, match=r"transformer\.lora_alpha=nan must be a finite"):
        find_lora_file(str(path))


@pytest.mark.parametrize("path", ["~nosuchuser-at-all/x", "a/" + "x" * 5000, "a/\0b"])
def test_what_can_be_no_path_is_an_error_in_words(path):
    with pytest.raises(CheckpointError, match=r"is no usable path|does not exist") as caught:
        find_lora_file(path)
    assert len(str(caught.value)) < 400
