"""PyTorch's FlexAttention, through Transformers' function, with the terms as a dense bias that it looks up."""

from dataclasses import replace

import torch

from ..call import AttentionCall
from .dense_bias import run_with_transformers, unsupported_as_bias, with_bias


class FlexAttention:
    """Fused attention under a BlockMask, with a bias of size B·H·L·K. `relpos` takes it only for a BlockMask."""

    name = "flex_attention"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """What is no bias, and keys that a scheme hides."""
        reasons = unsupported_as_bias(call)
        if call.terms.value_table:
            reasons.append("it never holds the attention weights, which the value-side term V needs")
        if call.terms.allow:
            reasons.append("it takes no mask that differs from head to head")
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d), and None or what Transformers returns beside it."""
        biased = with_bias(call)
        if biased.bias is not None:  # it looks every entry up and broadcasts nothing
            shape = (*biased.query.shape[:-1], biased.key.shape[2])
            biased = replace(biased, bias=biased.bias.expand(shape))
        if isinstance(biased.mask, torch.Tensor) and biased.mask.dtype == torch.bool:  # it adds a dense mask
            zeros = torch.zeros_like(biased.mask, dtype=call.dtype)
            additive = zeros.masked_fill(~biased.mask, torch.finfo(call.dtype).min)
            biased = replace(biased, mask=additive)
        return run_with_transformers(self.name, call, biased)
