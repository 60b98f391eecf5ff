"""The quality meter: a checkpoint makes clips of held-out prompts through the runtime, graded.

``python -m examples.train_demo_video.evaluate --model-path demo-video --prompts 100``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_demo_model.evaluate import report
from examples.train_demo_model.sampling import Score
from examples.train_demo_video.clips import held_out_prompts
from examples.train_demo_video.grade import grade
from examples.train_demo_video.sampling import contact_sheet
from sglang.multimodal_gen import DiffGenerator


def evaluate(
    model_path: str, *, prompts: int, steps: int, seed: int, batch: int, **server_args: Any
) -> Score:
    """The runtime's clips of ``prompts`` held-out prompts, graded.

    Clip ``i`` has seed ``i``, whatever the batch; ``seed`` chooses the prompts (0: the test).
    """
    asked, texts = held_out_prompts(seed, prompts)
    made: list[np.ndarray] = []
    with DiffGenerator.from_pretrained(
        model_path=model_path, batching_max_size=batch, **server_args
    ) as generator:
        for start in range(0, prompts, batch):
            chosen = texts[start : start + batch]
            result = generator.generate(prompt=chosen, num_inference_steps=steps, seed=start)
            made += [video.frames for video in result.videos]
            print(f"{len(made)}/{prompts}", end="\r", file=sys.stderr, flush=True)
    faults = [grade(clip, wanted) for clip, wanted in zip(made, asked, strict=True)]
    return Score(np.stack(made), texts, faults)


def main(argv: list[str] | None = None) -> int:
    """Evaluates, prints, and writes the contact sheet; exit status 1 under ``--at-least``."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo_video.evaluate")
    parser.add_argument("--model-path", default="demo-video")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="which held-out prompts; 0: the test")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="share that must be right, 0..1"
    )
    args = parser.parse_args(argv)

    begin = time.monotonic()
    result = evaluate(
        args.model_path,
        prompts=args.prompts,
        steps=args.steps,
        seed=args.seed,
        batch=args.batch,
    )
    print(report(result, time.monotonic() - begin))
    if args.sheet is not None:
        contact_sheet(result).save(args.sheet)
    if args.json is not None:
        figures = {"right": result.right, "of": args.prompts, "faults": result.table()}
        args.json.write_text(json.dumps(figures) + "\n")
    return 0 if result.right >= args.at_least * args.prompts else 1


if __name__ == "__main__":
    sys.exit(main())
