"""Accelerated MPNet: the stock classes with the bias by offset, (H, 2L − 1), instead of (B, H, L, L)."""

from functools import partial
from typing import Any

import torch

from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import UnpaddedBatch
from ..host.live import MPNetEncoder, MPNetSelfAttention
from .attention import BatchAsMask, attend_to_batch, offsets_in, rate_of, split_heads
from .batch import Batch, PaddedBatch, take_batch


class AcceleratedMPNetEncoder(BatchAsMask, MPNetEncoder):
    """`MPNetEncoder` whose bias has one entry for each offset."""

    def compute_position_bias(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, num_buckets: int = 32
    ) -> torch.Tensor:
        """The bias of every offset, (H, 2L − 1), in the order of `AttentionContext.offsets`; else as stock."""
        batch = take_batch()
        if batch is None:
            return super().compute_position_bias(x, position_ids, num_buckets)
        offsets = offsets_in(batch, x).offsets(x.device)
        bucket = self.relative_position_bucket(offsets, num_buckets=num_buckets)
        return self.relative_attention_bias(bucket).transpose(0, 1)


class AcceleratedMPNetSelfAttention(MPNetSelfAttention):
    """MPNet's self-attention with our backends."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | Batch | None = None,
        position_bias: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """As stock, whose code runs unless there is a batch in place of the mask."""
        if not isinstance(attention_mask, UnpaddedBatch | PaddedBatch):
            return super().forward(hidden_states, attention_mask, position_bias, *args, **kwargs)
        terms = Terms(bias=(toeplitz_table(position_bias, offsets_in(attention_mask, hidden_states)),))
        vectors = [projection(hidden_states) for projection in (self.q, self.k, self.v)]
        heads_of = partial(split_heads, self.num_attention_heads)
        out = attend_to_batch(self, attention_mask, vectors, heads_of, terms, rate_of(self.dropout))
        return (self.o(out),)
