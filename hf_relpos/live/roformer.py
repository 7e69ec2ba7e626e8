"""Accelerated RoFormer: the stock function rotates queries and keys, and the rest is attention without terms."""

from typing import Any

import torch

from ..attention.formula import Terms
from ..attention.unpadding import UnpaddedBatch
from ..host.live import RoFormerEncoder, RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding
from .attention import BatchAsMask, attend_to_batch, rate_of, split_heads
from .batch import Batch, PaddedBatch, take_batch


class AcceleratedRoFormerSinusoidalPositionalEmbedding(RoFormerSinusoidalPositionalEmbedding):
    """The angles of positions; without padding those of the longest row, and so of all."""

    def forward(self, input_ids_shape: torch.Size, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock."""
        batch = take_batch()
        shape = input_ids_shape if batch is None else torch.Size((1, batch.groups[0].length))
        angles: torch.Tensor = super().forward(shape, *args, **kwargs)
        return angles


class AcceleratedRoFormerEncoder(BatchAsMask, RoFormerEncoder):
    """`RoFormerEncoder` with our attention."""


class AcceleratedRoFormerSelfAttention(RoFormerSelfAttention):
    """RoFormer's self-attention in an encoder."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | Batch | None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock, whose code runs unless there is a batch in place of the mask; else without attention weights."""
        if not isinstance(attention_mask, UnpaddedBatch | PaddedBatch):
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, attention_mask, sinusoidal_pos, *args, **kwargs
            )
            return found

        def heads_of(*vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            query, key, value = split_heads(self.num_attention_heads, *vectors)
            if sinusoidal_pos is None:
                return query, key, value
            angles = sinusoidal_pos[:, :, : query.shape[2]]
            if self.rotary_value:
                rotated: tuple[torch.Tensor, ...] = self.apply_rotary_position_embeddings(angles, query, key, value)
                return rotated
            return *self.apply_rotary_position_embeddings(angles, query, key), value

        vectors = [projection(hidden_states) for projection in (self.query, self.key, self.value)]
        return attend_to_batch(self, attention_mask, vectors, heads_of, Terms(), rate_of(self.dropout)), None
