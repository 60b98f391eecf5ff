"""What can be asked of a worker about LoRA adapters, wherever its pipeline is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.lora_arguments import MergeMode
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline


class LoRAVerbs(ABC):
    """The verbs on adapters that a worker and a group of them share; see `LoRAPipeline`."""

    model: ModelDescription

    @abstractmethod
    def on_adapters(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of these verbs where the pipeline is.

        Raises:
            UserError: the pipeline takes no adapters.
        """

    def set_lora(
        self,
        lora_nickname: str | Sequence[str],
        lora_path: str | Sequence[str | None] | None = None,
        target: str | Sequence[str] = "all",
        strength: float | Sequence[float] = 1.0,
        merge_mode: MergeMode | None = None,
    ) -> tuple[LoRAReceipt, ...]:
        """Put adapters in force until further notice, in place of those that were."""
        return self.on_adapters(
            "set_lora", lora_nickname, lora_path, target, strength, merge_mode=merge_mode
        )

    def unset_lora(self, target: str | Sequence[str] = "all") -> None:
        """Take adapters out of force; the model is the base again, bit for bit."""
        self.on_adapters("unset_lora", target)

    def merge_lora_weights(
        self, target: str | Sequence[str] = "all", strength: float = 1.0
    ) -> None:
        """Put the chosen adapters into the weights; ``strength`` multiplies their weights."""
        self.on_adapters("merge_lora_weights", target, strength)

    def unmerge_lora_weights(self, target: str | Sequence[str] = "all") -> None:
        """Take merged adapters out of the weights; they stay chosen."""
        self.on_adapters("unmerge_lora_weights", target)

    def load_lora(self, name: str, path: str) -> dict[str, Any]:
        """Read an adapter's file under a name, and say what it holds; it is not in force yet."""
        receipt: LoRAReceipt = self.on_adapters("load_lora_adapter", path, name)
        return {
            "name": receipt.nickname,
            "ranks": list(receipt.ranks),
            "format": receipt.format,
            "components": sorted(receipt.modules),
            "unused": receipt.leftovers(),
        }

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; it is taken out of whatever is in force."""
        self.on_adapters("unload_lora_adapter", name)

    def lora_status(self) -> dict[str, Any]:
        """``loaded_adapters``, and which of them are ``active`` on which component.

        Both are empty where the pipeline takes none.
        """
        if not issubclass(self.model.info.pipeline_cls, LoRAPipeline):
            return {"loaded_adapters": [], "active": {}}
        return self.on_adapters("get_lora_status")
