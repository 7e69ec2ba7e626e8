"""The formula itself, which computes every term and returns the attention weights: the reference of all others."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..call import AttentionCall
from ..formula import attend
from .window_blocks import is_for_blocks, run_by_blocks


class Eager:
    """`formula.attend`."""

    name = "eager"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """It refuses a BlockMask alone."""
        return ["the mask is a BlockMask"] if isinstance(call.mask, BlockMask) else []

    def reads_window_only(self, call: AttentionCall) -> bool:
        """Blocks of long calls do."""
        return is_for_blocks(call)

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d) and the attention weights (B, H, L, K); None under a window, if not wanted."""
        if is_for_blocks(call):
            return run_by_blocks(call, lambda block: self.run(block)[0]), None
        mask = call.causal_mask if call.is_causal else call.tensor_mask
        out, weights = attend(call.query, call.key, call.value, call.terms, call.context, mask, call.dropout)
        return out.transpose(1, 2).contiguous(), weights
