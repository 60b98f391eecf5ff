"""Frames in admission, in the first and last stage, between processes, and in previews."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig, PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import (
    ImageSamplingParams,
    VideoSamplingParams,
)
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.managers.batch_merging import join, part_of, signature
from sglang.multimodal_gen.runtime.managers.finished import FinishedVideo, finished_of
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, MemoryJobStore
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.pixels import packed, unpacked
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import to_frames
from sglang.multimodal_gen.runtime.pipelines_core.stages.input_validation import (
    InputValidationStage,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
)
from sglang.multimodal_gen.runtime.utils.video_file import encode_video

import toy_clips  # noqa: F401
from toy_clips.checkpoint import write_checkpoint
from toy_clips.configs import ToyClipsPipelineConfig, ToyClipsSamplingParams


class Config(PipelineConfig):
    supported_task_types = (ModelTaskType.T2V, ModelTaskType.T2I, ModelTaskType.V2V)


def config(multiple: int = 4, **fields) -> PipelineConfig:
    found = Config(task_type=ModelTaskType.T2V, **fields)
    found.vae_config.temporal_compression_ratio = multiple
    return found


def admitted(multiple=4, fields=None, **values):
    params = VideoSamplingParams(**{"prompt": "x", "height": 64, "width": 64, "seed": 1} | values)
    return admit(params, config(multiple, **(fields or {})), batching_max_size=4)[0]


def test_a_clips_batch_says_frames_and_rate():
    batch = admitted(num_frames=9, fps=16)
    assert (batch.num_frames, batch.fps, batch.data_type) == (9, 16, DataType.VIDEO)
    assert (admitted().num_frames, admitted().fps) == (81, 24)


@pytest.mark.parametrize(
    ("multiple", "asked", "near"), [(4, 6, "5 or 9"), (4, 2, "1 or 5"), (8, 24, "17 or 25")]
)
def test_counts_off_the_grid_name_their_neighbours(multiple, asked, near):
    """CB-123."""
    with pytest.raises(InvalidRequest, match=f"num_frames={asked}: .* try {near}"):
        admitted(multiple, num_frames=asked)
    batch = admitted(multiple, num_frames=asked, num_frames_round_down=True)
    below = int(near.split()[0])
    assert (batch.num_frames, batch.request.num_frames) == (below, below)
    assert batch.warnings == [f"num_frames={asked} was rounded down to {below}, which the model "
                              "can make"]  # fmt: skip


def test_any_count_where_the_autoencoder_keeps_time():
    assert [admitted(1, num_frames=n).num_frames for n in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("multiple", [1, 4, 6, 8])
def test_the_nearest_count_is_one_that_can_be_made(multiple):
    found = config(multiple)
    for asked in (0.2, 1, 2, 3, 4.9, 5, 96, 97.5, 120, 1001):
        nearest = found.nearest_num_frames(asked)
        assert nearest >= 1
        assert (nearest - 1) % multiple == 0
        others = range(1, math.ceil(asked) + 2 * multiple, multiple)
        assert abs(nearest - asked) == min(abs(n - asked) for n in others)


def test_frames_times_pixels_are_one_limit():
    """CB-006."""
    limit = {"max_video_pixels": 9 * 64 * 64}
    assert admitted(fields=limit, num_frames=9).num_frames == 9
    for more in ({"num_frames": 13}, {"num_frames": 9, "height": 72}):
        with pytest.raises(InvalidRequest, match="max_video_pixels=36864; at this size that is"):
            admitted(fields=limit, **more)
    with pytest.raises(InvalidArgument, match="max_video_pixels"):
        config().with_settings({"max_video_pixels": 0})


def test_an_image_task_of_the_same_family_has_one_frame():
    batch = admitted(task_type="T2I", num_frames=81)
    assert (batch.num_frames, batch.fps, batch.data_type) == (1, None, DataType.IMAGE)
    assert batch.warnings == []  # 81 is only the default
    batch = admitted(task_type="T2I", num_frames=9)
    assert batch.warnings == ["num_frames=9 has no effect: task T2I makes one picture"]
    image = ImageSamplingParams(prompt="x", height=64, width=64)
    assert admit(image, ImagePipelineConfig(), batching_max_size=1)[0].num_frames == 1


def test_an_output_that_no_task_makes_is_told():
    params = ImageSamplingParams(prompt="x", height=64, width=64)
    with pytest.raises(InvalidRequest, match="VIDEO is asked for here, and this pipeline serves"):
        admit(params, ImagePipelineConfig(), batching_max_size=1, data_type=DataType.VIDEO)


def test_requests_that_differ_in_frames_or_rate_share_no_batch():
    base = signature(admitted(num_frames=9))
    assert base == signature(admitted(num_frames=9, seed=5))
    assert base != signature(admitted(num_frames=5))
    assert base != signature(admitted(num_frames=9, fps=8))


def test_a_checkpoint_that_makes_no_sense_is_refused():
    with pytest.raises(CheckpointError, match="temporal_compression_ratio=0"):
        ToyClipsPipelineConfig().with_checkpoint({"vae": {"temporal_compression_ratio": 0}})


def test_frames_are_rounded_as_pictures_are():
    clip = torch.linspace(-1.2, 1.2, 3 * 2 * 4 * 6).view(1, 3, 2, 4, 6)
    frames = to_frames(clip)
    assert (frames.dtype, frames.shape) == (torch.uint8, (1, 2, 4, 6, 3))
    unit = (clip / 2 + 0.5).clamp(0, 1)
    assert torch.equal(frames, (unit * 255).round().byte().permute(0, 2, 3, 4, 1))
    assert to_frames(clip[:0]).shape == (0, 2, 4, 6, 3)
    assert to_frames(torch.empty(0, 3, 0, 0, 0)).shape == (0, 0, 0, 0, 3)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("toy") / "toy-clips")
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32")
    return Worker(ModelDescription.find(args))


def batch_of(worker, control=None, previews=0, **values):
    values = {"prompt": "x", "seed": 1, "num_frames": 9, "height": 32, "width": 48} | values
    params = worker.model.sampling_params(values)
    return worker.model.admit(params, control, previews=previews)[0]


def test_clips_pass_through_batching_and_between_processes(worker):
    parts = [batch_of(worker, seed=1), batch_of(worker, seed=5, prompt="y")]
    joined, rows = join(parts, RequestControl())
    output = worker.run(joined)
    assert output.output.shape == (2, 9, 32, 48, 3)
    assert output.output.dtype == torch.uint8
    sent = packed(output)
    assert isinstance(sent.output, np.ndarray)
    assert np.shares_memory(sent.output, output.output.numpy())  # CB-127: not copied to be sent
    back = unpacked(sent, [1.0, 2.0])
    assert torch.equal(back.output, output.output)
    for part, place in zip(parts, rows, strict=True):
        (clip,) = finished_of(part_of(back, part, place))
        assert isinstance(clip, FinishedVideo)
        assert (clip.fps, clip.seed, clip.prompt) == (8, part.seeds[0], part.prompt[0])
        alone = worker.run(part).output[0].numpy()
        assert np.abs(clip.frames.astype(int) - alone).max() <= 2
    assert not np.array_equal(output.output[0], output.output[1])


def test_previews_are_of_the_first_frame(worker):
    seen = []
    control = RequestControl(preview_listener=seen.append)
    output = worker.run(batch_of(worker, control, previews=2, num_inference_steps=6))
    assert [p.step for p in seen] == [2, 4]
    assert seen[0].pixels.shape == (32, 48, 3)
    last = output.output[0, 0].numpy().astype(int)
    distances = [np.abs(last - preview.pixels).mean() for preview in seen]
    assert distances[1] < distances[0]


def test_an_image_task_on_latents_with_frames_gives_a_picture(worker):
    decode = worker.pipeline.get_stage("decoding_stage")
    batch = batch_of(worker, num_frames=1)
    batch.data_type = DataType.IMAGE
    batch.latents = torch.zeros(2, 3, 1, 8, 12)
    decode.forward(batch, worker.pipeline.server_args)
    assert (batch.output.shape, batch.output.dtype) == ((2, 3, 32, 48), torch.float32)


def test_input_videos_are_read_by_the_first_stage(tmp_path):
    path = tmp_path / "in.mp4"
    path.write_bytes(encode_video(np.full((5, 16, 16, 3), 200, np.uint8), 12))
    batch = admitted(task_type="V2V", video_path=str(path))
    assert batch.video_path == [str(path)]
    InputValidationStage().forward(batch, None)
    (video,) = batch.condition_video
    assert (video.frames.shape, video.fps) == ((5, 16, 16, 3), 12.0)
    with pytest.raises(InvalidRequest, match="needs an input video"):
        admitted(task_type="V2V")
    for wrong in (7, ""):
        with pytest.raises(InvalidRequest, match="video_path"):
            admitted(task_type="V2V", video_path=wrong)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fps": 0}, "fps=0: must be at least 1"),
        ({"fps": 241}, "fps=241: must be at most 240"),
        ({"fps": 23.976}, "fps=23.976: must be a whole number"),
        ({"fps": None}, "fps=None: must be a whole number"),
        ({"num_frames": 0}, "num_frames=0: must be at least 1"),
        ({"num_frames": True}, "num_frames=True: must be a whole number"),
        ({"num_frames_round_down": 1}, "must be true or false"),
    ],
)
def test_values_that_no_model_can_serve(values, words):
    """CB-017, CB-125."""
    with pytest.raises(InvalidRequest, match=words):
        ToyClipsSamplingParams(prompt="x", **values)


def test_records_by_age_and_from_a_place_on():
    store = MemoryJobStore()
    for k in range(5):
        kind = "video" if k % 2 == 0 else "image"
        store.add(JobRecord(id=str(k), kind=kind, model="m", created_at=1.0))
    ids = lambda **query: [record.id for record in store.list(**query)]  # noqa: E731
    assert ids() == ["4", "3", "2", "1", "0"]
    assert ids(newest_first=False, limit=2) == ["0", "1"]
    assert ids(kind="video") == ["4", "2", "0"]
    assert ids(kind="video", after="4", limit=1) == ["2"]
    assert ids(kind="video", after="2", newest_first=False) == ["4"]
    assert ids(after="gone") == []
