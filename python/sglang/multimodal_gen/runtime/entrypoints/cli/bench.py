"""``sglang bench``: measurements, each a command of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from sglang.multimodal_gen.runtime.utils.errors import UserError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

COMMANDS = {
    "step": "time the steps of the denoising loop, beside Diffusers' and the GPU's floor",
    "request": "time whole requests, stage by stage, beside Diffusers' and the GPU's floor",
    "serve": "ask a server as many clients would, and judge its answers",
}
"""Name -> what it does; a command is the module ``bench_NAME`` beside this one, with ``run``."""


def run(argv: Sequence[str]) -> int:
    """Run ``sglang bench COMMAND``; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        known = ", ".join(COMMANDS)
        raise UserError(f"there is no 'sglang bench {command}'.{hint} Known: {known}.")
    module = importlib.import_module(f"{__package__}.bench_{command}")
    return module.run(rest)


def _help() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: sglang bench COMMAND [options]", "", "commands:", *lines])
