"""Accelerated RoFormer: the stock function rotates queries and keys, and the rest is attention without terms."""

from typing import Any

import torch

from ..attention.formula import Terms
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.live import RoFormerEncoder, RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding
from ..host.transformers import has_cache
from .attention import as_boolean, attend_as_stock, prefer_backend, rate_of, split_heads
from .batch import take_batch
from .foreign import is_stock


class AcceleratedRoFormerSinusoidalPositionalEmbedding(RoFormerSinusoidalPositionalEmbedding):
    """The angles of positions; without padding those of the longest row, and so of all."""

    def forward(self, input_ids_shape: torch.Size, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock."""
        batch = take_batch()
        shape = input_ids_shape if batch is None else torch.Size((1, batch.groups[0].length))
        angles: torch.Tensor = super().forward(shape, *args, **kwargs)
        return angles


class AcceleratedRoFormerEncoder(RoFormerEncoder):
    """`RoFormerEncoder` without padding."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        batch = take_batch()
        return super().forward(hidden_states, attention_mask if batch is None else batch, *args, **kwargs)


class AcceleratedRoFormerSelfAttention(RoFormerSelfAttention):
    """RoFormer's self-attention in an encoder."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock, whose code runs for short inputs; without the attention weights unless they are asked for."""
        if isinstance(attention_mask, UnpaddedBatch):
            vectors = [projection(hidden_states) for projection in (self.query, self.key, self.value)]

            def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
                return self.attend(sinusoidal_pos, group.visible, *rows)[0]

            return attention_mask.by_group(attend, *vectors), None
        batch, length = hidden_states.shape[:2]
        long = prefer_backend(self, length, length, batch, self.num_attention_heads) and is_stock(self)
        if not long or encoder_hidden_states is not None or has_cache(kwargs):
            return super().forward(
                hidden_states,
                attention_mask=attention_mask,
                sinusoidal_pos=sinusoidal_pos,
                encoder_hidden_states=encoder_hidden_states,
                output_attentions=output_attentions,
                **kwargs,
            )
        vectors = [projection(hidden_states) for projection in (self.query, self.key, self.value)]
        mask = as_boolean(attention_mask, hidden_states)
        return self.attend(sinusoidal_pos, mask, *vectors, output_attentions=output_attentions)

    def attend(self, sinusoidal_pos: Any, mask: Any, *vectors: torch.Tensor, output_attentions: bool = False) -> Any:
        """Attention of projected states, (b, l, H·d), at the first l of the positions."""
        query, key, value = (split_heads(each, self.num_attention_heads) for each in vectors)
        if sinusoidal_pos is not None:
            rotated = (query, key, value) if self.rotary_value else (query, key)
            positions = sinusoidal_pos[:, :, : query.shape[2]]
            query, key, *last = self.apply_rotary_position_embeddings(positions, *rotated)
            value = last[0] if last else value
        return attend_as_stock(self, query, key, value, Terms(), mask, rate_of(self.dropout), output_attentions)
