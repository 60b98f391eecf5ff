"""``sglang new-model``: the files of a new model family, in this source tree or in a package."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.utils.errors import OutputError, UserError

_PACKAGE = "python/sglang/multimodal_gen"
IN_TREE: Mapping[str, tuple[str, ...]] = {
    f"{_PACKAGE}/configs/sample/{{name}}.py": ("sample.py",),
    f"{_PACKAGE}/configs/pipeline_configs/{{name}}.py": ("pipeline_config.py", "register.py"),
    f"{_PACKAGE}/runtime/pipelines/{{name}}.py": ("pipeline.py",),
    f"{_PACKAGE}/runtime/models/dits/{{name}}.py": ("dit.py",),
    "tests/parity/test_{name}.py": ("parity_test.py",),
}
"""File of a family, below the project's root -> the templates that make it."""
EXTERNAL: Mapping[str, tuple[str, ...]] = {
    "{dashed}/pyproject.toml": ("pyproject.toml",),
    "{dashed}/{name}/__init__.py": ("init.py",),
    "{dashed}/{name}/sample.py": ("sample.py",),
    "{dashed}/{name}/pipeline_config.py": ("pipeline_config.py",),
    "{dashed}/{name}/pipeline.py": ("pipeline.py",),
    "{dashed}/{name}/model.py": ("dit.py",),
    "{dashed}/tests/test_parity.py": ("external_parity_test.py",),
}
"""File of a package, below the folder that it is written into -> its templates."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MAX_NAME = 24
_SHARED_FILES = ("base", "sampling_params")  # stand where a family's files do


def run(argv: Sequence[str]) -> int:
    """Run the command; prints the files written, and returns the exit code."""
    parser = FlagParser(
        "sglang new-model",
        "Write the minimal files of a new model family, with a parity test that fails until it is "
        "filled in.",
        usage="sglang new-model NAME [--external] [--into FOLDER]",
        epilog="docs/adding_a_model.md walks from these files to a model that works.",
    )
    # Optional for argparse only, so that --help works alone.
    parser.add_argument("name", nargs="?", metavar="NAME", help="The family's name: my_model.")
    parser.add_switch("--external", "Write a package of its own, not files of this source tree.")
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        help="Root of this project's source tree, or the folder that gets the package's folder; "
        "the current one by default.",
    )
    said = vars(parser.parse(argv))
    if "help" in said:
        parser.print_help()
        return 0
    if said.get("name") is None:
        parser.error("which name? For example: sglang new-model my_model")
    external = "external" in said
    written = write_family(said["name"], Path(said.get("into") or "."), external=external)
    for path in written:
        print(path)
    print(_next_steps(said["name"], written, external=external), file=sys.stderr)
    return 0


def write_family(name: str, into: Path, *, external: bool) -> list[Path]:
    """Write a family's files; returns their paths.

    Raises:
        UserError: the name is no good, a file is there already, or ``into`` is no source tree.
        OutputError: a file cannot be written.
    """
    _check_name(name, external=external)
    if not into.is_dir():
        raise UserError(f"--into {into}: no such folder.")
    if not external and not (into / _PACKAGE / "registry.py").is_file():
        raise UserError(
            f"{into.resolve()} is not the root of this project's source tree: it has no "
            f"{_PACKAGE}. Give the root with --into, or write a package of its own with --external."
        )
    files = _rendered(name, EXTERNAL if external else IN_TREE)
    taken = [str(path) for path in files if (into / path).exists()]
    if taken:
        raise UserError(f"{into.resolve()} already has {', '.join(taken)}; nothing was written.")
    for path, text in files.items():
        try:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            with (into / path).open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            raise OutputError(f"{into / path} cannot be written: {problem}") from problem
    return [into / path for path in files]


def _check_name(name: str, *, external: bool) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or len(name) > _MAX_NAME:
        likely = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
        fits = _NAME.fullmatch(likely) and not keyword.iskeyword(likely)
        hint = f" Did you mean {likely!r}?" if fits and likely != name else ""
        raise UserError(
            f"NAME={name!r}: use lower-case letters, digits and single underscores, at most "
            f"{_MAX_NAME}, as in my_model.{hint}"
        )
    if not external and name in _SHARED_FILES:
        raise UserError(f"NAME={name!r}: a file of that name is shared by all families.")
    if external and importlib.util.find_spec(name) is not None:
        raise UserError(f"NAME={name!r}: a Python package of that name is here already.")


def _rendered(name: str, files: Mapping[str, tuple[str, ...]]) -> dict[Path, str]:
    """Relative path -> content."""
    words = {
        "name": name,
        "dashed": name.replace("_", "-"),
        "cls": "".join(part.capitalize() for part in name.split("_")),
    }
    folder = resources.files(f"{__package__}") / "templates"
    return {
        Path(path.format(**words)): "".join(
            Template((folder / f"{part}.tmpl").read_text(encoding="utf-8")).substitute(words)
            for part in parts
        )
        for path, parts in files.items()
    }


def _next_steps(name: str, written: Sequence[Path], *, external: bool) -> str:
    test = written[-1]
    if not external:
        return f"Next: make test ARGS={test}. It fails, and says what to fill in."
    root = test.parents[1]
    return (
        f"Next: pytest {root}. It fails, and says what to fill in. To serve the model, install "
        f"{root}, or put it on PYTHONPATH and set SGLANG_EXTERNAL_MODEL_PACKAGE={name}."
    )
