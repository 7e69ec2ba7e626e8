"""The formula itself, which computes every term and returns the attention weights: the reference of all others."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..call import AttentionCall
from ..formula import attend


class Eager:
    """`formula.attend`."""

    name = "eager"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """It refuses a BlockMask alone."""
        return ["the mask is a BlockMask"] if isinstance(call.mask, BlockMask) else []

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d) and the attention weights (B, H, L, K)."""
        mask = call.causal_mask if call.is_causal else call.tensor_mask
        out, weights = attend(call.query, call.key, call.value, call.terms, call.context, mask, call.dropout)
        return out.transpose(1, 2).contiguous(), weights
