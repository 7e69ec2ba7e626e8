"""Accelerated MPNet: the stock classes with the bias by offset, (H, 2L − 1), instead of (B, H, L, L)."""

from typing import Any

import torch

from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import UnpaddedBatch
from ..host.live import MPNetEncoder, MPNetSelfAttention
from .attention import as_boolean, attend_as_stock, offsets_of, prefer_backend, rate_of, split_heads
from .batch import take_batch
from .foreign import is_stock


class AcceleratedMPNetEncoder(MPNetEncoder):
    """`MPNetEncoder` whose bias has one entry for each offset, without padding."""

    def compute_position_bias(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, num_buckets: int = 32
    ) -> torch.Tensor:
        """The bias of every offset, (H, 2L − 1), in the order of `AttentionContext.offsets`.

        It is stock's bias, (B, H, L, L), if the layers run the stock code.
        """
        batch, (rows, length) = take_batch(), x.shape[:2]
        if batch is not None:
            length = batch.groups[0].length  # of the longest rows, and so of all
        elif position_ids is not None or not prefer_backend(self, length, length, rows, self.n_heads):
            return super().compute_position_bias(x, position_ids, num_buckets)
        elif not is_stock(self):
            return super().compute_position_bias(x, position_ids, num_buckets)
        offsets = offsets_of(x, length).offsets(x.device)
        bucket = self.relative_position_bucket(offsets, num_buckets=num_buckets)
        return self.relative_attention_bias(bucket).transpose(0, 1)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        batch = take_batch()
        return super().forward(hidden_states, attention_mask if batch is None else batch, *args, **kwargs)


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
        length = (position_bias.shape[1] + 1) // 2
        terms = Terms(bias=(toeplitz_table(position_bias, offsets_of(hidden_states, length)),))
        vectors = [projection(hidden_states) for projection in (self.q, self.k, self.v)]

        def attend(mask: torch.Tensor | None, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            query, key, value = (split_heads(each, self.num_attention_heads) for each in vectors)
            return attend_as_stock(self, query, key, value, terms, mask, rate_of(self.dropout), output_attentions)

        if isinstance(attention_mask, UnpaddedBatch):
            out = attention_mask.by_group(lambda group, *rows: attend(group.visible, *rows)[0], *vectors)
            return (self.o(out),)
        out, weights = attend(as_boolean(attention_mask, hidden_states), *vectors)
        out = self.o(out)
        return (out, weights) if weights is not None else (out,)
