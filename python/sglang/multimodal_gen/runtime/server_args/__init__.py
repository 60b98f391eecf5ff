"""Server arguments: what is decided before a model loads.

``ServerArgs`` is importable from here because pipelines of other packages write
``from sglang.multimodal_gen.runtime.server_args import ServerArgs``.
"""

from sglang.multimodal_gen.runtime.server_args.server_args import ServerArgs

__all__ = ["ServerArgs"]
