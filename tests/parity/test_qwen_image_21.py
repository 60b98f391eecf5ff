"""Qwen-Image 2.1 against Diffusers' ``QwenImage21Pipeline``: of text, and of text and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.managers.test_batching_with_a_model import Kept, difference
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, SchedulingLimits
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image, over_white
from sglang.multimodal_gen.runtime.verify.measure import largest_difference

from parity.compare import compare
from parity.harness import MOVED, ParityCase, assert_parity, checkpoint_folder
from parity.oracle import load_oracle, run_oracle, trace_of
from parity.runtime_trace import opened_runtime, record_runtime
from parity.test_qwen_image_edit import small_areas
from parity.tiny_adapters import Adapter
from parity.tiny_qwen_image_21 import TinyQwenImage21, family

SQUARE, ODD = (64, 64), (96, 160)
"""The latter in the language model's tokens: 3 x 5."""
SHAPES = {"wide": (90, 50), "tall": (40, 61), "other": (90, 50)}
GUIDED = {"negative_prompt": "a large blue square", "true_cfg_scale": 3.0}
ROWS: dict[str, dict[str, Any]] = {
    "text": {},
    "text, odd, guided": {"size": ODD, "request": {**GUIDED, "num_inference_steps": 3}},
    "text, guided by nothing": {
        "size": (128, 32),
        "request": {"negative_prompt": "", "true_cfg_scale": 2.0},
    },
    "prompts of one length, outputs": {
        "request": {
            **GUIDED,
            "prompt": ["a red fox", "a blue cat"],
            "num_outputs_per_prompt": 2,
        }
    },
    "a schedule of its own": {
        "checkpoint": TinyQwenImage21("qwen-image-21-sigmas", sample_sigmas=(1.0, 0.7, 0.2)),
        "request": {"num_inference_steps": 3},
    },
    "edit": {"pictures": ["wide"]},
    "edit, odd, guided": {"pictures": ["tall"], "size": ODD, "request": GUIDED},
    "edit of two": {"pictures": ["tall", "wide"], "request": GUIDED},
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with something in every corner, and partly transparent."""
    root = tmp_path_factory.mktemp("pictures")
    for index, (name, (width, height)) in enumerate(SHAPES.items()):
        generator = np.random.default_rng(index)
        coarse = Image.fromarray(generator.integers(0, 255, (4, 5, 4), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(root / f"{name}.png")
    return root


def case(folder: Path, name: str) -> ParityCase:
    """A row by its name."""
    row = ROWS[name]
    height, width = row.get("size", SQUARE)
    pictures = [str(folder / f"{picture}.png") for picture in row.get("pictures", ())]
    other = [str(folder / "other.png"), *pictures[1:]]
    request: dict[str, Any] = {
        "prompt": "make the fox red",
        "seed": 5,
        "height": height,
        "width": width,
        "num_inference_steps": 2,
        **row.get("request", {}),
    }
    if pictures:
        request["image_path"] = pictures
    checkpoint = row.get("checkpoint", TinyQwenImage21())
    return ParityCase(name, checkpoint, family((height, width), lambda _: other), request)


@pytest.fixture(scope="module")
def generator(checkpoints: Path):
    with opened_runtime(checkpoint_folder(TinyQwenImage21(), checkpoints)) as generator:
        yield generator


@pytest.mark.parametrize("name", ROWS)
def test_parity(name: str, folder: Path, checkpoints: Path) -> None:
    with small_areas():
        print(assert_parity(case(folder, name), checkpoints))


def test_prompts_of_several_lengths_are_each_as_alone(folder, checkpoints, generator):
    """The reference puts the picture behind the longest text of its batch: it is asked for each."""
    request = case(folder, "edit").request
    prompts = ["zzz", "the cat above a small blue square, sleeping"]
    several = {**request, **GUIDED, "prompt": prompts, "image_path": []}
    root, kind = checkpoint_folder(TinyQwenImage21(), checkpoints), family(SQUARE)
    both = record_runtime(generator, kind, several)
    for index, prompt in enumerate(prompts):
        own = {**several, "prompt": prompt, "seed": request["seed"] + index}
        del own["image_path"]
        alone = run_oracle(root, kind, own)
        assert largest_difference(both.pixels[index], alone.pixels[0]) < 1e-5
    together = {name: value for name, value in several.items() if name != "image_path"}
    theirs = run_oracle(root, kind, together)
    assert largest_difference(theirs.pixels[0], both.pixels[0]) > 1e-4
    assert largest_difference(theirs.pixels[1], both.pixels[1]) < 1e-5


def test_requests_share_a_batch(generator):
    """Of two lengths, and of two negative lengths; a count of forwards is the proof."""
    request = {"true_cfg_scale": 3.0, "height": 64, "width": 64, "num_inference_steps": 2}
    requests = [
        {**request, "prompt": "a red fox", "seed": 1, "negative_prompt": "zzz"},
        {**request, "prompt": "two hens in the rain", "seed": 2, "negative_prompt": "blue"},
    ]
    worker = generator._open()
    transformer = worker.pipeline.get_module("transformer")

    def serve(together: bool) -> tuple[list[Kept], int]:
        forwards: list[int] = []
        hook = transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
        scheduler, heard = Scheduler(worker, SchedulingLimits(together=together)), []
        for index, values in enumerate(requests):
            heard.append(Kept())
            params = worker.model.sampling_params(values)
            scheduler.submit(str(index), worker.model.admit(params), heard[-1])
        while scheduler.run_next():
            pass
        hook.remove()
        assert [h.error for h in heard] == [None, None]
        return heard, len(forwards)

    (alone, forwards_alone), (shared, forwards) = serve(False), serve(True)
    assert (forwards_alone, forwards) == (2 * 2 * 2, 2 * 2)
    for one, same in zip(alone, shared, strict=True):
        assert difference(one, same) <= 1 / 255


def test_a_picture_is_looked_at_once_for_all_prompts(folder, generator):
    request = {**case(folder, "edit").request, **GUIDED, "prompt": ["make it red", "zzz"]}
    visual = generator.pipeline.get_module("text_encoder").model.visual
    looks: list[int] = []
    hook = visual.register_forward_hook(lambda *_: looks.append(1))
    with small_areas():
        pictures = [image.array for image in generator.generate(**request).images]
    hook.remove()
    assert len(looks) == 1
    assert pictures[0].shape == (64, 64, 4)
    stage = generator.pipeline.stages["text_encoding_stage"]
    assert not stage._views, "and forgotten"


def test_sizes_left_out_and_what_is_refused(folder, checkpoints, generator):
    request = {"prompt": "make it red", "num_inference_steps": 1, "seed": 1}
    picture = str(folder / "wide.png")
    with small_areas():
        (made,) = generator.generate(**request, image_path=[picture]).images
        assert made.array.shape == (96, 160, 4)
        (made,) = generator.generate(**request).images
        assert made.array.shape == (128, 128, 4)
    with pytest.raises(InvalidRequest, match="stands for an input image"):
        generator.generate(**{**request, "prompt": "put <|image_pad|> here"})
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        generator.generate(**request, height=48, width=64)
    fixed = TinyQwenImage21("qwen-image-21-sigmas", sample_sigmas=(1.0, 0.7, 0.2))
    root = checkpoint_folder(fixed, checkpoints)
    match = "a schedule of 3 steps; leave it out"
    with opened_runtime(root) as other, pytest.raises(InvalidRequest, match=match):
        other.generate(**{**request, "num_inference_steps": 5})


def test_what_is_transparent_is_seen_by_the_vae_alone(folder, generator):
    """The text encoder sees it over white."""
    request = case(folder, "edit").request
    opaque = folder / "opaque.png"
    over_white(load_input_image(folder / "wide.png", keep_alpha=True)).save(opaque)
    with small_areas():
        traces = [
            record_runtime(generator, family(SQUARE), {**request, "image_path": [str(path)]})
            for path in (folder / "wide.png", opaque)
        ]
    assert largest_difference(traces[0].pixels, traces[1].pixels) > MOVED


def test_an_adapter_equals_weights_merged_by_hand(checkpoints, generator, tmp_path):
    """It changes what is computed before the loop, too."""
    root, kind = checkpoint_folder(TinyQwenImage21(), checkpoints), family(SQUARE)
    request = {**case(tmp_path, "text").request, **GUIDED}
    pipeline = load_oracle(root, kind.reference, kind.load)
    model = pipeline.transformer
    adapter = Adapter(model, 3)
    for path in adapter.linears:
        if path.startswith("transformer_blocks."):
            adapter.add((path,), "transformer." + path)
    file = adapter.save(tmp_path / "lora.safetensors")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            for path, delta in adapter.changes.items():
                model.get_submodule(path).weight += delta
        expected = trace_of(pipeline, kind, request)
    finally:
        model.load_state_dict(kept)
    base = record_runtime(generator, kind, request)
    assert largest_difference(expected.pixels, base.pixels) > MOVED
    adapted = record_runtime(generator, kind, {**request, "lora": [str(file)]})
    report = compare(adapted, expected)
    assert not report.broken, f"\n{report}"
