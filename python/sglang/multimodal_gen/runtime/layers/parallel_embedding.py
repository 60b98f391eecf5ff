"""Embedding tables that are dealt over ranks.

Legend: V vocabulary, D width, G ranks of the group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.shard import Shard, sharded


class _ParallelEmbedding(nn.Embedding):
    """A table of which this rank holds a slice; ``num_embeddings`` and ``embedding_dim`` are the
    whole's."""

    def __init__(self, whole: nn.Embedding, group: Group, shard: Shard) -> None:
        nn.Module.__init__(self)  # not Embedding's: it would make a whole table
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = whole.padding_idx, None, whole.norm_type
        self.scale_grad_by_freq, self.sparse = False, False
        self.group = group
        self.shard = shard
        self.weight = sharded(whole.weight, shard)


class VocabParallelEmbedding(_ParallelEmbedding):
    """Some of the rows, [V / G, D] (nearly: V need not divide); every rank gets every embedding."""

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        shard = Shard(0, (whole.num_embeddings,), group.rank, group.size)
        super().__init__(whole, group, shard)
        ((self.start, self.stop),) = shard.pieces

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> [..., D]; exact: one rank has the row, the others add zeros.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        if not torch.compiler.is_compiling():
            outside = (input < 0) | (input >= self.num_embeddings)
            if bool(outside.any()):  # a plain table raises too; here each rank would add zeros
                raise IndexError(f"an id is outside the vocabulary of {self.num_embeddings}")
        elsewhere = (input < self.start) | (input >= self.stop)
        rows = F.embedding((input - self.start).masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(elsewhere[..., None], 0))


class ColumnParallelEmbedding(_ParallelEmbedding):
    """Some of the columns, [V, D / G]: each rank gets its piece of every embedding.

    For tables with a column a head, such as T5's relative attention bias.
    """

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        shard = Shard(1, (whole.embedding_dim,), group.rank, group.size)
        super().__init__(whole, group, shard)

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> [..., D / G]."""
        return F.embedding(input, self.weight)
