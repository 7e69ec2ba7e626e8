"""Common parts of the accelerated attention modules: they map the arguments of a stock module to an attention call."""

import math

import torch
from torch import nn

from ..attention.backends import chunked as backend_chunked
from ..attention.call import AttentionCall, LazyMask
from ..attention.context import AttentionContext
from ..attention.dispatch import AUTO, run_attention
from ..attention.formula import Terms
from ..attention.masks import is_visible
from ..attention.tracing import has_contents, is_traced


def split_heads(vectors: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape (B, L, H·d) to (B, H, L, d)."""
    return vectors.unflatten(-1, (heads, -1)).transpose(1, 2)


def offsets_of(states: torch.Tensor, length: int | None = None) -> AttentionContext:
    """The context of L tokens that attend to each other.

    Args:
        states: (B, L, D), for their dtype and device.
        length: L, where it is another than that of the states.
    """
    length = states.shape[1] if length is None else length
    precise = torch.promote_types(states.dtype, torch.float32)
    return AttentionContext(length, length, device=states.device, dtype=precise)


def prefer_backend(module: nn.Module, query_length: int, key_length: int, batch: int, heads: int) -> bool:
    """Whether our backends are faster than the stock code of MPNet, RoFormer, T5 and XLNet.

    On the CPU they are faster if there are enough scores for chunks; for shorter calls, and in graphs, stock is as
    fast. See docs/results/benchmarks/cpu-encoder.md.
    """
    if is_traced():
        return False
    scores = batch * heads * query_length * key_length
    parameter = next(module.parameters(), None)  # quantized projections have none
    on_cpu = parameter is None or parameter.device.type == "cpu"
    return scores >= backend_chunked.FEWEST_SCORES or not on_cpu


def attend_as_stock(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    mask: torch.Tensor | LazyMask | None,
    dropout: float,
    output_attentions: bool = False,
    context: AttentionContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by the best backend for the call.

    Args:
        module: the stock module.
        query: (B, H, L, d), and so are keys and values with K in place of L.
        mask: boolean (True: may attend) or additive, broadcastable to (B, H, L, K); a LazyMask; or None.
        dropout: probability of dropping an attention weight, 0 where none is dropped.
        context: None for L tokens that attend to each other.

    Returns:
        (B, L, H·d), and the attention weights (B, H, L, K) if `output_attentions` is set.
    """
    dtype = torch.promote_types(query.dtype, value.dtype)  # under autocast a bias may be float32
    call = AttentionCall(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        terms,
        offsets_of(query.transpose(1, 2)) if context is None else context,
        mask=mask,
        dropout=dropout,
        output_weights=output_attentions,
        needs_gradients=torch.is_grad_enabled(),
        # keys that several queries share are repeated already, and by the module Transformers would repeat them again
        layer=None if getattr(module, "num_key_value_groups", 1) > 1 else module,
    )
    # with all scores of a query at the minimum, SDPA's gradients on the CPU are not those of its output
    added = mask if isinstance(mask, torch.Tensor) and mask.is_floating_point() else None
    hides_rows = added is not None and has_contents(added) and torch.is_grad_enabled()
    out, weights = run_attention("eager" if hides_rows else AUTO, call)
    return out.flatten(2), weights if output_attentions else None


def rate_of(dropout: nn.Dropout) -> float:
    """The probability with which a module drops values now; it may be in training where its parent is not."""
    return dropout.p if dropout.training else 0.0


def as_boolean(mask: torch.Tensor | None, added_to: torch.Tensor | None) -> torch.Tensor | None:
    """Convert an additive mask that only hides keys to a boolean mask, for fast backends; None if it hides nothing.

    A mask with other values stays additive, and so does one that hides all keys from some query: with the lowest
    number added to all of its scores, it attends to all of them alike. A mask that hides the same keys from every
    query becomes (B, 1, 1, K). The mask is unchanged on other devices than the CPU and in graphs, since reading its
    contents would synchronise the device or break the graph.

    Args:
        mask: additive or boolean, broadcastable to (B, H, L, K); or None.
        added_to: a tensor of the dtype of the scores, if stock adds any mask to them: zeros and ones, of booleans and
            integers, hide nothing there. None if stock's attention takes boolean masks.
    """
    if mask is not None and added_to is not None and mask.dtype != added_to.dtype:
        mask = mask.to(added_to.dtype)  # PyTorch's SDPA takes float32 beside float64, and computes something else
    if mask is None or not has_contents(mask) or mask.dim() != 4:
        return mask
    if mask.dtype != torch.bool:
        visible = is_visible(mask)
        if not bool((~visible | (mask == 0)).all()) or not bool(visible.any(-1).all()):
            return mask
        mask = visible
    if bool(mask.all()):
        return None
    first = mask[:, :, :1]
    return first if bool((mask == first).all()) else mask


def in_single_precision(number: float) -> float:
    """Round a number to float32, in which stock modules keep their scale."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)
