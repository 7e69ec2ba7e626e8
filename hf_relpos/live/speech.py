"""Accelerated self-attention of Wav2Vec2-BERT and of SeamlessM4T v2's speech encoder.

In each layer their `relative_key` gathers a vector for every pair of frames, (L, L, d); ours has one for each offset.
"""

from typing import Any

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..attention.masks import is_visible
from ..attention.unpadding import RowGroup
from ..host.tracing import has_contents
from ..host.transformers import collects_outputs
from ..schemes.scheme import clipped_table
from .attention import attend_as_stock, prefer_backend, rate_of, split_heads
from .foreign import is_stock


def attend_by_offset(
    self: Any,
    forward: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward of the self-attention of either encoder, with our backends.

    Stock's own code runs for short calls, and when attention weights are requested.

    Args:
        forward: stock's, bound to the module.
    """
    rows, length = hidden_states.shape[:2]
    backend = self.config._attn_implementation if hasattr(self, "config") else "eager"  # of earlier releases
    ours = backend in ("eager", "sdpa") and not (args[1:] or kwargs.get("output_attentions") or collects_outputs())
    ours = ours and prefer_backend(rows, self.num_heads, length) and has_contents(hidden_states) and is_stock(self)
    mask = attention_mask
    if ours and mask is not None:
        # booleans that are added to the scores hide nothing
        ours = mask.dtype == hidden_states.dtype or (mask.dtype == torch.bool and backend == "sdpa")
        mask = as_boolean(mask)
        # with all scores of a query at the minimum, SDPA's gradients on the CPU are not those of its output; dropout
        # must not depend on whether there are gradients
        may_train = torch.is_grad_enabled() or self.dropout.training
        ours = ours and (mask is None or mask.dtype == torch.bool or not may_train)
    if not ours:
        return forward(hidden_states, attention_mask, *args, **kwargs)
    left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
    table = self.distance_embedding(torch.arange(left + right + 1, device=hidden_states.device))
    projections = (self.linear_q, self.linear_k, self.linear_v)
    query, key, value = split_heads(self.num_heads, *(each(hidden_states) for each in projections))
    terms = Terms(query_table=(clipped_table(table.to(query.dtype), -left, right, "clip"),))
    group = RowGroup(AttentionContext(length, length), mask)
    out = attend_as_stock(self, query, key, value, terms, group, rate_of(self.dropout))
    return self.linear_out(out), None


def as_boolean(mask: torch.Tensor) -> torch.Tensor | None:
    """Convert an additive mask that only hides keys to a boolean mask, for fast backends; None if it hides nothing.

    A mask with other values stays additive, and so does one that hides all keys from some query: with the lowest
    number added to all of its scores, it attends to all of them alike. A mask that hides the same keys from every
    query becomes (B, 1, 1, L).

    Args:
        mask: additive or boolean, (B, 1, 1 or L, L).
    """
    visible = is_visible(mask)
    hides_only = bool((~visible | (mask == 0)).all()) and bool(visible.any(-1).all())
    if mask.dtype != torch.bool and not hides_only:
        return mask
    if bool(visible.all()):
        return None
    first = visible[:, :, :1]
    return first if bool((visible == first).all()) else visible
