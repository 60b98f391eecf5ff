"""A model family in a package of its own; importing it makes the family known."""

from __future__ import annotations

from sglang.multimodal_gen.registry import register_pipeline
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

from .configs import TinyPainterPipelineConfig, TinyPainterSamplingParams
from .pipeline import TinyPainterPipeline

# As text, so that the network is imported when a checkpoint needs it.
ModelRegistry.register_model(
    "TinyPainterTransformer2DModel", "tiny_painter.model:TinyPainterTransformer2DModel"
)
register_pipeline(
    TinyPainterPipeline,
    sampling_param_cls=TinyPainterSamplingParams,
    pipeline_config_cls=TinyPainterPipelineConfig,
    hf_model_paths=["example-org/tiny-painter"],
    model_detectors=[lambda value: "tinypainter" in value],
)
