"""What ``sglang generate`` tells at the end: one line of JSON for programs, a table for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sglang.multimodal_gen.runtime.entrypoints.generated import Generated, GeneratedImage

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import GenerationResult


def json_line(result: GenerationResult, paths: Sequence[Path]) -> str:
    """The result as one line of ASCII JSON."""
    # A disk may fill up midway.
    outputs = [_output(*pair) for pair in zip(result.outputs, paths, strict=False)]
    summary: dict[str, Any] = {
        "videos" if result.videos else "images": outputs,
        "timings": result.timings,
        "load_seconds": result.load_seconds,
        "peak_memory_mb": result.peak_memory_mb,
        "warnings": result.warnings,
        "model": result.model,
        "backend": result.backend,
        "parameters": result.parameters,
    }
    if result.step_cache is not None:
        summary["step_cache"] = dataclasses.asdict(result.step_cache)
    return json.dumps(summary, default=str)


def _output(output: Generated, path: Path) -> dict[str, Any]:
    pixels = output.array if isinstance(output, GeneratedImage) else output.frames
    height, width, _ = pixels.shape[-3:]
    about = {"path": str(path), "prompt": output.prompt, "seed": output.seed}
    about |= {"width": width, "height": height}
    if not isinstance(output, GeneratedImage):
        about |= {"num_frames": len(pixels), "fps": output.fps}
    return about


def print_notes(notes: Iterable[str], stream: TextIO) -> None:
    """The choices that were made for the user, each once."""
    _print_marked("note", "dim", notes, stream)


def print_warnings(warnings: Iterable[str], stream: TextIO) -> None:
    """What the user should know about the result, each once, in yellow on a terminal."""
    _print_marked("warning", "yellow", warnings, stream)


def print_times(result: GenerationResult, stream: TextIO) -> None:
    """Seconds by stage, in running order, and the memory that it took."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {"load": result.load_seconds, **result.timings}
    for name, seconds in rows.items():
        table.add_row(Text(name), f"{seconds:.2f} s")
    table.add_row("total", f"{sum(rows.values()):.2f} s", style="bold")
    if (used := result.step_cache) is not None:
        total = used.computed + used.left_out
        table.add_row("forwards that left blocks out", f"{used.left_out} of {total}")
    table.add_row("peak memory", f"{result.peak_memory_mb:.0f} MiB")
    Console(file=stream).print(table)


def _print_marked(word: str, style: str, sentences: Iterable[str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, soft_wrap=True, highlight=False)
    for sentence in dict.fromkeys(sentences):
        # A Text, since a sentence may quote a prompt with [brackets].
        console.print(Text(f"{word}: {sentence}", style=style))
