"""Position terms as one additive bias, (B, H, L, K), for the attention functions of Transformers."""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..call import AttentionCall
from ..formula import allowed, content_scale, content_vectors, position_scores


@dataclass(frozen=True)
class BiasedCall:
    """A call whose terms are in a bias.

    Attributes:
        query: τ (q̂ + u), (B, H, L, d).
        key: k̂, (B, H, K, d).
        value: (B, H, K, d).
        bias: all of the scores but the content, broadcastable to (B, H, L, K); None for nothing.
        mask: as the attention function takes it.
        visible: boolean, broadcastable to (B, H, L, K): what the scheme and the mask let through, where the scheme
            hides keys; it is in the bias already.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | BlockMask | None
    visible: torch.Tensor | None


def unsupported_as_bias(call: AttentionCall) -> list[str]:
    """Scores that are no sum of the content and a bias, and weights that fused attention does not return."""
    reasons = []
    if call.output_weights:
        reasons.append("only eager returns attention weights")
    if call.terms.gain or call.terms.feature_gain is not None:
        reasons.append("it adds to the content scores and cannot multiply them by a gain")
    return reasons


def with_bias(call: AttentionCall) -> BiasedCall:
    """The call with its terms lowered to a bias."""
    content, query, key = content_vectors(call.query, call.key, call.terms, call.context)
    bias = position_scores(query, key, call.terms, call.context)
    mask = call.mask if isinstance(call.mask, BlockMask) else call.tensor_mask
    visible = None
    if call.terms.allow:
        if call.is_causal:  # Transformers leaves a plain causal mask to the kernel; it is needed here
            mask = call.causal_mask
        visible = allowed(call.terms, call.context, mask if isinstance(mask, torch.Tensor) else None)
        bias = query.new_zeros(()) if bias is None else bias
        assert visible is not None
        bias = torch.where(visible, bias, torch.finfo(query.dtype).min)
    return BiasedCall(content, key, call.value, bias, mask, visible)


def run_with_transformers(
    name: str, call: AttentionCall, biased: BiasedCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run Transformers' attention function of that name; `position_bias` takes the bias."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
    out, weights = function(
        call.layer,
        biased.query,
        biased.key,
        biased.value,
        biased.mask,
        dropout=call.dropout,
        scaling=content_scale(biased.query, call.terms),
        position_bias=biased.bias,
        is_causal=call.is_causal,
        **call.options,
    )
    if torch.compiler.is_exporting():
        # what SDPA is decomposed into later may lay its result out otherwise in memory than what the graph was made
        # with, for which `contiguous` was no operation: a copy is always one
        out = out.clone(memory_format=torch.contiguous_format)
    if biased.visible is not None:  # a query that may attend to nothing gets zeros, as the formula says
        out = out * biased.visible.any(-1).transpose(1, 2)[..., None]
    return out, weights
