"""Accelerated MPNet: Transformers' classes with a bias by offset, (H, 2L − 1), instead of (B, H, L, L)."""

from functools import partial
from typing import Any

import torch

from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import Batch, take_batch
from .attention import BatchAsMask, BatchAttention, attend_to_batch, split_heads


class Stack(BatchAsMask):
    """Of MPNet's layers, with one entry of the bias for each offset."""

    def compute_position_bias(
        self: Any, x: torch.Tensor, position_ids: torch.Tensor | None = None, num_buckets: int = 32
    ) -> Any:
        """The bias of every offset, (H, 2L − 1), in the order of `AttentionContext.offsets`; else as stock."""
        batch = take_batch()
        if batch is None:
            return super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
        offsets = batch.groups[0].context.offsets(x.device)
        bucket = self.relative_position_bucket(offsets, num_buckets=num_buckets)
        return self.relative_attention_bias(bucket).transpose(0, 1)


class SelfAttention(BatchAttention):
    """MPNet's self-attention with our backends."""

    def attend(
        self: Any, states: torch.Tensor, batch: Batch, position_bias: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor]:
        """As stock."""
        terms = Terms(bias=(toeplitz_table(position_bias, batch.groups[0].context),))
        vectors = [projection(states) for projection in (self.q, self.k, self.v)]
        heads_of = partial(split_heads, self.num_attention_heads)
        return (self.o(attend_to_batch(self, batch, vectors, heads_of, terms)),)
