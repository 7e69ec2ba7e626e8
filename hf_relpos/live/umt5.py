"""Accelerated encoders of UMT5: each layer has a bias by offset of its own, (H, 2L − 1)."""

from typing import Any

import torch

from ..attention.formula import Terms, toeplitz_table
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..host.live import UMT5Attention, UMT5Stack, records_of
from .attention import attend_as_stock, offsets_of, split_heads
from .batch import take_batch
from .t5 import ARGUMENTS, run_unpadded


class AcceleratedUMT5Stack(UMT5Stack):
    """`UMT5Stack` of an encoder without padding."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        records_of(self)
        batch = take_batch()
        if batch is None:
            return super().forward(input_ids, attention_mask, *args, **kwargs)

        def run(states: torch.Tensor) -> torch.Tensor:
            for block in self.block:
                states = block(states, batch)
                states = states[0] if isinstance(states, tuple) else states
            return states

        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        return run_unpadded(self, input_ids, given, run)


AcceleratedUMT5Stack.__name__ = UMT5Stack.__name__  # which `save_pretrained` writes as the architecture


class AcceleratedUMT5Attention(UMT5Attention):
    """UMT5's self-attention of a batch without padding."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As stock; with a batch in place of the mask the hidden states are (1, T, D)."""
        if not isinstance(attention_mask, UnpaddedBatch):
            return super().forward(hidden_states, encoder_hidden_states, cache, attention_mask, **kwargs)
        longest = offsets_of(hidden_states, attention_mask.groups[0].length)
        bucket = self._relative_position_bucket(longest.offsets(hidden_states.device))
        bias = toeplitz_table(self.relative_attention_bias(bucket).transpose(0, 1), longest)
        rate = self.dropout if self.training else 0.0

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            query, key, value = (split_heads(each, self.n_heads) for each in rows)
            terms = Terms(scale=1.0, bias=(bias,))
            return attend_as_stock(self, query, key, value, terms, group.visible, rate)[0]

        out = attention_mask.by_group(attend, *(layer(hidden_states) for layer in (self.q, self.k, self.v)))
        return self.o(out), None
