"""Text encoders: Transformers' modules, configured by their ``config.json``."""

from __future__ import annotations

from torch import nn

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentSpec,
    NeuralComponentLoader,
)


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
