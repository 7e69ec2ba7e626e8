"""Accelerated MPNet: the stock classes with the bias by offset, (H, 2L − 1), instead of (B, H, L, L)."""

from typing import Any

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from ...attention.formula import Terms, toeplitz_table
from .attention import as_boolean, attend_as_stock, is_worthwhile, offsets_of, split_heads


class AcceleratedMPNetEncoder(MPNetEncoder):
    """`MPNetEncoder` whose bias has one entry for each offset."""

    def compute_position_bias(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, num_buckets: int = 32
    ) -> torch.Tensor:
        """The bias of every offset, (H, 2L − 1), in the order of `AttentionContext.offsets`.

        It is stock's bias, (B, H, L, L), if the layers run the stock code.
        """
        batch, length = x.shape[:2]
        if position_ids is not None or not is_worthwhile(self, length, length, batch, self.n_heads):
            return super().compute_position_bias(x, position_ids, num_buckets)
        offsets = offsets_of(x).offsets(x.device)
        bucket = self.relative_position_bucket(offsets, num_buckets=num_buckets)
        return self.relative_attention_bias(bucket).transpose(0, 1)


class AcceleratedMPNetSelfAttention(MPNetSelfAttention):
    """MPNet's self-attention with our backends."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """As stock, whose code runs unless `position_bias` has an entry for each offset."""
        if position_bias is None or position_bias.dim() != 2:
            return super().forward(hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
        query, key, value = (
            split_heads(projection(hidden_states), self.num_attention_heads) for projection in (self.q, self.k, self.v)
        )
        context = offsets_of(hidden_states)
        terms = Terms(bias=(toeplitz_table(position_bias, context),))
        out, weights = attend_as_stock(
            self,
            query,
            key,
            value,
            terms,
            context,
            as_boolean(attention_mask),
            self.dropout.p,
            output_attentions,
        )
        out = self.o(out)
        return (out, weights) if weights is not None else (out,)
