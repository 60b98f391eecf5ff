"""The rules of the house that a machine can check (docs/structure.md says why each is there)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/sglang/multimodal_gen"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# The boundaries: around a request, around a rank's order, around whatever runs batches for the
# scheduler, around the HTTP application, and around a caller's callback.
BROAD_EXCEPT_ALLOWED = {
    "runtime/managers/worker.py",
    "runtime/managers/ranks/rank_loop.py",
    "runtime/managers/scheduler.py",
    "runtime/managers/job_keeper.py",  # all leases run out with its thread
    "runtime/entrypoints/http/errors.py",
    "runtime/entrypoints/http/app.py",  # the sweeps
    "runtime/pipelines_core/schedule_batch.py",
}
LONG_FILES_ALLOWED: dict[str, str] = {}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_imports_go_down_the_ladder():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_family_has_one_spelling_in_its_four_files():
    places = [
        "configs/sample",
        "configs/pipeline_configs",
        "runtime/pipelines",
        "runtime/models/dits",
    ]
    shared = {"__init__", "sampling_params", "base"}
    families = [{p.stem for p in (PACKAGE / place).glob("*.py")} - shared for place in places]
    assert families[0], "no family found: this test looks in the wrong place"
    assert all(family == families[0] for family in families), dict(
        zip(places, families, strict=True)
    )


@pytest.mark.parametrize("path", sorted((PACKAGE / "runtime/models").rglob("*.py")), ids=name_of)
def test_models_are_single_device_code(path):
    ranks = r"torch\.distributed|\bget_\w*(rank|group|world_size)\b|\bquant_config\b"
    words = re.findall(ranks, path.read_text())
    assert not words


FAMILY_FILES = {"configs/sample", "configs/pipeline_configs", "configs/models/dits",
                "runtime/pipelines", "runtime/models/dits"}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_shared_code_names_no_family(path):
    if name_of(path.parent) in FAMILY_FILES and path.stem not in ("base", "sampling_params"):
        return
    families = {p.stem for p in (PACKAGE / "runtime/models/dits").glob("*.py")} - {"__init__"}
    code = "\n".join(_identifiers_and_strings(tree_of(path)))
    for family in families - set(path.stem.split("_")):  # a library's class may bear the name
        # As a word of snake_case or CamelCase: "wants" is none of Wan's.
        word = rf"(?<![A-Za-z]){family}(?![a-z])|{family.capitalize()}(?![a-z])"
        assert not re.search(word, code), f"{family} in {name_of(path)}"


def _identifiers_and_strings(tree: ast.Module) -> list[str]:
    """What code can act on: names and literals, not docstrings."""
    found: list[str] = []
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.append(node.name)
        elif isinstance(node, ast.arg):
            found.append(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [] if id(node) in docstrings else [node.value]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_global_statement_and_broad_except_only_at_the_boundary(path):
    for node in ast.walk(tree_of(path)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler) and name_of(path) not in BROAD_EXCEPT_ALLOWED:
            caught = node.type
            names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
            broad = [n for n in names if n is None or getattr(n, "id", "") in
                     ("Exception", "BaseException")]  # fmt: skip
            reraises = any(isinstance(inner, ast.Raise) and inner.exc is None
                           for inner in ast.walk(node))  # fmt: skip
            assert not broad or reraises, f"line {node.lineno}: handled, translated or re-raised"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_fit_in_a_head_and_functions_on_a_screen(path):
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES or name_of(path) in LONG_FILES_ALLOWED
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_folder_or_module_is_a_drawer_for_everything():
    assert not [name_of(p) for p in SOURCES if p.stem in ("common", "utils", "misc", "helpers")]


def test_each_folder_of_the_package_is_on_the_map():
    text = (ROOT / "docs/structure.md").read_text()
    folders = {name_of(p.parent) for p in SOURCES} - {"."}
    missing = [folder for folder in sorted(folders) if f"`{folder}/`" not in text]
    assert not missing, f"docs/structure.md does not name {missing}"


def test_each_test_folder_mirrors_a_folder_of_the_package():
    own = {"parity", "seed_samples", "examples", "benchmarks"}
    for folder in sorted({p.parent for p in (ROOT / "tests").rglob("test_*.py")}):
        place = folder.relative_to(ROOT / "tests")
        if place.parts and place.parts[0] not in own:
            assert (PACKAGE / place).is_dir(), f"tests/{place} mirrors nothing"


IMPORT_PROBE = """
import importlib, json, logging, os, sys, warnings
def state(torch):
    backends = torch.backends
    return {
        "env": dict(os.environ),
        "handlers": [repr(h) for h in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "filters": len(warnings.filters),
        "tf32": (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "benchmark": backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }
import torch, diffusers, transformers, PIL.Image, yaml, rich
from diffusers import FlowMatchEulerDiscreteScheduler, AutoencoderKL
from transformers import CLIPTextModel, T5EncoderModel
before = state(torch)
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state(torch)
print(json.dumps([k for k in before if before[k] != after[k]]))
"""


def test_importing_every_module_changes_nothing():
    modules = [
        ".".join(("sglang.multimodal_gen", *p.relative_to(PACKAGE).with_suffix("").parts))
        for p in SOURCES
        if p.stem != "__init__"
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, *modules],
        cwd=ROOT / "python",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_public_names_are_sorted_and_documented():
    import sglang.multimodal_gen as package

    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_environment_variables_are_read_in_one_place():
    pattern = r"os\.(environ|getenv)|from os import .*(environ|getenv)"
    readers = [name_of(p) for p in SOURCES if re.search(pattern, p.read_text())]
    assert readers == ["runtime/utils/environ.py"]


def test_every_room_of_the_runtime_is_on_the_ladder():
    contract = (ROOT / "pyproject.toml").read_text()
    rooms = [p.name for p in (PACKAGE / "runtime").iterdir() if (p / "__init__.py").is_file()]
    assert rooms
    assert not [room for room in rooms if f"runtime.{room}" not in contract]
