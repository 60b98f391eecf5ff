"""Qwen-Image's other ways to run: offloaded, in shared batches, adapted; and input pictures."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runtime.managers.test_batching_with_a_model import Kept, difference
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, SchedulingLimits
from sglang.multimodal_gen.runtime.memory.plan import Residency
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.verify.measure import largest_difference

from parity.compare import compare
from parity.harness import MOVED, checkpoint_folder
from parity.oracle import load_oracle, trace_of
from parity.runtime_trace import opened_runtime, record_runtime
from parity.test_qwen_image_edit import small_areas
from parity.tiny_adapters import Adapter
from parity.tiny_qwen_image import QWEN_IMAGE, editing, qwen_image
from parity.tiny_qwen_image_21 import TinyQwenImage21
from parity.tiny_qwen_image_21 import family as family_21

REQUEST: dict[str, Any] = {
    "prompt": "a small red circle above the fox",
    "negative_prompt": "blue",
    "true_cfg_scale": 3.0,
    "seed": 5,
    "height": 64,
    "width": 80,
    "num_inference_steps": 2,
}
EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"


@pytest.fixture(scope="module")
def root(checkpoints: Path) -> Path:
    return checkpoint_folder(qwen_image(), checkpoints)


@pytest.fixture(scope="module")
def generator(root: Path):
    with opened_runtime(root) as generator:
        yield generator


def stored(folder: Path, size: tuple[int, int] = (90, 50), **save: Any) -> str:
    picture = Image.linear_gradient("L").resize(size)
    flipped = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    path = folder / "picture.png"
    Image.merge("RGB", (picture, flipped, picture)).save(path, **save)
    return str(path)


@pytest.mark.parametrize(
    "offload",
    [{"layerwise_offload_components": ["all"]}, {"cpu_offload_components": ["all"]}],
    ids=["by layers", "whole"],
)
@pytest.mark.parametrize("pipeline", ["QwenImagePipeline", EDIT, "QwenImage21Pipeline"])
def test_offloaded_weights_make_the_same_bits(pipeline, offload, checkpoints, tmp_path):
    name = "qwen-image" if pipeline == "QwenImagePipeline" else f"{EDIT}{{}}"
    checkpoint, family = qwen_image(name, pipeline=pipeline), QWEN_IMAGE
    request = dict(REQUEST)
    if pipeline != "QwenImagePipeline":
        request["image_path"] = [stored(tmp_path)]
        family = editing(EDIT, (64, 80), None)
    if pipeline == "QwenImage21Pipeline":
        checkpoint, family = TinyQwenImage21(), family_21((64, 64))
        request["width"] = 64
    path = checkpoint_folder(checkpoint, checkpoints)
    traces = []
    with small_areas():
        for arguments in ({}, offload):
            with opened_runtime(path, **arguments) as generator:
                traces.append(record_runtime(generator, family, request))
                modes = {
                    generator.pipeline.plan[name].mode
                    for name in ("transformer", "text_encoder", "vae")
                }
    assert Residency.RESIDENT not in modes, "nothing was offloaded"
    assert {m.measured for m in compare(traces[1], traces[0]).measurements} == {0.0}


STYLES = {
    "Diffusers": ("transformer.", (".lora_A.weight", ".lora_B.weight"), False),
    "lightx2v": ("", (".lora_down.weight", ".lora_up.weight"), False),
    "ComfyUI": ("diffusion_model.", (".lora_A.weight", ".lora_B.weight"), False),
    "Kohya": ("lora_unet_", (".lora_down.weight", ".lora_up.weight"), True),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_adapter_equals_weights_merged_by_hand(style, root, generator, tmp_path):
    prefix, parts, underscored = STYLES[style]
    pipeline = load_oracle(root, QWEN_IMAGE.reference)
    model = pipeline.transformer
    adapter = Adapter(model, 3)
    for path in adapter.linears:
        if path.startswith("transformer_blocks."):
            spelled = path.replace(".", "_") if underscored else path
            alpha = None if parts[0] == ".lora_A.weight" else 8.0
            adapter.add((path,), prefix + spelled, alpha=alpha, parts=parts)
    assert any("img_mod.1" in path for path in adapter.changes)
    file = adapter.save(tmp_path / "lora.safetensors")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            for path, delta in adapter.changes.items():
                model.get_submodule(path).weight += delta
        expected = trace_of(pipeline, QWEN_IMAGE, REQUEST)
    finally:
        model.load_state_dict(kept)
    base = record_runtime(generator, QWEN_IMAGE, REQUEST)
    assert largest_difference(expected.pixels, base.pixels) > MOVED
    adapted = record_runtime(generator, QWEN_IMAGE, {**REQUEST, "lora": [str(file)]})
    report = compare(adapted, expected)
    assert not report.broken, f"\n{report}"


def test_diffusers_loads_the_same_adapter_to_the_same_effect(root, generator, tmp_path):
    pipeline = load_oracle(root, QWEN_IMAGE.reference)
    adapter = Adapter(pipeline.transformer, 4)
    for path in adapter.linears:
        if "attn.to_" in path or "_mlp." in path:
            adapter.add((path,), "transformer." + path)
    file = adapter.save(tmp_path / "lora.safetensors")
    try:
        pipeline.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="a")
        expected = trace_of(pipeline, QWEN_IMAGE, REQUEST)
    finally:
        pipeline.unload_lora_weights()
    ours = record_runtime(generator, QWEN_IMAGE, {**REQUEST, "lora": [str(file)]})
    report = compare(ours, expected)
    assert not report.broken, f"\n{report}"


def test_a_shared_batch_equals_each_alone(generator):
    """Prompts and negative prompts of several lengths; a count of forwards is the proof."""
    worker = generator._open()
    requests = [
        {"prompt": "a red fox", "seed": 1, "negative_prompt": "zzz"},
        {"prompt": "two hens in the rain at night", "seed": 2, "negative_prompt": ""},
    ]

    def serve(together: bool) -> tuple[list[Kept], int]:
        forwards: list[int] = []
        transformer = worker.pipeline.get_module("transformer")
        hook = transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
        scheduler, heard = Scheduler(worker, SchedulingLimits(together=together)), []
        for index, values in enumerate(requests):
            heard.append(Kept())
            params = worker.model.sampling_params(REQUEST | values)
            scheduler.submit(str(index), worker.model.admit(params), heard[-1])
        while scheduler.run_next():
            pass
        hook.remove()
        assert [h.error for h in heard] == [None, None]
        return heard, len(forwards)

    alone, forwards_alone = serve(False)
    shared, forwards = serve(True)
    assert (forwards_alone, forwards) == (2 * 2 * 2, 2 * 2)
    assert difference(alone[0], alone[1]) > MOVED
    for one, same in zip(alone, shared, strict=True):
        assert difference(one, same) <= 1 / 255


@pytest.fixture(scope="module")
def editor(checkpoints: Path):
    path = checkpoint_folder(qwen_image(f"{EDIT}{{}}", pipeline=EDIT), checkpoints)
    with DiffGenerator.from_pretrained(str(path), device="cpu", precision="fp32") as generator:
        yield generator


def edit(editor: DiffGenerator, path: Any, **changes: Any) -> Any:
    request = {**REQUEST, "image_path": path, "true_cfg_scale": 1.0, **changes}
    with small_areas():
        return editor.generate(**request).images[0].array


def test_pictures_of_every_kind_are_seen_as_people_see_them(editor, tmp_path):
    plain = stored(tmp_path)
    expected = edit(editor, plain)
    kinds = tmp_path / "kinds"
    kinds.mkdir()
    picture = Image.open(plain)
    alpha = picture.convert("RGBA")
    alpha.putalpha(255)
    alpha.save(kinds / "rgba.png")
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise
    turned.save(kinds / "exif.png", exif=exif)
    for path in kinds.iterdir():
        assert (edit(editor, str(path)) == expected).all(), path.name
    picture.quantize(200).save(tmp_path / "palette.png")
    near = edit(editor, str(tmp_path / "palette.png")).astype(int) - expected
    assert abs(near).mean() < 12, "200 colours are nearly the picture"
    Image.eval(picture, lambda level: 255 - level).save(tmp_path / "other.png")
    assert abs(edit(editor, str(tmp_path / "other.png")).astype(int) - expected).max() > 3
    grey = picture.convert("L")
    grey.save(tmp_path / "grey.png")
    wide = Image.new("I;16", grey.size)
    wide.putdata([level * 257 for level in grey.tobytes()])
    wide.save(tmp_path / "grey16.png")
    pair = [edit(editor, str(tmp_path / name)) for name in ("grey.png", "grey16.png")]
    assert (pair[0] == pair[1]).all()


def test_pictures_in_memory_are_files_for_a_while(editor, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = stored(tmp_path)
    expected, data = edit(editor, path), Path(path).read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for given in (Image.open(path), data, url, [Path(path)]):
        assert (edit(editor, given) == expected).all(), type(given)
    with pytest.raises(InvalidRequest, match="no picture in base64"):
        edit(editor, "data:image/png,abc")
    with pytest.raises(InvalidRequest, match="no image that can be read"):
        edit(editor, b"words", height=None)
    assert not list(tmp_path.glob("sglang-pictures-*"))


def test_a_size_left_out_follows_the_picture(editor, tmp_path):
    wide = stored(tmp_path)
    assert edit(editor, wide, height=None, width=None).shape == (96, 160, 3)
    assert edit(editor, wide, height=32, width=None).shape == (32, 160, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = stored(tmp_path, exif=exif)
    assert edit(editor, lying, height=None, width=None).shape == (160, 96, 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"image_path": None}, "needs an input image"),
        ({"image_path": ["a.png", "b.png"]}, "edits 1 picture, and 2 are given"),
        ({"prompt": "put <|image_pad|> here"}, "stands for an input image"),
        ({"height": 40}, "multiple of 16"),
    ],
)
def test_what_an_edit_cannot_be_is_refused_at_the_door(editor, tmp_path, change, problem):
    with pytest.raises(InvalidRequest, match=problem):
        editor.generate(**{**REQUEST, "image_path": stored(tmp_path), **change})


def test_prompts_with_pictures_share_a_batch(checkpoints, tmp_path):
    """Diffusers refuses more than one prompt here; each equals its own run."""
    path = checkpoint_folder(qwen_image(f"{PLUS}{{}}", pipeline=PLUS), checkpoints)
    request = {**REQUEST, "image_path": [stored(tmp_path)] * 2, "num_inference_steps": 2}
    prompts = ["make it red", "a blue fox in the rain, at night"]
    with small_areas(), opened_runtime(path) as generator:
        both = generator.generate(**{**request, "prompt": prompts}).images
        for index, prompt in enumerate(prompts):
            seed = request["seed"] + index
            alone = generator.generate(**{**request, "prompt": prompt, "seed": seed}).images[0]
            assert abs(both[index].array.astype(int) - alone.array).max() <= 1
