"""PyTorch's scaled_dot_product_attention, through Transformers' function, with the terms as a dense bias.

SDPA returns no attention weights, which the value-side term V needs; but values [v_j | e_j], with e_j row j of the
identity, have it return [Σ_j α_ij v_j | α_i], after dropout.
"""

from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..call import AttentionCall
from ..formula import Terms, allowed, content_scale, content_vectors, position_scores, position_values, total_of
from ..masks import is_visible


class Sdpa:
    """Fused attention with a bias of size B·H·L·K."""

    name = "sdpa"

    def unsupported(self, call: AttentionCall) -> list[str]:
        """It refuses terms that cannot be a bias, a BlockMask, and value tables, with which eager is faster."""
        reasons = unsupported_as_bias(call)
        if isinstance(call.mask, BlockMask):
            reasons.append("the mask is a BlockMask")
        if call.terms.value_table and not call.by_name:
            reasons.append("the value-side term V needs the attention weights, and eager has them")
        return reasons

    def run(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (B, L, H, d), and None. A query to which the scheme leaves no key gets zeros."""
        lowered, visible = with_bias(call)
        out = self._run_with_weights(call, lowered) if call.terms.value_table else _run_with_transformers(lowered)
        if visible is not None:
            out = out * visible.any(-1).transpose(1, 2)[..., None]
        return out, None

    def _run_with_weights(self, call: AttentionCall, lowered: AttentionCall) -> torch.Tensor:
        """The output with the value-side term, (B, L, H, d)."""
        batch, heads, keys, size = lowered.value.shape
        # keys that are cut off have columns, but no weight
        identity = torch.eye(keys, call.key.shape[2], dtype=call.dtype, device=call.query.device)
        value = torch.cat([lowered.value, identity.expand(batch, heads, -1, -1)], dim=-1)
        out = _run_with_transformers(replace(lowered, value=value))
        out, weights = out[..., :size], out[..., size:].transpose(1, 2)
        positional = position_values(weights, call.terms, call.context)
        assert positional is not None
        return out + positional.transpose(1, 2).to(out.dtype)


def unsupported_as_bias(call: AttentionCall) -> list[str]:
    """Why terms cannot be added to the scores of fused attention: gains, and weights that it does not return."""
    reasons = []
    if call.output_weights:
        reasons.append("only eager returns attention weights")
    if call.terms.gain or call.terms.feature_gain is not None:
        reasons.append("it adds to the content scores and cannot multiply them by a gain")
    return reasons


def with_bias(call: AttentionCall) -> tuple[AttentionCall, torch.Tensor | None]:
    """The same attention with a scale and one dense bias for its terms, value tables apart.

    Returns:
        The call: its query is τ (q̂ + u), its key k̂, its mask a boolean tensor or None where there is a bias.
        And what the scheme and the mask let through, boolean, broadcastable to (B, H, L, K), where the scheme hides
        keys; it is in the bias already, and None otherwise.
    """
    content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
    bias = position_scores(query, key, call.terms, call.context)
    mask, value, visible = call.tensor_mask, call.value, None
    lowest = torch.finfo(call.dtype).min
    if call.terms.allow:
        if call.is_causal:  # Transformers leaves a plain causal mask to the kernel; it is needed here
            mask = call.causal_mask
        visible = allowed(call.terms, call.context, mask)
        assert visible is not None
        bias = torch.where(visible, query.new_zeros(()) if bias is None else bias, lowest)
    if bias is not None and mask is not None and mask.dtype != torch.bool:
        # Transformers 5.14 refuses an additive mask with a bias, and later ones let two minima add up to -inf
        bias, mask = (bias + mask).clamp(min=lowest), is_visible(mask)
    length = query.shape[2]
    if call.is_causal and mask is None and length < key.shape[2]:
        # the prefill of a static cache, whose empty end Transformers 5.14 cuts off the keys but not off the bias
        key, value = key[:, :, :length], value[:, :, :length]
        bias = None if bias is None else bias[..., :length]
    terms = Terms(scale=content_scale(query, call.terms), dense=() if bias is None else (bias,))
    return replace(call, query=content, key=key, value=value, terms=terms, mask=mask, shared=None), visible


def _run_with_transformers(call: AttentionCall) -> torch.Tensor:
    """The output (B, L, H, d) of a call `with_bias`, by Transformers' attention function."""
    out, _ = ALL_ATTENTION_FUNCTIONS.get_interface(Sdpa.name, None)(
        call.layer,
        call.query,
        call.key,
        call.value,
        call.mask,
        dropout=call.dropout,
        scaling=call.terms.scale,
        position_bias=total_of(call.terms.dense) if call.terms.dense else None,
        is_causal=call.is_causal,
        **call.options,
    )
    if torch.compiler.is_exporting():
        # what SDPA is decomposed into later may lay its result out otherwise in memory than what the graph was made
        # with, for which `contiguous` was no operation: a copy is always one
        return out.clone(memory_format=torch.contiguous_format)
    return out
