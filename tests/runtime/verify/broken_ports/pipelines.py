"""Wiring that is wrong in one place each."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.linear import RowParallelLinear
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    NeuralComponentLoader,
)
from sglang.multimodal_gen.runtime.models.dits import flux
from sglang.multimodal_gen.runtime.models.dits.flux import FluxAttention, FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines.flux import FluxPipeline
from sglang.multimodal_gen.runtime.pipelines_core.stages import (
    TextEncodingStage,
    TimestepPreparationStage,
)


class WholePipeline(FluxPipeline):
    pipeline_name = "WholePipeline"


class ShiftlessPipeline(FluxPipeline):
    pipeline_name = "ShiftlessPipeline"


class PositiveTwicePipeline(FluxPipeline):
    pipeline_name = "PositiveTwicePipeline"


class MisnamedPipeline(FluxPipeline):
    pipeline_name = "MisnamedPipeline"


class PackedPipeline(FluxPipeline):
    pipeline_name = "PackedPipeline"


class ReversedTimesteps(TimestepPreparationStage):
    def forward(self, batch, server_args):
        batch = super().forward(batch, server_args)
        batch.timesteps = batch.timesteps.flip(0)
        return batch


class ReversedPipeline(FluxPipeline):
    pipeline_name = "ReversedPipeline"

    def add_standard_timestep_preparation_stage(self, scheduler_key="scheduler"):
        return self.add_stage(ReversedTimesteps(self.get_module(scheduler_key)), "timesteps")


class WholeTimesteps(TimestepPreparationStage):
    def forward(self, batch, server_args):
        batch = super().forward(batch, server_args)
        batch.timesteps = batch.timesteps.double()
        return batch


class DtypePipeline(FluxPipeline):
    pipeline_name = "DtypePipeline"

    def add_standard_timestep_preparation_stage(self, scheduler_key="scheduler"):
        return self.add_stage(WholeTimesteps(self.get_module(scheduler_key)), "timesteps")


class PositiveOnly(TextEncodingStage):
    def forward(self, batch, server_args):
        batch = super().forward(batch, server_args)
        batch.negative_prompt_embeds, batch.neg_pooled_embeds = [], []
        return batch


class UnencodedPipeline(FluxPipeline):
    pipeline_name = "UnencodedPipeline"

    def add_standard_text_encoding_stage(self, text_encoder_key=None, tokenizer_key=None):
        stage = PositiveOnly(
            text_encoders=self._modules_of("text_encoder", None),
            tokenizers=self._modules_of("tokenizer", None),
        )
        return self.add_stage(stage, "text_encoding_stage")


class HalvesNorm(nn.RMSNorm):
    """Puts a head's channels so that neighbours of the shared rotation are halves of the head."""

    def forward(self, x):
        return super().forward(x).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class TurnedTransformer(FluxTransformer2DModel):
    """Rotates the first half of a head against the second, as other families do."""

    def __init__(self, **config):
        super().__init__(**config)
        for attention in [m for m in self.modules() if isinstance(m, FluxAttention)]:
            for name, norm in list(attention.named_children()):
                if isinstance(norm, nn.RMSNorm):
                    setattr(attention, name, HalvesNorm(norm.normalized_shape, eps=norm.eps))


class TurnedLoader(NeuralComponentLoader):
    def model_class(self, spec):
        return TurnedTransformer


class TurnedPipeline(FluxPipeline):
    pipeline_name = "TurnedPipeline"
    component_loaders = {"transformer": TurnedLoader}


class UnscaledTransformer(FluxTransformer2DModel):
    """One norm of one block has another epsilon."""

    def __init__(self, **config):
        super().__init__(**config)
        self.transformer_blocks[1].attn.norm_k.eps = 0.1


class UnscaledLoader(NeuralComponentLoader):
    def model_class(self, spec):
        return UnscaledTransformer


class UnscaledPipeline(FluxPipeline):
    pipeline_name = "UnscaledPipeline"
    component_loaders = {"transformer": UnscaledLoader}


class WrongHeads(FluxTransformer2DModel):
    """Its table counts something else than heads."""

    planned_heads = 3
    TP_PLAN = {
        pattern: dataclasses.replace(entry, heads="planned_heads")
        if getattr(entry, "heads", None)
        else entry
        for pattern, entry in flux.TP_PLAN.items()
    }


class WrongHeadsLoader(NeuralComponentLoader):
    def model_class(self, spec):
        return WrongHeads


class WrongHeadsPipeline(FluxPipeline):
    pipeline_name = "WrongHeadsPipeline"
    component_loaders = {"transformer": WrongHeadsLoader}


class BiasTwicePipeline(FluxPipeline):
    """The bias of a linear whose inputs are dealt out, added by every rank before the sum."""

    pipeline_name = "BiasTwicePipeline"

    @torch.no_grad()
    def create_pipeline_stages(self, server_args):
        for module in self.get_module("transformer").modules():
            if isinstance(module, RowParallelLinear) and module.bias is not None:
                module.bias *= module.group.size
        super().create_pipeline_stages(server_args)


class AlonePipeline(FluxPipeline):
    """Never heard that there are other ranks: each does all of the work."""

    pipeline_name = "AlonePipeline"

    def __init__(self, *args, parallel=None, **kwargs):
        super().__init__(*args, **kwargs)
