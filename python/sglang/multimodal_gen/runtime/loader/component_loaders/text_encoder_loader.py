"""Text encoders: Transformers' modules, configured by their ``config.json``."""

from __future__ import annotations

import logging

import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentSpec,
    NeuralComponentLoader,
)
from sglang.multimodal_gen.runtime.utils.errors import UserError

logger = logging.getLogger(__name__)


class TextEncoderLoader(NeuralComponentLoader):
    """Builds ``cls(config object)``, as Transformers' classes want it; they tie their weights."""

    def architecture(self, spec: ComponentSpec) -> str:
        """``model_index.json``'s class: the one that the pipeline uses (encoder only)."""
        return spec.architecture or super().architecture(spec)

    def build(self, cls: type, spec: ComponentSpec) -> nn.Module:
        """The module on meta; registered classes with plain constructors work too."""
        config_class = getattr(cls, "config_class", None)
        if config_class is None:
            return super().build(cls, spec)
        # A text model may be stored with the configuration of the whole that it was cut from.
        part = spec.config.get(config_class.base_config_key)
        return cls(config_class.from_dict(dict(part if isinstance(part, dict) else spec.config)))

    def ways(self, cls: type, spec: ComponentSpec) -> int:
        """Ranks that share one copy: fewer than there are where it does not divide over all."""
        plan = plan_of(cls)
        if not plan or not spec.parallel.spreads:
            return 1
        module = self.built_on_meta(cls, spec, torch.float32)
        return _group_for(PlannedModel(module, plan), spec).size

    def spread(self, module: nn.Module, spec: ComponentSpec) -> None:
        """Deal the model over all ranks of tensor and sequence parallelism, as its plan says.

        Where it does not divide over all of them, over the largest group of them that it does; a
        note says so. An empty plan is its author's word that each rank shall hold all of it.

        Raises:
            UserError: it has no plan, or divides over no group.
            PipelineDefinitionError: the plan does not fit the model.
        """
        groups, plan = spec.parallel.spreads, plan_of(type(module))
        name = type(module).__name__
        if plan is None and groups:
            raise UserError(
                f"{spec.name}: {name} has no TP_PLAN, so each of {groups[0].size} ranks would hold "
                "all of it; use --tp-size 1 and --sp-degree 1, or register a class with a TP_PLAN "
                "under its name"
            )
        if not plan:
            return
        planned = PlannedModel(module, plan)
        if not groups:
            return
        group = _group_for(planned, spec)
        if group is not groups[0]:
            logger.info(
                "%s: %s does not divide over %d ranks; it is spread over %d (%s), and each slice "
                "is held %d times",
                spec.name, planned.misfit(groups[0].size), groups[0].size, group.size, group.name,
                groups[0].size // group.size,
            )  # fmt: skip
        planned.apply(group)


def _group_for(planned: PlannedModel, spec: ComponentSpec) -> Group:
    """The largest of the groups over which the model divides."""
    groups = spec.parallel.spreads
    for group in groups:
        if not planned.misfit(group.size):
            return group
    sizes = " or ".join(f"{group.size} ({group.name})" for group in groups)
    raise UserError(
        f"{spec.name}: {planned.misfit(groups[-1].size)} does not divide over the ranks of tensor "
        f"and sequence parallelism: {sizes}. Choose another --tp-size or --sp-degree"
    )
