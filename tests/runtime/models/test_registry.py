from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.models.registry import (
    ModelRegistry,
    RegistrationError,
    _ModelRegistry,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, DiffusionError


class Denoiser:
    pass


class Other:
    pass


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an importable package whose name is the folder's."""
    root = tmp_path / f"models_{abs(hash(tmp_path.name))}"
    root.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def _registry(package: Path, **files: str) -> _ModelRegistry:
    for name, source in files.items():
        path = package / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return _ModelRegistry(package, package.name)


@pytest.fixture
def registry(package: Path) -> _ModelRegistry:
    return _registry(package)


def test_built_in_models_are_found_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from sglang.multimodal_gen.runtime.models.registry import ModelRegistry\n"
        "assert 'FluxTransformer2DModel' in ModelRegistry.get_supported_archs()\n"
        "assert ModelRegistry.knows('FluxTransformer2DModel')\n"
        "heavy = {'torch', 'diffusers', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_built_in_model_is_resolved() -> None:
    cls, name = ModelRegistry.resolve_model_cls("FluxTransformer2DModel")
    assert cls.__module__ == "sglang.multimodal_gen.runtime.models.dits.flux"
    assert (cls.__name__, name) == ("FluxTransformer2DModel", "FluxTransformer2DModel")


def test_a_class_is_registered(registry: _ModelRegistry) -> None:
    registry.register_model("DenoiserModel", Denoiser)
    assert registry.resolve_model_cls("DenoiserModel") == (Denoiser, "DenoiserModel")
    assert registry.get_supported_archs() == ["DenoiserModel"]


def test_a_string_is_imported_when_it_is_first_resolved(package: Path) -> None:
    _registry(package, lazy="class Lazy:\n    pass\n")
    registry = _ModelRegistry(package / "nothing", package.name)
    registry.register_model("LazyModel", f"{package.name}.lazy:Lazy")
    assert registry.knows("LazyModel")
    assert f"{package.name}.lazy" not in sys.modules
    cls, _ = registry.resolve_model_cls("LazyModel")
    assert cls is sys.modules[f"{package.name}.lazy"].Lazy
    assert registry.resolve_model_cls("LazyModel")[0] is cls


@pytest.mark.parametrize("bad", ["module.Class", "a:b:c", ":Class", "module:", "", ":"])
def test_a_bad_string_is_refused(registry: _ModelRegistry, bad: str) -> None:
    with pytest.raises(ValueError, match="format `<module>:<class>`") as caught:
        registry.register_model("Model", bad)
    assert isinstance(caught.value, DiffusionError)
    assert not registry.knows("Model")


def test_what_is_no_class_is_refused(registry: _ModelRegistry) -> None:
    with pytest.raises(RegistrationError, match="expected a class"):
        registry.register_model("Model", Denoiser())  # pyright: ignore[reportArgumentType]


def test_a_taken_name_is_refused_unless_overwritten(registry: _ModelRegistry) -> None:
    registry.register_model("Model", Denoiser)
    with pytest.raises(RegistrationError, match="overwrite=True"):
        registry.register_model("Model", Other)
    assert registry.resolve_model_cls("Model")[0] is Denoiser
    registry.register_model("Model", Other, overwrite=True)
    assert registry.resolve_model_cls("Model")[0] is Other


def test_a_built_in_name_is_taken_too(package: Path) -> None:
    registry = _registry(package, a="class Model: ...\nEntryClass = Model\n")
    with pytest.raises(RegistrationError, match="already registered"):
        registry.register_model("Model", Other)


def test_the_first_known_of_several_names_is_taken(registry: _ModelRegistry) -> None:
    registry.register_model("B", Denoiser)
    registry.register_model("C", Other)
    assert registry.resolve_model_cls(["A", "B", "C"]) == (Denoiser, "B")


def test_an_unknown_name_is_refused_with_the_nearest(registry: _ModelRegistry) -> None:
    registry.register_model("FluxTransformer2DModel", Denoiser)
    with pytest.raises(CheckpointError, match="Did you mean 'FluxTransformer2DModel'") as caught:
        registry.resolve_model_cls("FluxTransformer3DModel")
    assert "Unsupported model architecture: FluxTransformer3DModel" in str(caught.value)


def test_no_name_at_all_is_refused(registry: _ModelRegistry) -> None:
    with pytest.raises(CheckpointError, match="none given"):
        registry.resolve_model_cls([])


def test_every_form_of_entry_class_and_aliases_is_found(package: Path) -> None:
    registry = _registry(
        package,
        one="""
            class One:
                _aliases = ["Uno", "Eins"]
            class Helper: ...
            EntryClass = One
        """,
        several="""
            class Two:
                _aliases: list[str] = ["Dos"]
            class Three: ...
            EntryClass: list[type] = [Two, Three]
        """,
        nested="class Four: ...\nEntryClass = (Four,)\n",
        none="class Five: ...\n",
    )
    archs = registry.get_supported_archs()
    assert archs == ["Four", "One", "Three", "Two"]
    assert all(registry.knows(alias) for alias in ("Uno", "Eins", "Dos"))
    cls, name = registry.resolve_model_cls("Dos")
    assert (cls.__name__, name) == ("Two", "Two")
    assert cls is registry.resolve_model_cls("Two")[0]


def test_one_name_from_two_files_is_refused(package: Path) -> None:
    source = "class Model: ...\nEntryClass = Model\n"
    registry = _registry(package, a=source, b=source)
    with pytest.raises(RegistrationError, match=r"'Model' is offered twice: by .*\.a:Model and"):
        registry.get_supported_archs()


@pytest.mark.parametrize(
    "source",
    [
        "EntryClass = 'Model'\n",
        "EntryClass = [1]\n",
        "class A:\n    _aliases = [NAME]\nEntryClass = A",
    ],
)
def test_an_entry_class_that_cannot_be_read_is_refused(package: Path, source: str) -> None:
    with pytest.raises(RegistrationError, match=r"a\.py"):
        _registry(package, a=source).get_supported_archs()


def test_a_failing_import_is_the_callers_to_see(package: Path) -> None:
    source = "import no_such_dependency\nclass Model: ...\nEntryClass = Model\n"
    registry = _registry(package, broken=source)
    assert registry.knows("Model")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.resolve_model_cls("Model")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        registry.resolve_model_cls("Model")


def test_a_class_that_is_not_there_is_named(package: Path) -> None:
    _registry(package, empty="")
    registry = _ModelRegistry(package / "nothing", package.name)
    registry.register_model("Model", f"{package.name}.empty:Model")
    with pytest.raises(RegistrationError, match=r"empty:Model .* no such class"):
        registry.resolve_model_cls("Model")
