"""The ``sglang`` command: chooses a subcommand, and is the one place that tells errors to a shell.

A fault of the user or of a checkpoint is one paragraph on standard error and exit code 2; Ctrl-C is
one line and 130; anything else is a bug and keeps its traceback.

Each command is imported when it is asked for: ``sglang --help`` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from sglang.multimodal_gen.runtime.entrypoints.cli.streams import give_up_output, make_usable
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    NonFiniteOutput,
    UserError,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

COMMANDS = {
    "generate": "make pictures from prompts",
    "serve": "serve a model over HTTP, with OpenAI's API",
    "replay": "make a picture again from the settings in it, and compare",
    "bench": "time steps or requests, beside Diffusers; or a server under load",
    "models": "list the model families and paths known; explain a pipeline",
    "new-model": "write the files of a new model family",
    "verify": "compare a family with its reference, step by step",
    "plan": "say what a request would take on a GPU, without one",
    "version": "print the versions of this package and of what it runs on",
}
_EXIT_FAILED = 1
_EXIT_USER = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_EXIT_TERMINATED = 143  # 128 + SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    make_usable()
    try:
        with _termination_unwinds():
            return _dispatch(words)
    except (UserError, CheckpointError) as error:
        print(f"sglang: error: {error}", file=sys.stderr)
        return _EXIT_USER
    except KeyboardInterrupt:
        print("sglang: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except (NonFiniteOutput, WorkerDied) as error:
        print(f"sglang: error: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except BrokenPipeError:
        # Whoever read our output left: nobody is there to tell.
        give_up_output()
        return _EXIT_BROKEN_PIPE


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return _EXIT_USER
    command, rest = words[0], words[1:]
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "--version":
        command = "version"
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise UserError(f"there is no command {command!r}.{hint} Known: {', '.join(COMMANDS)}.")
    module = importlib.import_module(f"{__package__}.{command.replace('-', '_')}")
    return module.run(rest)


def _help() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sglang COMMAND [options]",
            "",
            "Makes pictures and videos with diffusion models.",
            "",
            "commands:",
            *lines,
            "",
            "'sglang COMMAND --help' lists a command's options.",
            'A first picture: sglang generate --prompt "a red circle on a white background"',
        ]
    )


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that temporary files go as they do after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(_EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
