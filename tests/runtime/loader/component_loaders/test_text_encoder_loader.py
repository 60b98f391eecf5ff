from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentSpec,
    LoadedComponent,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.text_encoder_loader import (
    TextEncoderLoader,
)
from sglang.multimodal_gen.runtime.loader.residency import component_facts
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, UserError

IDS = torch.tensor([[3, 7, 11, 29]])
T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")


def _clip(**changes: Any) -> CLIPTextModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = CLIPTextConfig(
        vocab_size=30,
        num_hidden_layers=2,
        max_position_embeddings=8,
        bos_token_id=28,
        eos_token_id=29,
        **(sizes | changes),
    )
    return CLIPTextModel(config).eval()


def _t5() -> T5EncoderModel:
    torch.manual_seed(2)
    return T5EncoderModel(_t5_config()).eval()


def _t5_config() -> T5Config:
    return T5Config(
        vocab_size=30,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )


def _save(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _load(
    folder: Path, architecture: str | None, precision: str = "fp32", **changes: Any
) -> LoadedComponent:
    spec = ComponentSpec(
        name="text_encoder",
        path=folder,
        library="transformers",
        architecture=architecture,
        precision=precision,
        device="cpu",
        **changes,
    )
    return TextEncoderLoader().load(spec)


def _assert_same_forward(loaded: Any, reference: Any) -> None:
    with torch.no_grad():
        got, wanted = loaded(IDS), reference(IDS)
    assert torch.equal(got.last_hidden_state, wanted.last_hidden_state)
    assert wanted.last_hidden_state.std() > 0.01


@pytest.mark.parametrize("prefix", ["text_model.", ""])
def test_clip_is_loaded_from_old_names_and_new(tmp_path: Path, prefix: str) -> None:
    clip = _clip()
    tensors = _save(clip, tmp_path)
    renamed = {prefix + name.removeprefix("text_model."): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    module = _load(tmp_path, "CLIPTextModel").module
    assert isinstance(module, CLIPTextModel)
    _assert_same_forward(module, clip)
    with torch.no_grad():
        assert torch.equal(module(IDS).pooler_output, clip(IDS).pooler_output)


def test_computed_buffers_are_real_and_old_files_may_store_them(tmp_path: Path) -> None:
    tensors = _save(_clip(), tmp_path)
    stale = torch.zeros(1, 8, dtype=torch.int64)
    tensors["text_model.embeddings.position_ids"] = stale
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = _load(tmp_path, "CLIPTextModel")
    buffers = dict(loaded.module.named_buffers())
    (name,) = [name for name in buffers if name.endswith("position_ids")]
    assert torch.equal(buffers[name], torch.arange(8)[None])
    assert loaded.receipt is not None
    assert loaded.receipt.ignored == ("text_model.embeddings.position_ids",)


def test_rotary_tables_of_old_files_are_left_out(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2Model(config).eval()
    tensors = _save(model, tmp_path)
    stale = "layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {stale: torch.zeros(4)}, tmp_path / "model.safetensors")
    loaded = _load(tmp_path, "Qwen2Model")
    assert loaded.receipt is not None
    assert loaded.receipt.ignored == (stale,)
    _assert_same_forward(loaded.module, model)
    loaded = _load(tmp_path, "Qwen2Model", "bf16")
    assert loaded.module.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("stored", [T5_EMBEDDINGS[:1], T5_EMBEDDINGS[1:], T5_EMBEDDINGS])
def test_t5_is_loaded_whichever_embedding_is_stored(
    tmp_path: Path, stored: tuple[str, ...]
) -> None:
    t5 = _t5()
    tensors = {n: x for n, x in _save(t5, tmp_path).items() if n not in T5_EMBEDDINGS}
    tensors |= {name: t5.shared.weight.detach().clone() for name in stored}
    save_file(tensors, tmp_path / "model.safetensors")
    module = _load(tmp_path, "T5EncoderModel").module
    assert module.shared.weight.data_ptr() == module.encoder.embed_tokens.weight.data_ptr()
    assert module.shared.weight is module.encoder.embed_tokens.weight
    _assert_same_forward(module, t5)


def test_t5_without_any_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {n: x for n, x in _save(_t5(), tmp_path).items() if n not in T5_EMBEDDINGS}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Missing \(1\): \[shared\.weight\]"):
        _load(tmp_path, "T5EncoderModel")


def test_the_class_of_the_index_is_made_not_that_of_the_config(tmp_path: Path) -> None:
    """Pipelines use the encoder of files that hold a whole T5, decoder and all."""
    torch.manual_seed(3)
    whole = T5ForConditionalGeneration(_t5_config()).eval()
    _save(whole, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "T5ForConditionalGeneration"
    ]
    loaded = _load(tmp_path, "T5EncoderModel")
    assert isinstance(loaded.module, T5EncoderModel)
    assert loaded.receipt is not None
    assert all(name.startswith(("decoder.", "lm_head")) for name in loaded.receipt.ignored)
    assert any(name.startswith("decoder.") for name in loaded.receipt.ignored)
    with torch.no_grad():
        wanted = whole.encoder(IDS).last_hidden_state
        assert torch.equal(loaded.module(IDS).last_hidden_state, wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [_clip, _t5])
def test_dtypes_are_those_of_the_library(tmp_path: Path, make: Any, precision: str) -> None:
    """Parameters, fp32 islands (T5's wo in fp16) and computed buffers alike."""
    model = make()
    _save(model, tmp_path)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    library = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    ours = _load(tmp_path, type(model).__name__, precision).module
    wanted = {name: x.dtype for name, x in [*library.named_parameters(), *library.named_buffers()]}
    got = {name: x.dtype for name, x in [*ours.named_parameters(), *ours.named_buffers()]}
    assert got == wanted
    assert dtype in got.values()
    assert (torch.float32 in got.values()) == (
        precision == "fp32" or (make, precision) == (_t5, "fp16")
    )
    _assert_same_forward(ours, library)


def test_a_config_of_a_whole_serves_its_text_part(tmp_path: Path) -> None:
    clip = _clip()
    _save(clip, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "clip", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    _assert_same_forward(_load(tmp_path, "CLIPTextModel").module, clip)


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _save(_clip(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(CheckpointError, match=r"config\.json does not fit CLIPTextModel"):
        _load(tmp_path, "CLIPTextModel")


def test_another_size_than_the_config_says_is_misshapen(tmp_path: Path) -> None:
    _save(_clip(), tmp_path)
    _clip(hidden_size=8, intermediate_size=12).config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"Misshapen \(\d+\): .*stored 30x16, the model has 30x8"
    ):
        _load(tmp_path, "CLIPTextModel")


def test_a_class_that_the_library_lacks_is_named(tmp_path: Path) -> None:
    _save(_clip(), tmp_path)
    with pytest.raises(CheckpointError, match="has no class CLIPTextModel99"):
        _load(tmp_path, "CLIPTextModel99")


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    _save(_clip(), tmp_path)
    with pytest.raises(CheckpointError, match="CLIPTextConfig is no torch module"):
        _load(tmp_path, "CLIPTextConfig")


def _spread(folder: Path, architecture: str, groups: dict[str, int]) -> Any:
    """Loaded as the second rank of a run in which weights may be spread over these groups."""
    spreads = tuple(Group(name, 1, tuple(range(size))) for name, size in groups.items())
    parallel = dataclasses.replace(ParallelState.single(), spreads=spreads)
    return _load(folder, architecture, parallel=parallel)


@pytest.mark.parametrize("make", [_clip, _t5])
def test_an_encoder_is_spread_over_all_ranks(tmp_path: Path, make: Any) -> None:
    model = make()
    _save(model, tmp_path)
    loaded = _spread(tmp_path, type(model).__name__, {"weights": 2, "tp": 1})
    assert loaded.receipt.sharded > 10
    whole = sum(p.numel() for p in model.parameters())
    held = sum(p.numel() for p in loaded.module.parameters())
    assert held < 0.56 * whole  # norms and CLIP's positions are whole


def test_an_encoder_that_does_not_divide_is_spread_over_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(_clip(), tmp_path)
    caplog.set_level(logging.INFO, logger="sglang")
    loaded = _spread(tmp_path, "CLIPTextModel", {"weights": 8, "ulysses x tp": 4, "tp": 2})
    attention = loaded.module.encoder.layers[0].self_attn
    assert attention.q_proj.weight.shape == (8, 16)
    assert attention.num_heads == 1
    notes = [record.message for record in caplog.records]
    assert notes == [
        "text_encoder: num_attention_heads=2 of CLIPTextModel does not divide over 8 ranks; it is "
        "spread over 2 (tp), and each slice is held 4 times"
    ]


@pytest.mark.parametrize("groups", [{"weights": 2}, {"weights": 8, "tp": 2}, {"weights": 8}, {}])
def test_an_encoders_share_is_that_of_the_ranks_it_divides_over(
    tmp_path: Path, groups: dict[str, int]
) -> None:
    _save(_clip(), tmp_path)
    spreads = tuple(Group(name, 1, tuple(range(size))) for name, size in groups.items())
    weights = spreads[0] if spreads else Group("weights")
    parallel = dataclasses.replace(ParallelState.single(), spreads=spreads, weights=weights)

    def facts(parallel: ParallelState) -> int:
        spec = ComponentSpec(
            name="text_encoder", path=tmp_path, library="transformers",
            architecture="CLIPTextModel", precision="fp32", device="cpu", parallel=parallel,
        )  # fmt: skip
        return component_facts(spec, TextEncoderLoader(), "text_encoder").nbytes

    whole = facts(ParallelState.single())
    if groups == {"weights": 8}:
        with pytest.raises(UserError, match="does not divide over the ranks"):
            facts(parallel)
        return
    share = 2 if groups else 1
    assert whole / share <= facts(parallel) <= 1.05 * whole / share


def test_an_encoder_that_divides_over_no_group_is_refused(tmp_path: Path) -> None:
    _save(_clip(num_attention_heads=1, hidden_size=15, intermediate_size=24), tmp_path)
    said = (
        r"text_encoder: num_attention_heads=1 of CLIPTextModel does not divide over the ranks of "
        r"tensor and sequence parallelism: 4 \(weights\) or 2 \(tp\)\. Choose another --tp-size"
    )
    with pytest.raises(UserError, match=said):
        _spread(tmp_path, "CLIPTextModel", {"weights": 4, "tp": 2})


def test_an_encoder_without_a_plan_is_not_replicated(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
    )
    _save(Qwen2Model(config), tmp_path)
    said = "Qwen2Model has no TP_PLAN, so each of 2 ranks would hold all of it"
    with pytest.raises(UserError, match=said):
        _spread(tmp_path, "Qwen2Model", {"weights": 2})
