"""Watch a picture being made, and stop it half-way by raising from the callback."""

from __future__ import annotations

from sglang.multimodal_gen import Cancelled, DiffGenerator, ProgressEvent


def watch(event: ProgressEvent) -> None:
    print(f"{event.label}: {event.done} of {event.total}")


def stop_half_way(event: ProgressEvent) -> None:
    watch(event)
    if event.phase == "denoise" and event.done >= event.total // 2:
        raise Cancelled(f"enough after {event.done} steps")


def main() -> None:
    with DiffGenerator.from_pretrained(model_path="demo") as generator:
        try:
            generator.generate(prompt="a green triangle", progress=stop_half_way)
        except Cancelled as reason:
            print(f"stopped: {reason}")
        picture = generator.generate(prompt="a green triangle", seed=1, progress=watch)[0]
    print(f"done: {picture.array.shape}, seed {picture.seed}")


if __name__ == "__main__":
    main()
