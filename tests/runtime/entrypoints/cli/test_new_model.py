from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.entrypoints.cli.new_model import EXTERNAL, IN_TREE

ROOT = Path(__file__).parents[4]
LONGEST = "painter_of_small_scenes2"
RUFF = Path(sys.executable).with_name("ruff")
FAMILY_FILES = [path for path in IN_TREE if path.startswith("python/")]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a source tree is recognised by, and what ruff needs."""
    package = tmp_path / "python/sglang/multimodal_gen"
    package.mkdir(parents=True)
    (package / "registry.py").write_text('"""Stands for the real one."""\n')
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(*command: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environ
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["brush_model", "x", LONGEST])
def test_files_of_the_tree_pass_the_projects_lint(tree: Path, name: str) -> None:
    assert main(["new-model", name, "--into", str(tree)]) == 0
    for arguments in (("check",), ("format", "--check", "--diff")):
        done = run(RUFF, *arguments, ".", cwd=tree)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["brush_model", "x", LONGEST])
def test_files_of_a_package_are_tidy(tmp_path: Path, name: str) -> None:
    assert main(["new-model", name, "--into", str(tmp_path), "--external"]) == 0
    tidy = ("--isolated", "--line-length", "100")
    for arguments in (("check", "--select", "E,F,W,B,UP"), ("format", "--check", "--diff")):
        done = run(RUFF, *arguments, *tidy, ".", cwd=tmp_path / name.replace("_", "-"))
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_four_files_and_a_test_are_written(tree: Path, capsys) -> None:
    assert main(["new-model", "my_model", "--into", str(tree)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert written == [tree / path.format(name="my_model") for path in IN_TREE]
    assert len(FAMILY_FILES) == 4
    assert all(path.is_file() for path in written)


@pytest.mark.slow
def test_a_family_in_the_tree_is_discovered_and_keeps_the_rules(tmp_path: Path) -> None:
    """The real tree, copied, with a generated family beside its own."""
    ignored = shutil.ignore_patterns("bundled", "__pycache__", ".git", ".*_cache", ".hypothesis")
    copy = tmp_path / "copy"
    for part in ("python", "tests", "docs", "pyproject.toml"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=ignored)
        else:
            shutil.copy(source, copy)
    assert main(["new-model", "brush_model", "--into", str(copy)]) == 0
    code = """
        from sglang.multimodal_gen.registry import known_models
        from sglang.multimodal_gen.runtime.entrypoints.cli.explained import explain
        from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
        names = [name for known in known_models() for name in known.pipelines]
        assert "BrushModelPipeline" in names
        assert explain("BrushModelPipeline")[-1].name == "decoding_stage"
        print(ModelRegistry.resolve_model_cls("BrushModelTransformer2DModel")[0].__module__)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = run(sys.executable, "-c", code, cwd=copy, PYTHONPATH=str(copy / "python"))
    assert done.stdout.strip() == "sglang.multimodal_gen.runtime.models.dits.brush_model", (
        done.stderr
    )
    rules = "one_spelling or names_no_family or single_device or in_a_head"
    tests = ("tests/test_architecture.py", "tests/parity/test_brush_model.py")
    done = run(sys.executable, "-m", "pytest", "-q", "-k", f"{rules} or parity_rows", *tests,
               cwd=copy)  # fmt: skip
    assert "1 failed" in done.stdout, done.stdout
    assert "brush_model has no parity rows yet. Write a tiny checkpoint" in done.stdout


@pytest.mark.slow
def test_a_generated_package_registers_and_its_test_says_what_is_missing(tmp_path: Path) -> None:
    assert main(["new-model", "my_model", "--external", "--into", str(tmp_path)]) == 0
    root = tmp_path / "my-model"
    names = {path.format(name="my_model", dashed="my-model") for path in EXTERNAL}
    assert {str(p.relative_to(tmp_path)) for p in root.rglob("*") if p.is_file()} == names
    path = f"{root}:{ROOT / 'python'}"
    code = """
        from sglang.multimodal_gen.runtime.entrypoints.cli.explained import explain
        from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
        assert explain("MyModelPipeline")[-1].name == "decoding_stage"
        print(ModelRegistry.resolve_model_cls("MyModelTransformer2DModel")[0].__module__)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=path,
               SGLANG_EXTERNAL_MODEL_PACKAGE="my_model")  # fmt: skip
    assert done.stdout.strip() == "my_model.model", done.stderr
    done = run(sys.executable, "-m", "pytest", "-q", cwd=root, PYTHONPATH=path)
    assert done.returncode == 1, done.stdout
    assert "my_model has no parity test yet. Say in CHECKPOINT which" in done.stdout


def test_nothing_is_overwritten(tree: Path, capsys) -> None:
    taken = tree / "python/sglang/multimodal_gen/runtime/pipelines/my_model.py"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    before = sorted(tree.rglob("*"))
    assert main(["new-model", "my_model", "--into", str(tree)]) == 2
    assert "runtime/pipelines/my_model.py; nothing was written" in capsys.readouterr().err
    assert sorted(tree.rglob("*")) == before
    assert taken.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MyModel", "Did you mean 'my_model'"),
        ("my-model", "Did you mean 'my_model'"),
        ("../evil", "lower-case letters"),
        ("class", "lower-case letters"),
        ("a__b", "lower-case letters"),
        ("9lives", "lower-case letters"),
        (LONGEST + "s", "at most 24"),
        ("base", "shared by all families"),
    ],
)
def test_a_bad_name_is_refused(tree: Path, capsys, name: str, said: str) -> None:
    assert main(["new-model", name, "--into", str(tree)]) == 2
    assert said in capsys.readouterr().err


def test_a_package_does_not_take_the_name_of_another(tmp_path: Path, capsys) -> None:
    assert main(["new-model", "json", "--external", "--into", str(tmp_path)]) == 2
    assert "of that name is here already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which name?"),
        (["my_model"], "is not the root of this project's source tree"),
        (["my_model", "--into", "nowhere"], "no such folder"),
        (["my_model", "--extrenal"], "Did you mean"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, argv: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-model", *argv]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_is_printed(capsys) -> None:
    assert main(["new-model", "--help"]) == 0
    assert "--external" in capsys.readouterr().out
