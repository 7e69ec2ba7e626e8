"""Accelerated RoFormer: Transformers rotates queries and keys; the rest is attention without terms."""

from typing import Any

import torch

from ..attention.formula import Terms
from ..attention.unpadding import Batch, take_batch
from .attention import BatchAttention, attend_to_batch, split_heads


class Sinusoids:
    """The angles of positions; without padding those of the longest row, and so of all."""

    def forward(self, input_ids_shape: torch.Size, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        batch = take_batch()
        shape = input_ids_shape if batch is None else torch.Size((1, batch.groups[0].length))
        return super().forward(shape, *args, **kwargs)  # type: ignore[misc]


class SelfAttention(BatchAttention):
    """RoFormer's self-attention in an encoder."""

    def attend(
        self: Any, states: torch.Tensor, batch: Batch, sinusoidal_pos: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """As stock, without attention weights."""

        def heads_of(*vectors: torch.Tensor) -> Any:
            query, key, value = split_heads(self.num_attention_heads, *vectors)
            if sinusoidal_pos is None:
                return query, key, value
            angles = sinusoidal_pos[:, :, : query.shape[2]]
            if self.rotary_value:
                return self.apply_rotary_position_embeddings(angles, query, key, value)
            return *self.apply_rotary_position_embeddings(angles, query, key), value

        vectors = [projection(states) for projection in (self.query, self.key, self.value)]
        return attend_to_batch(self, batch, vectors, heads_of, Terms()), None
