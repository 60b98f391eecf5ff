"""``sglang version``: what is installed, without importing any of it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser

_RUNS_ON = ("torch", "diffusers", "transformers", "safetensors")


def run(argv: Sequence[str]) -> int:
    """Print the versions; returns the exit code."""
    parser = FlagParser("sglang version", "Print the versions of this package and its parts.")
    if "help" in parser.parse(argv):
        parser.print_help()
        return 0
    print(f"sglang-diffusion {__version__}")
    for name in _RUNS_ON:
        print(f"{name} {_installed(name)}")
    print(f"python {platform.python_version()}")
    return 0


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
