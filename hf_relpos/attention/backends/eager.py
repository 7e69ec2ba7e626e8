"""The formula as it stands. It computes every term and returns the attention weights: the reference for all others."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..call import AttentionCall
from ..formula import attend


class Eager:
    """`formula.attend` as a backend."""

    name = "eager"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Refuse only a BlockMask."""
        return ["the mask is a BlockMask"] if isinstance(call.mask, BlockMask) else []

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (B, L, H, d) and the attention weights (B, H, L, K)."""
        mask = call.causal_mask if call.is_causal else call.tensor_mask
        out, weights = attend(call.query, call.key, call.value, call.terms, call.context, mask, call.dropout)
        return out.transpose(1, 2).contiguous(), weights
