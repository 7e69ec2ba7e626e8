"""PyTorch's scaled_dot_product_attention, called through Transformers' function, with the terms as an additive mask.

SDPA returns no attention weights, which the value-side term V needs: eager computes a call with it.
"""

from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from ...host.transformers import ALL_ATTENTION_FUNCTIONS
from ..call import AttentionCall
from ..formula import Terms, allowed, content_scale, content_vectors, position_scores
from ..masks import finite, is_visible
from .eager import Eager


class Sdpa:
    """Fused attention with a bias of size B·H·L·K."""

    name = "sdpa"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Refuse terms that cannot be a bias, a BlockMask, and by default value tables, which eager computes."""
        reasons = unsupported_as_bias(call)
        if isinstance(call.mask, BlockMask):
            reasons.append("the mask is a BlockMask")
        if call.terms.value_table and not call.by_name:
            reasons.append("the value-side term V needs the attention weights, and eager has them")
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (B, L, H, d), and None. A query to which the scheme leaves no key gets zeros."""
        if call.terms.value_table:
            return Eager().run(call)[0], None
        lowered, visible = with_bias(call)
        out = _run_with_transformers(lowered)
        if visible is not None:
            out = out * visible.any(-1).transpose(1, 2)[..., None]
        return out, None


def unsupported_as_bias(call: AttentionCall) -> list[str]:
    """Return the reasons why terms cannot be a bias of fused attention: gains, and weights that it does not return."""
    reasons = []
    if call.output_weights:
        reasons.append("only eager returns attention weights")
    if call.terms.gain or call.terms.feature_gain is not None:
        reasons.append("it adds to the content scores and cannot multiply them by a gain")
    return reasons


def with_bias(call: AttentionCall) -> tuple[AttentionCall, torch.Tensor | None]:
    """Replace the terms of a call by a scale, and those that add to scores by a mask. Value tables are left out.

    Returns:
        The call: its query is q̂ + u, and its key is k̂. If the scheme hides keys, also the pairs that the scheme
        and the mask let through, boolean, broadcastable to (B, H, L, K), which the mask contains already; else None.
    """
    content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
    terms = Terms(scale=content_scale(query, call.terms))
    by_content = call.terms.query_table or call.terms.key_table or torch.is_grad_enabled()
    kept = None if by_content or call.kept is None else call.kept
    if kept is not None and (found := kept.get((call.device, call.dtype))) and found[0] is call.terms:
        _, mask, visible, is_causal = found  # as in an earlier layer, whose terms are the same
        return replace(call, query=content, key=key, terms=terms, mask=mask, is_causal=is_causal, shared=None), visible
    bias = position_scores(query, key, call.terms, call.context)
    mask, visible = call.tensor_mask, None
    lowest = torch.finfo(call.dtype).min
    if call.is_causal and (bias is not None or call.terms.allow):
        mask = call.causal_mask  # without a bias Transformers leaves it to the kernel
    if call.terms.allow:
        visible = allowed(call.terms, call.context, mask)
        assert visible is not None
        bias = torch.where(visible, query.new_zeros(()) if bias is None else bias, lowest)
    if bias is not None and mask is not None and mask.dtype != torch.bool:
        bias, mask = finite(bias + mask, call.dtype), is_visible(mask)  # two minima would add up to -inf
    if bias is not None and mask is not None and visible is None and torch.is_grad_enabled():
        # A query without keys attends to all alike. With all scores at the minimum SDPA does so, too, but on the CPU
        # its gradients are not those of its output.
        has_keys = mask.any(-1, keepdim=True)
        content = content.masked_fill(~has_keys, 0.0)
        bias, mask = torch.where(mask, bias, bias.new_zeros(()).masked_fill(has_keys, lowest)), None
    if bias is not None:
        mask = (bias if mask is None else torch.where(mask, bias, lowest)).contiguous()
    is_causal = call.is_causal and bias is None
    if kept is not None:
        kept[call.device, call.dtype] = call.terms, mask, visible, is_causal
    return replace(call, query=content, key=key, terms=terms, mask=mask, is_causal=is_causal, shared=None), visible


def _run_with_transformers(call: AttentionCall) -> torch.Tensor:
    """Compute the output (B, L, H, d) of a call from `with_bias`, by Transformers' attention function.

    Fused kernels need values as wide as queries, or keep all scores.
    """
    value, size = call.value, call.value.shape[-1]
    if call.query.shape[-1] > size:
        value = pad(value, (0, call.query.shape[-1] - size))
    out, _ = ALL_ATTENTION_FUNCTIONS[Sdpa.name](
        call.layer,
        call.query,
        call.key,
        value,
        call.mask,
        dropout=call.dropout,
        scaling=call.terms.scale,
        is_causal=call.is_causal,
        **call.options,
    )
    out = out if value is call.value else out[..., :size]
    if torch.compiler.is_exporting():
        # SDPA is decomposed later, and may then have another memory layout than when the graph was made. `contiguous`
        # was no operation for that layout; a copy is always one.
        return out.clone(memory_format=torch.contiguous_format)
    return out
