"""Accelerated self-attention of Wav2Vec2-BERT and of SeamlessM4T v2's speech encoder.

In each layer their `relative_key` gathers a vector for every pair of frames, (L, L, d); ours has one for each offset.
"""

from typing import Any

import torch

from ..attention.formula import Terms
from ..host.live import SeamlessM4Tv2ConformerSelfAttention, Wav2Vec2BertSelfAttention, collects_outputs
from ..schemes.scheme import clipped_table
from .attention import as_boolean, attend_as_stock, prefer_backend, rate_of, split_heads
from .foreign import is_stock


class _RelativeKey:
    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As stock. Stock's own code runs for short calls, and when attention weights are requested."""
        batch, length = hidden_states.shape[:2]
        backend = self.config._attn_implementation if hasattr(self, "config") else "eager"  # of earlier releases
        ours = backend in ("eager", "sdpa") and isinstance(attention_mask, torch.Tensor | None)
        ours = ours and not (args[1:] or kwargs.get("output_attentions") or collects_outputs())
        if not ours or not prefer_backend(self, length, length, batch, self.num_heads) or not is_stock(self):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
        rows = self.distance_embedding(torch.arange(left + right + 1, device=hidden_states.device))
        projections = (self.linear_q, self.linear_k, self.linear_v)
        query, key, value = (split_heads(each(hidden_states), self.num_heads) for each in projections)
        terms = Terms(query_table=(clipped_table(rows.to(query.dtype), -left, right, "clip"),))
        mask = as_boolean(attention_mask, hidden_states if backend == "eager" else None)
        out, _ = attend_as_stock(self, query, key, value, terms, mask, rate_of(self.dropout))
        return self.linear_out(out), None


class AcceleratedWav2Vec2BertSelfAttention(_RelativeKey, Wav2Vec2BertSelfAttention):
    """Of Wav2Vec2-BERT."""


class AcceleratedSeamlessM4Tv2ConformerSelfAttention(_RelativeKey, SeamlessM4Tv2ConformerSelfAttention):
    """Of SeamlessM4T v2's speech encoder."""
