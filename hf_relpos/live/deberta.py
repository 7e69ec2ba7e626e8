"""Accelerated DeBERTa v1, v2 and v3: disentangled attention of the stock classes with our backends.

The encoder gives its layers the row of each offset instead of L·L row numbers, and the original padding mask instead
of an L·L mask. The stock code computes calls that the accelerated classes do not support: other queries
(`query_states`), explicit `relative_pos`, and attention modules called directly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..attention.tracing import has_contents, is_traced
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.live import (
    DebertaEncoder,
    DebertaSelfAttention,
    DebertaV2Encoder,
    DisentangledSelfAttention,
    build_relative_position,
    make_log_bucket_position,
)
from ..schemes.deberta import KINDS, disentangled_terms, rows_in_use
from .attention import attend_as_stock, in_single_precision, offsets_of, rate_of, split_heads
from .batch import take_batch
from .foreign import is_stock


def padding_mask(attention_mask: torch.Tensor) -> torch.Tensor | None:
    """A mask (B, L) as the accelerated layers take it: boolean, or None if no token is padding.

    The contents are read on the CPU only, and never in a graph.
    """
    real = attention_mask.bool()
    return None if has_contents(real) and bool(real.all()) else real


def stock_mask(mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """The stock encoder's mask (B, 1, L, L) for a mask from `padding_mask`."""
    if mask is None:
        batch, length = hidden_states.shape[:2]
        return torch.ones(batch, 1, 1, length, dtype=torch.bool, device=hidden_states.device)
    return mask[:, None, None, :] & mask[:, None, :, None] if mask.dim() == 2 else mask


def attend_disentangled(
    module: Any,
    vectors: Sequence[torch.Tensor],
    heads_of: Callable[..., Sequence[torch.Tensor]],
    terms_of: Callable[[AttentionContext], Terms],
    mask: torch.Tensor | UnpaddedBatch | None,
    output_attentions: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention under a padding mask (B, L) or any mask (B, 1, 1 or L, L), or of a batch without padding.

    In stock DeBERTa no query that is padding sees a key, which comes to the mean of all values. It is computed as
    such, except that dropout leaves it alone.

    Args:
        vectors: projections of the states, (B, L, E).
        heads_of: from these to query, key and value, (B, H, L, d).
        terms_of: the terms of a context.
    """
    dropout = rate_of(module.dropout)
    if isinstance(mask, UnpaddedBatch):
        terms = terms_of(offsets_of(vectors[0], mask.groups[0].length))  # of the longest rows, and so of all

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            query, key, value = heads_of(*rows)
            return attend_as_stock(module, query, key, value, terms, group.visible, dropout)[0]

        return mask.by_group(attend, *vectors), None
    visible = mask if mask is None or mask.dim() == 4 else mask[:, None, None, :]
    visible = visible if visible is None else visible.bool()
    terms = terms_of(offsets_of(vectors[0]))
    query, key, value = heads_of(*vectors)
    out, weights = attend_as_stock(module, query, key, value, terms, visible, dropout, output_attentions)
    if mask is not None and mask.dim() == 2:
        mean = value.mean(2).flatten(1)[:, None]  # (B, 1, H·d)
        out = torch.where(mask[..., None], out, mean.to(out.dtype))
        if weights is not None:
            weights = torch.where(mask[:, None, :, None], weights, 1 / weights.shape[-1])
    return out, weights


def position_terms(
    module: Any,
    context: AttentionContext,
    rel_embeddings: torch.Tensor,
    row_of_offset: torch.Tensor,
    key_projection: nn.Module | None,
    query_projection: nn.Module | None,
) -> Terms:
    """The tables A and B of one layer.

    Args:
        rel_embeddings: P, (2·span, D).
        row_of_offset: of every offset of the call, or of more on both sides, its row of P.
        key_projection: projection for A, or None without this term.
        query_projection: projection for B, or None without this term.
    """
    buckets = getattr(module, "position_buckets", -1)
    # half the rows of P, and up to which distance each has one of its own
    span, one_to_one = (buckets, buckets // 2) if buckets > 0 else (module.max_relative_positions,) * 2
    first, last = rows_in_use(context, span, one_to_one)
    beyond = (row_of_offset.shape[0] - context.high + context.low - 1) // 2
    row_of_offset = row_of_offset[beyond : row_of_offset.shape[0] - beyond]
    rows = module.pos_dropout(rel_embeddings[first : last + 1])
    heads = module.num_attention_heads
    return disentangled_terms(rows, row_of_offset - first, context, heads, key_projection, query_projection)


class _Shared:
    """Inputs that both encoders make once for all layers; where code of others is on the way, those of stock."""

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor | UnpaddedBatch | None:
        """A padding mask as it is, boolean (B, L), or None; another mask as stock has it."""
        if (batch := take_batch()) is not None:
            return batch
        if attention_mask.dim() == 2 and self._is_own():
            return padding_mask(attention_mask)
        return super().get_attention_mask(attention_mask)  # type: ignore[misc]

    def get_rel_pos(self, hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
        """The row of every offset, (2L − 1,), in the order of `AttentionContext.offsets`; otherwise as in stock."""
        encoder: Any = self
        batch = take_batch()
        if batch is not None and encoder.relative_attention:  # of the longest rows, and so of all
            return self.rows_of_offsets(hidden_states, batch.groups[0].length)
        is_stocks = not encoder.relative_attention or query_states is not None or relative_pos is not None
        if is_stocks or not self._is_own():
            return super().get_rel_pos(hidden_states, query_states, relative_pos)  # type: ignore[misc]
        return self.rows_of_offsets(hidden_states, hidden_states.shape[1])

    def rows_of_offsets(self, states: torch.Tensor, length: int) -> torch.Tensor:
        """The row of every offset between L tokens, (2L − 1,)."""
        encoder: Any = self
        distance = -offsets_of(states, length).offsets(states.device)  # i − j
        span = encoder.max_relative_positions
        buckets = getattr(encoder, "position_buckets", -1)
        if buckets > 0:
            distance = make_log_bucket_position(distance, buckets, span).long()
            span = buckets
        return (distance + span).clamp(0, 2 * span - 1)

    def _is_own(self) -> bool:
        encoder: Any = self
        return is_traced() or is_stock(encoder)


class AcceleratedDebertaV2Encoder(_Shared, DebertaV2Encoder):
    """`DebertaV2Encoder` without L·L matrices, and without padding."""


class AcceleratedDebertaEncoder(_Shared, DebertaEncoder):
    """`DebertaEncoder` without L·L matrices, and without padding."""


def is_covered(module: Any, query_states: torch.Tensor | None, relative_pos: torch.Tensor | None) -> bool:
    """Whether a call comes from an accelerated encoder, for its own tokens."""
    if query_states is not None or module.relative_attention:
        return query_states is None and relative_pos is not None and relative_pos.dim() == 1
    return is_traced() or is_stock(module)


class _SelfAttention:
    """Self-attention with our backends, to be put before the stock class of either version."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock; `attention_mask` and `relative_pos` are those of the accelerated encoder or stock's own."""
        module: Any = self
        stock: Any = super()
        if not is_covered(module, query_states, relative_pos):
            if relative_pos is not None and relative_pos.dim() == 1:
                relative_pos = module.stock_positions(hidden_states)
            mask = stock_mask(attention_mask, hidden_states)
            result: tuple[torch.Tensor, torch.Tensor | None] = stock.forward(
                hidden_states, mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
            return result
        count, *projections = module.position_projections()
        scale = 1 / in_single_precision(math.sqrt(module.attention_head_size * (1 + count)))

        def terms_of(context: AttentionContext) -> Terms:
            if relative_pos is None or rel_embeddings is None or not count:
                return Terms(scale=scale)
            return replace(position_terms(module, context, rel_embeddings, relative_pos, *projections), scale=scale)

        vectors = module.project(hidden_states)
        return attend_disentangled(module, vectors, module.heads_of, terms_of, attention_mask, output_attentions)


class AcceleratedDisentangledSelfAttention(_SelfAttention, DisentangledSelfAttention):
    """Self-attention of DeBERTa v2 and v3 with our backends."""

    def stock_positions(self, states: torch.Tensor) -> None:
        """None: the stock code makes them."""

    def position_projections(self) -> tuple[int, nn.Module | None, nn.Module | None]:
        """The number of position terms, and the projections for A and B."""
        kinds = [kind for kind in KINDS if kind in self.pos_att_type]
        key = self.key_proj if self.share_att_key else getattr(self, "pos_key_proj", None)
        query = self.query_proj if self.share_att_key else getattr(self, "pos_query_proj", None)
        return len(kinds), key if "c2p" in kinds else None, query if "p2c" in kinds else None

    def project(self, states: torch.Tensor) -> list[torch.Tensor]:
        """What `heads_of` takes, (B, L, E) each."""
        return [projection(states) for projection in (self.query_proj, self.key_proj, self.value_proj)]

    def heads_of(self, *vectors: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, (B, H, L, d)."""
        return [split_heads(each, self.num_attention_heads) for each in vectors]


class AcceleratedDebertaSelfAttention(_SelfAttention, DebertaSelfAttention):
    """Self-attention of DeBERTa v1 with our backends."""

    def stock_positions(self, states: torch.Tensor) -> torch.Tensor:
        """What the stock code needs."""
        positions: torch.Tensor = build_relative_position(states, states)
        return positions

    def position_projections(self) -> tuple[int, nn.Module | None, nn.Module | None]:
        """The number of position terms, and the projections for A and B."""
        return len(self.pos_att_type), getattr(self, "pos_proj", None), getattr(self, "pos_q_proj", None)

    def project(self, states: torch.Tensor) -> list[torch.Tensor]:
        """What `heads_of` takes."""
        return [self.in_proj(states)]

    def heads_of(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, (B, H, L, d)."""
        heads = self.num_attention_heads
        query, key, value = split_heads(projected, heads).chunk(3, dim=-1)
        return [query + self.q_bias.view(heads, 1, -1), key, value + self.v_bias.view(heads, 1, -1)]
