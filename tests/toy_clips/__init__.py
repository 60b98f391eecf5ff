"""A family that makes clips, as a package of its own: small, quick, and with real stages.

A disc moves over a plain ground; prompt and seed choose colours and way. ``SGLANG_EXTERNAL_MODEL_
PACKAGE=toy_clips`` with this folder's parent on the path, and `toy_clips.checkpoint` for a model.
"""

from __future__ import annotations

from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

from .configs import ToyClipsPipelineConfig, ToyClipsSamplingParams
from .pipeline import ToyClipsPipeline

ModelRegistry.register_model("ToyClipsTransformer", "toy_clips.model:ToyClipsTransformer")
ModelRegistry.register_model("ToyClipsVAE", "toy_clips.model:ToyClipsVAE")
register_pipeline(
    ToyClipsPipeline,
    sampling_param_cls=ToyClipsSamplingParams,
    pipeline_config_cls=ToyClipsPipelineConfig,
    model_detectors=[lambda value: "toyclips" in value],
)
