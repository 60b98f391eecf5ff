"""Ports of FLUX.1 as an out-of-tree package: each broken in one common way, and a whole one.

Importing it registers them; ``--pipeline NAME`` chooses one.
"""

from __future__ import annotations

from sglang.multimodal_gen.configs.sample.flux import FluxSamplingParams
from sglang.multimodal_gen.registry import register_pipeline

from .configs import (
    MisnamedConfig,
    PackedConfig,
    PositiveTwiceConfig,
    ShiftlessConfig,
    WholeConfig,
)
from .pipelines import (
    AlonePipeline,
    BiasTwicePipeline,
    DtypePipeline,
    MisnamedPipeline,
    PackedPipeline,
    PositiveTwicePipeline,
    ReversedPipeline,
    ShiftlessPipeline,
    TurnedPipeline,
    UnencodedPipeline,
    UnscaledPipeline,
    WholePipeline,
    WrongHeadsPipeline,
)

for pipeline, config in (
    (WholePipeline, WholeConfig),
    (ShiftlessPipeline, ShiftlessConfig),
    (ReversedPipeline, WholeConfig),
    (DtypePipeline, WholeConfig),
    (PositiveTwicePipeline, PositiveTwiceConfig),
    (UnencodedPipeline, WholeConfig),
    (MisnamedPipeline, MisnamedConfig),
    (TurnedPipeline, WholeConfig),
    (PackedPipeline, PackedConfig),
    (UnscaledPipeline, WholeConfig),
    (BiasTwicePipeline, WholeConfig),
    (AlonePipeline, WholeConfig),
    (WrongHeadsPipeline, WholeConfig),
):
    register_pipeline(pipeline, sampling_param_cls=FluxSamplingParams, pipeline_config_cls=config)
