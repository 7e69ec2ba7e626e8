"""Accelerated DeBERTa v1, v2 and v3: disentangled attention of Transformers' classes with our backends.

The encoder gives its layers the running batch instead of an L·L mask, and no L·L row numbers: all layers have the same
map from offsets to rows of P. Without a batch the stock code computes the call.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..attention.unpadding import Batch, take_batch
from ..schemes.deberta import KINDS, RowsOfP, disentangled_terms, in_float32, rows_in_use
from .attention import BatchAttention, attend_to_batch, split_heads
from .call import MismatchError


class Stack:
    """Stack of layers of either version; makes no L·L mask and row numbers for the running batch."""

    def get_attention_mask(self, attention_mask: torch.Tensor) -> Any:
        """The running batch; else as stock."""
        return take_batch() or super().get_attention_mask(attention_mask)  # type: ignore[misc]

    def get_rel_pos(self: Any, hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
        """None for the running batch; else as in stock."""
        if take_batch() is not None:
            return None
        return super().get_rel_pos(hidden_states, query_states, relative_pos)  # type: ignore[misc]


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
        terms = self.terms(batch.groups[0].context, rel_embeddings)
        vectors, visible = self.project(states), batch.groups[0].mask
        out = attend_to_batch(self, batch, vectors, self.heads_of, terms)
        if batch.indices is None and visible is not None:  # padding stays
            # in stock DeBERTa no query that is padding sees a key, which comes to the mean of all values
            mean = self.heads_of(*vectors)[2].mean(2).flatten(1)[:, None]  # (B, 1, H·d)
            out = torch.where(visible[:, 0, 0, :, None], out, mean.to(out.dtype))
        return out, None

    def terms(self: Any, context: AttentionContext, rel_embeddings: torch.Tensor | None) -> Terms:
        """The tables A and B of this layer.

        Args:
            rel_embeddings: P, (2·span, D); None without relative attention.
        """
        count, key_projection, query_projection = self.position_projections()
        scale = 1 / in_float32(math.sqrt(self.attention_head_size * (1 + count)))
        if rel_embeddings is None or not count:
            return Terms(scale=scale)
        buckets, distance = getattr(self, "position_buckets", -1), self.max_relative_positions
        # half the rows of P, and up to which distance each has one of its own
        span, one_to_one = (buckets, buckets // 2) if buckets > 0 else (distance, distance)
        first, last = rows_in_use(context, span, one_to_one, self.pos_dropout)
        rows, heads = self.pos_dropout(rel_embeddings[first : last + 1]), self.num_attention_heads
        few = buckets if buckets > 0 else None
        row_of = RowsOfP(span - last, span - first, descending=True, buckets=few, max_distance=distance)
        found = disentangled_terms(rows, row_of, heads, key_projection, query_projection)
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
