"""Two pictures from the bundled model, with what they cost."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang.multimodal_gen import DiffGenerator


def main(folder: str = "outputs") -> None:
    with DiffGenerator.from_pretrained(model_path="demo") as generator:
        result = generator.generate(
            prompt=[
                "a small red circle above a large blue square on a white background",
                "a large yellow star on a blue background",
            ],
            seed=1,
        )
    for path, image in zip(result.save(folder), result, strict=True):
        print(f"{path}: seed {image.seed}, {image.prompt!r}")
    for stage, seconds in result.timings.items():
        print(f"{stage:28} {seconds:6.2f} s")
    print(f"loading {result.load_seconds:.2f} s, peak memory {result.peak_memory_mb:.0f} MiB")


if __name__ == "__main__":
    main(*map(str, map(Path, sys.argv[1:])))
