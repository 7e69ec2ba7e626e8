"""PyTorch's scaled_dot_product_attention, through Transformers' function, with the terms as a dense bias."""

from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import BlockMask

from .attention import AttentionCall
from .dense_bias import run_with_transformers, unsupported_as_bias, with_bias


class Sdpa:
    """Fused attention with a bias of size B·H·L·K."""

    name = "sdpa"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """What is no bias, and masks that are no tensors."""
        reasons = unsupported_as_bias(call)
        return [*reasons, "the mask is a BlockMask"] if isinstance(call.mask, BlockMask) else reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d), and None."""
        biased = with_bias(call)
        bias, mask = biased.bias, biased.mask
        lowest = torch.finfo(call.dtype).min
        if bias is not None and isinstance(mask, torch.Tensor) and mask.dtype != torch.bool:
            # Transformers 5.14 takes no additive mask beside a bias, and later ones let two minima add up to -inf
            biased = replace(biased, bias=(bias + mask).clamp(min=lowest), mask=mask > torch.finfo(mask.dtype).min / 2)
        length = call.query.shape[2]
        if call.is_causal and mask is call.mask and length < call.key.shape[2]:
            # the prefill of a static cache, whose empty end Transformers 5.14 cuts off the keys but not off the bias
            biased = replace(
                biased,
                key=biased.key[:, :, :length],
                value=biased.value[:, :, :length],
                bias=None if bias is None else bias[..., :length],
            )
        return run_with_transformers(self.name, call, biased)
