from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.models.external_packages import ExternalPackages
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
LOOK_UPS = {
    "ModelRegistry.knows": "ModelRegistry.knows('ExternalModel')",
    "ModelRegistry.get_supported_archs": "'ExternalModel' in ModelRegistry.get_supported_archs()",
    "ModelRegistry.resolve_model_cls": "ModelRegistry.resolve_model_cls('ExternalModel')",
    "known_models": "[ModelRegistry._has('ExternalModel') for _ in registry.known_models()][0]",
    "REGISTRY.get_pipeline_class": (
        "registry.REGISTRY.get_pipeline_class('FluxPipeline') "
        "and ModelRegistry._has('ExternalModel')"
    ),
    "get_model_info": ("registry.get_model_info('demo') and ModelRegistry._has('ExternalModel')"),
}
PACKAGE = """
import pathlib
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
ModelRegistry.register_model("ExternalModel", "collections:OrderedDict")
log = pathlib.Path(__file__).with_name("imports.txt")
log.write_text(log.read_text() + "x" if log.exists() else "x")
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes importable packages, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def package(name: str, source: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(textwrap.dedent(source))
        names.append(name)
        return folder

    yield package
    for name in names:
        sys.modules.pop(name, None)


def entry_points(tmp_path: Path, **points: str) -> None:
    """An installed distribution's metadata, as pip leaves it."""
    info = tmp_path / "painters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: painters\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[sglang_diffusion.models]", *lines]))


def run(code: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])} | environ
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("look_up", list(LOOK_UPS))
def test_every_look_up_imports_the_package_first_and_once(write, tmp_path: Path, look_up) -> None:
    folder = write("external_one", PACKAGE)
    code = f"""
        from sglang.multimodal_gen import registry
        from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
        import sys
        assert "external_one" not in sys.modules
        for _ in range(2):
            assert {LOOK_UPS[look_up]}
        assert ModelRegistry.knows("ExternalModel") and registry.known_models()
    """
    done = run(code, tmp_path, **{VARIABLE: "external_one"})
    assert done.returncode == 0, done.stderr
    assert (folder / "imports.txt").read_text() == "x"


def test_a_failing_import_stops_the_command_with_its_own_traceback(write, tmp_path: Path) -> None:
    write("external_broken", "raise RuntimeError('no licence for this model')")
    code = """
        import sys
        from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
        sys.exit(main(["models"]))
    """
    done = run(code, tmp_path, **{VARIABLE: "external_broken"})
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "external_broken/__init__.py" in done.stderr
    assert "RuntimeError: no licence for this model" in done.stderr
    assert f"{VARIABLE} names 'external_broken'" in done.stderr
    assert "sglang: error" not in done.stderr
    assert not done.stdout


def test_several_packages_are_imported_in_their_order(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("external_b", "external_a"):
        write(name, f"import builtins\nbuiltins.seen = [*getattr(builtins, 'seen', []), {name!r}]")
    monkeypatch.setenv(VARIABLE, "external_b, external_a")
    packages = ExternalPackages()
    packages.load()
    packages.load()
    import builtins

    assert vars(builtins).pop("seen") == ["external_b", "external_a"]


def test_nothing_set_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    ExternalPackages().load()


def test_a_failure_stays_the_same_failure(write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "external_half", "import builtins\nbuiltins.tries = getattr(builtins, 'tries', 0) + 1\n1/0"
    )
    monkeypatch.setenv(VARIABLE, "external_half")
    packages = ExternalPackages()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="names 'external_half'"):
            packages.load()
    import builtins

    assert vars(builtins).pop("tries") == 1


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "external_nowhere")
    with pytest.raises(ModuleNotFoundError, match=f"{VARIABLE} names 'external_nowhere'"):
        ExternalPackages().load()


@pytest.mark.parametrize("name", ["my-package", "./package", "a/b", "a..b"])
def test_what_is_no_package_name_is_explained(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(PipelineDefinitionError, match="no name of a package as Python imports it"):
        ExternalPackages().load()


def test_an_error_told_without_a_traceback_elsewhere_keeps_its_own_here(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        from sglang.multimodal_gen.runtime.utils.errors import UserError
        raise UserError("my own words")
    """
    write("external_user_error", source)
    monkeypatch.setenv(VARIABLE, "external_user_error")
    with pytest.raises(PipelineDefinitionError, match=r"external_user_error.*my own words") as it:
        ExternalPackages().load()
    assert not isinstance(it.value, ValueError)
    assert it.value.__cause__ is not None


def test_a_package_that_ends_the_program_is_told_in_words(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("external_exit", "import sys\nsys.exit(3)")
    monkeypatch.setenv(VARIABLE, "external_exit")
    packages = ExternalPackages()
    for _ in range(2):
        with pytest.raises(PipelineDefinitionError, match=r"'external_exit'.*sys\.exit\(3\)"):
            packages.load()


def test_a_package_may_look_something_up_while_it_is_imported(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = ExternalPackages()
    monkeypatch.setattr(sys.modules[__name__], "packages", packages, raising=False)
    write("external_asking", f"import sys\nsys.modules[{__name__!r}].packages.load()")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setenv(VARIABLE, "external_asking")
    packages.load()
    assert "external_asking" in sys.modules


def test_entry_points_are_modules_and_functions_each_loaded_once(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    source = """
        calls = ["import"]
        def register():
            calls.append("register")
    """
    write("external_points", source)
    entry_points(tmp_path, first="external_points", second="external_points:register")
    packages = ExternalPackages()
    packages.load()
    packages.load()
    assert sys.modules["external_points"].calls == ["import", "register"]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("external_absent", ModuleNotFoundError),
        ("external_points:absent", AttributeError),
        ("external_points:broken", KeyError),
    ],
)
def test_a_broken_entry_point_is_named(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, error: type[Exception]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    write("external_points", "def broken():\n    raise KeyError('x')\n")
    entry_points(tmp_path, shiny=value)
    with pytest.raises(error, match=f"entry point 'shiny' = '{value}' of painters"):
        ExternalPackages().load()


@pytest.mark.parametrize("value", ["number", "Klass"])
def test_an_entry_point_that_registers_nothing_is_refused(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    write("external_points", "number = 3\nclass Klass:\n    pass\n")
    entry_points(tmp_path, shiny=f"external_points:{value}")
    with pytest.raises(PipelineDefinitionError, match="neither a module") as caught:
        ExternalPackages().load()
    assert "'shiny'" in str(caught.value.__notes__)
