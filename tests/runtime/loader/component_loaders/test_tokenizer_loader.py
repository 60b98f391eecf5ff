from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPTokenizer, T5Tokenizer

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import ComponentSpec
from sglang.multimodal_gen.runtime.loader.component_loaders.tokenizer_loader import (
    ProcessorTokenizerLoader,
    TokenizerLoader,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

from parity.tiny_tokenizers import write_clip_tokenizer, write_t5_tokenizer


def _load(
    folder: Path,
    architecture: str | None,
    library: str | None = "transformers",
    loader: type[TokenizerLoader] = TokenizerLoader,
) -> Any:
    spec = ComponentSpec(
        name="tokenizer",
        path=folder,
        library=library,
        architecture=architecture,
        precision="fp32",
        device="cpu",
    )
    return loader().load(spec).module


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    write_clip_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    write_t5_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_clip_tokenizer_is_loaded(clip: Path) -> None:
    tokenizer = _load(clip, "CLIPTokenizer")
    assert isinstance(tokenizer, CLIPTokenizer)
    ids = tokenizer("red circle")["input_ids"]
    assert len(ids) == 4
    assert ids == CLIPTokenizer.from_pretrained(clip)("red circle")["input_ids"]
    assert tokenizer.model_max_length == 77


@pytest.mark.parametrize("name", ["T5TokenizerFast", "T5Tokenizer", None])
def test_a_t5_tokenizer_is_loaded(t5: Path, name: str | None) -> None:
    tokenizer = _load(t5, name)
    ids = tokenizer("red circle")["input_ids"]
    assert len(ids) == 3
    assert ids == T5Tokenizer.from_pretrained(t5)("red circle")["input_ids"]


def test_a_processors_tokenizer_is_the_one_that_its_files_name(t5: Path) -> None:
    name = "Qwen3VLProcessor"
    assert isinstance(_load(t5, name, loader=ProcessorTokenizerLoader), T5Tokenizer)
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        _load(t5, name)


def test_no_socket_is_opened(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    _load(clip, "CLIPTokenizer")


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_missing_vocabulary_is_refused(clip: Path, missing: str) -> None:
    """Transformers itself makes a tokenizer that knows no word."""
    (clip / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {missing} \(or tokenizer\.json\)"):
        _load(clip, "CLIPTokenizer")


@pytest.mark.parametrize("name", ["CLIPTokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast"])
def test_an_empty_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="lacks"):
        _load(tmp_path, name)


def test_an_empty_folder_is_refused_by_the_automatic_class(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        _load(tmp_path, None)


@pytest.mark.parametrize("content", ["", '{"a": ', "version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("file", ["vocab.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(clip: Path, file: str, content: str) -> None:
    (clip / file).write_text(content)
    with pytest.raises(CheckpointError, match=file):
        _load(clip, "CLIPTokenizer")


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_stub_of_a_text_file_is_named(clip: Path, content: str) -> None:
    (clip / "merges.txt").write_text(content)
    with pytest.raises(CheckpointError, match=r"merges\.txt is empty or a Git LFS pointer"):
        _load(clip, "CLIPTokenizer")


def test_valid_json_that_is_no_tokenizer_is_refused(t5: Path) -> None:
    (t5 / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        _load(t5, "T5TokenizerFast")


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPTextConfig"])
def test_what_is_no_tokenizer_is_refused(clip: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is no tokenizer"):
        _load(clip, name)


def test_an_unknown_class_is_not_replaced_by_another(clip: Path) -> None:
    with pytest.raises(CheckpointError, match="has no class CLIPTokenizer99"):
        _load(clip, "CLIPTokenizer99")


def test_a_class_of_another_library_is_refused(clip: Path) -> None:
    with pytest.raises(CheckpointError, match="library 'my_package'"):
        _load(clip, "CLIPTokenizer", "my_package")


def test_code_in_the_folder_does_not_run(clip: Path, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    (clip / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}, "tokenizer_class": "Evil"}'
    )
    (clip / "evil.py").write_text(f"from pathlib import Path\nPath({str(fired)!r}).touch()\n")
    _load(clip, "CLIPTokenizer")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        _load(clip, None)
    assert not fired.exists()
