"""Base classes of the accelerated attention modules: from hidden states of Transformers' to an attention call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..attention.backends import chunked as backend_chunked
from ..attention.call import AttentionCall, SharedTerms
from ..attention.dispatch import AUTO, choose, run_attention
from ..attention.formula import Terms
from ..attention.unpadding import Batch, RowGroup, take_batch
from .record import is_watching, note_attention


class BatchAsMask:
    """Mixin for a stack of layers: passes the running batch to them in place of the mask."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        return super().forward(hidden_states, take_batch() or attention_mask, *args, **kwargs)  # type: ignore[misc]


class BatchAttention:
    """Mixin for self-attention: its method `attend` computes calls whose mask is a batch."""

    def forward(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock."""
        if isinstance(attention_mask, Batch):
            return self.attend(hidden_states, attention_mask, *args, **kwargs)
        return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]


def split_heads(heads: int, *vectors: torch.Tensor) -> list[torch.Tensor]:
    """Reshape each (B, L, H·d) to (B, H, L, d)."""
    return [each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in vectors]


def prefer_backend(rows: int, heads: int, length: int) -> bool:
    """Whether our backends are faster than Transformers' MPNet, RoFormer, T5, XLNet and speech encoders.

    They are if there are enough scores for chunks; for shorter calls stock is as fast. See
    docs/results/benchmarks/cpu-encoder.md.
    """
    return rows * heads * length**2 >= backend_chunked.FEWEST_SCORES


def attend_to_batch(
    module: Any,
    batch: Batch,
    vectors: Sequence[torch.Tensor],
    heads_of: Callable[..., Sequence[torch.Tensor]],
    terms: Terms,
) -> torch.Tensor:
    """Compute attention of a batch: (1, T, H·d), or (B, L, H·d) if padding is kept.

    Args:
        module: the stock module, which has the dropout of attention weights.
        vectors: projections of the states, each (1, T, E) or (B, L, E).
        heads_of: from these, of some rows, to query, key and value, (b, H, l, d).
        terms: of the offsets of the longest rows.
    """
    rate = rate_of(module.dropout)
    shared: SharedTerms | None = None  # the longest rows come first, and others have their terms

    def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
        nonlocal shared
        query, key, value = heads_of(*rows)
        shared = shared or SharedTerms(terms, None, group.context, query)
        return attend_as_stock(module, query, key, value, terms, group, rate, shared)

    return batch.by_group(attend, *vectors)


def attend_as_stock(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    group: RowGroup,
    dropout: float,
    shared: SharedTerms | None = None,
) -> torch.Tensor:
    """Compute attention of L tokens to each other by the best backend for the call.

    Args:
        module: the stock module.
        query: (B, H, L, d), and so are keys and values.
        group: its rows.
        dropout: probability of dropping an attention weight, 0 where none is dropped.
        shared: those of the longest rows, if they are these or hold for them.

    Returns:
        (B, L, H·d).
    """
    dtype = torch.promote_types(query.dtype, value.dtype)  # under autocast a bias may be float32
    call = AttentionCall(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        terms,
        group.context,
        mask=group.mask,
        dropout=dropout,
        needs_gradients=torch.is_grad_enabled(),
        # keys that several queries share are repeated already, and by the module Transformers would repeat them again
        layer=None if getattr(module, "num_key_value_groups", 1) > 1 else module,
        shared=shared if shared is not None and shared.holds_for(group.context) else None,
        kept=group.kept,
    )
    if is_watching():
        note_attention(f"this package's {choose(call)[0].name}")
    return run_attention(AUTO, call)[0].flatten(2)


def rate_of(dropout: nn.Dropout) -> float:
    """Return the current dropout rate of a module, which may be in training mode when its parent is not."""
    return dropout.p if dropout.training else 0.0
