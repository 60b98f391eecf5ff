"""The quality meter: a checkpoint draws held-out prompts through the runtime, the grader counts.

``python -m examples.train_demo_model.evaluate --model-path demo --prompts 200 --steps 20 --seed 0``
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from examples.train_demo_model.grade import grade
from examples.train_demo_model.sampling import Score, contact_sheet, test_prompts
from sglang.multimodal_gen import DiffGenerator


def evaluate(
    model_path: str, *, prompts: int, steps: int, seed: int, batch: int, **server_args: Any
) -> Score:
    """The runtime's pictures of ``prompts`` held-out prompts, graded; what a step cache left out is
    told on the way.

    Picture ``i`` has seed ``i``, whatever the batch; ``seed`` chooses the prompts (0: the test).
    """
    scenes, texts = test_prompts(seed, prompts)
    pictures: list[np.ndarray] = []
    left_out = forwards = 0
    with DiffGenerator.from_pretrained(
        model_path=model_path, batching_max_size=batch, **server_args
    ) as generator:
        for start in range(0, prompts, batch):
            chosen = texts[start : start + batch]
            result = generator.generate(prompt=chosen, num_inference_steps=steps, seed=start)
            pictures += [image.array for image in result.images]
            if (used := result.step_cache) is not None:
                left_out += used.left_out
                forwards += used.left_out + used.computed
            print(f"{len(pictures)}/{prompts}", end="\r", file=sys.stderr, flush=True)
    if forwards:
        print(f"blocks left out of {left_out} of {forwards} forwards", file=sys.stderr)
    faults = [grade(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    return Score(np.stack(pictures), texts, faults)


def report(result: Score, seconds: float, forms: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a person reads: the count, by ``forms``, the sorts of faults, what is wrong."""
    total = len(result.prompts)
    lines = [
        f"right: {result.right}/{total} ({100 * result.right / total:.1f}%) in {seconds:.0f} s"
    ]
    lines += [f"  {form:14} {share}" for form, share in forms.items()]
    for sort, count in sorted(result.table().items(), key=lambda item: -item[1]):
        lines.append(f"  {sort:12} {count}")
    for prompt, faults in zip(result.prompts, result.faults, strict=True):
        if faults:
            details = "; ".join(f"{fault.sort}: {fault.detail}" for fault in faults)
            lines.append(f"  - {prompt}\n      {details}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Evaluates, prints, and writes the contact sheet; exit status 1 under ``--at-least``."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo_model.evaluate")
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="which held-out prompts; 0: the test")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--step-cache", default="off", help="off, first-block or teacache")
    parser.add_argument("--step-cache-threshold", type=float)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (PNG) here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="share that must be right, 0..1"
    )
    parser.add_argument("--quantization", help="as sglang generate takes it; left out: none")
    args = parser.parse_args(argv)

    begin = time.monotonic()
    result = evaluate(
        args.model_path,
        prompts=args.prompts,
        steps=args.steps,
        seed=args.seed,
        batch=args.batch,
        quantization=args.quantization,
        default_step_cache=args.step_cache,
        default_step_cache_threshold=args.step_cache_threshold,
    )
    print(report(result, time.monotonic() - begin, result.by_form()))
    if args.sheet is not None:
        contact_sheet(result).save(args.sheet)
    if args.json is not None:
        figures = {"right": result.right, "of": args.prompts, "faults": result.table()}
        figures["forms"] = result.by_form()
        args.json.write_text(json.dumps(figures) + "\n")
    return 0 if result.right >= args.at_least * args.prompts else 1


if __name__ == "__main__":
    sys.exit(main())
