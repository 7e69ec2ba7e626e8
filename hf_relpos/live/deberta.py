"""Accelerated DeBERTa v1, v2 and v3: disentangled attention of Transformers' classes with our backends.

The encoder gives its layers the row of each offset instead of L·L row numbers, and the running batch instead of an
L·L mask. Without a batch the stock code computes the call.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..attention.unpadding import Batch, take_batch
from ..schemes.deberta import KINDS, disentangled_terms, in_float32, rows_in_use
from .attention import BatchAttention, attend_to_batch, split_heads
from .call import MismatchError
from .substitute import stock_file


class Stack:
    """Stack of layers of either version; makes the mask and the row of P of each offset for all of them."""

    def get_attention_mask(self, attention_mask: torch.Tensor) -> Any:
        """The running batch; else as stock."""
        return take_batch() or super().get_attention_mask(attention_mask)  # type: ignore[misc]

    def get_rel_pos(self: Any, hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
        """The row of every offset, (2L − 1,), in the order of `AttentionContext.offsets`; else as in stock."""
        batch = take_batch()
        if batch is None or not self.relative_attention:
            return super().get_rel_pos(hidden_states, query_states, relative_pos)  # type: ignore[misc]
        distance = -batch.groups[0].context.offsets(hidden_states.device)  # i − j
        span = self.max_relative_positions
        buckets = getattr(self, "position_buckets", -1)
        if buckets > 0:
            distance = stock_file(self).make_log_bucket_position(distance, buckets, span).long()
            span = buckets
        return (distance + span).clamp(0, 2 * span - 1)


class _SelfAttention(BatchAttention):
    """Self-attention of either version with our backends."""

    def attend(
        self: Any,
        states: torch.Tensor,
        batch: Batch,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """As stock."""
        if query_states is not None:
            raise MismatchError("query_states: attention to other states is stock's")
        terms = self.terms(batch.groups[0].context, relative_pos, rel_embeddings)
        vectors, visible = self.project(states), batch.groups[0].mask
        out = attend_to_batch(self, batch, vectors, self.heads_of, terms)
        if batch.indices is None and visible is not None:  # padding stays
            # in stock DeBERTa no query that is padding sees a key, which comes to the mean of all values
            mean = self.heads_of(*vectors)[2].mean(2).flatten(1)[:, None]  # (B, 1, H·d)
            out = torch.where(visible[:, 0, 0, :, None], out, mean.to(out.dtype))
        return out, None

    def terms(
        self: Any, context: AttentionContext, row_of_offset: torch.Tensor | None, rel_embeddings: torch.Tensor | None
    ) -> Terms:
        """The tables A and B of this layer.

        Args:
            row_of_offset: of every offset of the context its row of P.
            rel_embeddings: P, (2·span, D).
        """
        count, key_projection, query_projection = self.position_projections()
        scale = 1 / in_float32(math.sqrt(self.attention_head_size * (1 + count)))
        if row_of_offset is None or rel_embeddings is None or not count:
            return Terms(scale=scale)
        buckets = getattr(self, "position_buckets", -1)
        # half the rows of P, and up to which distance each has one of its own
        span, one_to_one = (buckets, buckets // 2) if buckets > 0 else (self.max_relative_positions,) * 2
        first, last = rows_in_use(context, span, one_to_one, self.pos_dropout)
        rows, heads = self.pos_dropout(rel_embeddings[first : last + 1]), self.num_attention_heads
        found = disentangled_terms(rows, row_of_offset - first, context, heads, key_projection, query_projection)
        return replace(found, scale=scale)


class SelfAttention(_SelfAttention):
    """Of DeBERTa v2 and v3."""

    def position_projections(self: Any) -> tuple[int, nn.Module | None, nn.Module | None]:
        """The number of position terms, and the projections for A and B."""
        kinds = [kind for kind in KINDS if kind in self.pos_att_type]
        key = self.key_proj if self.share_att_key else getattr(self, "pos_key_proj", None)
        query = self.query_proj if self.share_att_key else getattr(self, "pos_query_proj", None)
        return len(kinds), key if "c2p" in kinds else None, query if "p2c" in kinds else None

    def project(self: Any, states: torch.Tensor) -> list[torch.Tensor]:
        """What `heads_of` takes, (B, L, E) each."""
        return [projection(states) for projection in (self.query_proj, self.key_proj, self.value_proj)]

    def heads_of(self: Any, *vectors: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, (B, H, L, d)."""
        return split_heads(self.num_attention_heads, *vectors)


class FirstSelfAttention(_SelfAttention):
    """Of DeBERTa v1."""

    def position_projections(self: Any) -> tuple[int, nn.Module | None, nn.Module | None]:
        """The number of position terms, and the projections for A and B."""
        return len(self.pos_att_type), getattr(self, "pos_proj", None), getattr(self, "pos_q_proj", None)

    def project(self: Any, states: torch.Tensor) -> list[torch.Tensor]:
        """What `heads_of` takes."""
        return [self.in_proj(states)]

    def heads_of(self: Any, projected: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, (B, H, L, d)."""
        heads = self.num_attention_heads
        query, key, value = split_heads(heads, projected)[0].chunk(3, dim=-1)
        return [query + self.q_bias.view(heads, 1, -1), key, value + self.v_bias.view(heads, 1, -1)]
