"""PyTorch's scaled_dot_product_attention, through Transformers' function, with the terms as a dense bias.

SDPA returns no attention weights, which the value-side term V needs; but values [v_j | e_j], with e_j row j of the
identity, have it return [Σ_j α_ij v_j | α_i], after dropout.
"""

from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..call import AttentionCall
from ..formula import position_values
from .dense_bias import BiasedCall, run_with_transformers, unsupported_as_bias, with_bias


class Sdpa:
    """Fused attention with a bias of size B·H·L·K."""

    name = "sdpa"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """What is no bias, masks that are no tensors, and the value-side term, with which eager is faster."""
        reasons = unsupported_as_bias(call)
        if isinstance(call.mask, BlockMask):
            reasons.append("the mask is a BlockMask")
        if call.terms.value_table and not call.by_name:
            reasons.append("the value-side term V needs the attention weights, and eager has them")
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d), and None."""
        biased = with_bias(call)
        bias, mask = biased.bias, biased.mask
        lowest = torch.finfo(call.dtype).min
        if bias is not None and isinstance(mask, torch.Tensor) and mask.dtype != torch.bool:
            # Transformers 5.14 takes no additive mask beside a bias, and later ones let two minima add up to -inf
            biased = replace(biased, bias=(bias + mask).clamp(min=lowest), mask=mask > torch.finfo(mask.dtype).min / 2)
        length = call.query.shape[2]
        if call.is_causal and mask is None and length < call.key.shape[2]:
            # the prefill of a static cache, whose empty end Transformers 5.14 cuts off the keys but not off the bias
            biased = replace(
                biased,
                key=biased.key[:, :, :length],
                value=biased.value[:, :, :length],
                bias=None if bias is None else bias[..., :length],
            )
        if call.terms.value_table:
            return self._run_with_weights(call, biased), None
        return run_with_transformers(self.name, call, biased)

    def _run_with_weights(self, call: AttentionCall, biased: BiasedCall) -> torch.Tensor:
        """The output with the value-side term, (B, L, H, d)."""
        batch, heads, keys, size = biased.value.shape
        # keys that are cut off have columns, but no weight
        identity = torch.eye(keys, call.key.shape[2], dtype=call.dtype, device=call.query.device)
        value = torch.cat([biased.value, identity.expand(batch, heads, -1, -1)], dim=-1)
        out, _ = run_with_transformers(self.name, call, replace(biased, value=value))
        out, weights = out[..., :size], out[..., size:].transpose(1, 2)
        positional = position_values(weights, call.terms, call.context)
        assert positional is not None
        return out + positional.transpose(1, 2).to(out.dtype)
