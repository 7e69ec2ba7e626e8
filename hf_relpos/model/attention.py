"""Attention backends. They know terms, never schemes.

`eager` is the formula itself. `sdpa` and `flex_attention` are Transformers' own functions: everything positional is
lowered to an additive bias and handed to them as `position_bias`. What a backend cannot compute is written in one
table, `BACKENDS`; asking for it raises.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .formula import Terms, attend, content_vectors, position_scores
from .offsets import Offsets


@dataclass(frozen=True)
class Backend:
    """What one value of `attn_implementation` can do.

    Attributes:
        value_term: it holds the attention weights, so it can add V.
    """

    value_term: bool


# In the order in which a default is chosen.
BACKENDS = {
    "sdpa": Backend(value_term=False),
    "eager": Backend(value_term=True),
    "flex_attention": Backend(value_term=False),
}


def capable_backends(has_value_term: bool) -> list[str]:
    """Values of `attn_implementation` that can run a scheme, the default first.

    Args:
        has_value_term: the scheme adds vectors to the values (V of the formula).
    """
    return [name for name, backend in BACKENDS.items() if backend.value_term or not has_value_term]


def check_backend(requested: str | None, has_value_term: bool, scheme: str) -> str:
    """`requested` if it can run the scheme, the default for None.

    Args:
        requested: a value of `attn_implementation`, or None.
        has_value_term: the scheme adds vectors to the values.
        scheme: the value of `position_embedding_type`, for the message.

    Raises:
        ValueError: when it cannot; names the ones that can.
    """
    capable = capable_backends(has_value_term)
    if requested is None:
        return capable[0]
    if requested not in capable:
        if requested in BACKENDS:
            reason = "it never holds the attention weights, which the value-side term of this scheme needs"
        else:
            reason = "it is not known to add the relative terms to the scores, and leaving them out would be silent"
        raise ValueError(
            f"attn_implementation={requested!r} cannot run position_embedding_type={scheme!r}: {reason}. "
            f"Use one of: {', '.join(repr(name) for name in capable)}"
        )
    return requested


def relative_attention(
    module: nn.Module,
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    offsets: Offsets,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with relative terms, by the backend of that name.

    Args:
        module: the attention layer; Transformers' functions read `is_causal` and `training` from it.
        implementation: a key of `BACKENDS`.
        query: (B, H, L, d).
        key: (B, H, K, d).
        value: (B, H, K, d).
        terms: what the scheme adds.
        offsets: r for every query and key.
        mask: as Transformers builds it for this implementation.
        dropout: probability of dropping an attention weight.
        kwargs: passed on to Transformers' function.

    Returns:
        (B, L, H, d), and the attention weights (B, H, L, K) or None where the backend does not hold them.
    """
    if implementation == "eager":
        out, probabilities = attend(query, key, value, terms, offsets, mask, dropout)
        return out.transpose(1, 2).contiguous(), probabilities
    if terms.V:
        raise ValueError(
            f"attn_implementation={implementation!r} cannot add the value-side term of this scheme; "
            f"use one of: {', '.join(capable_backends(has_value_term=True))}"
        )
    content, query, key = content_vectors(query, key, terms, offsets)
    bias = position_scores(query, key, terms, offsets)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, None)
    return function(
        module, content, key, value, mask, dropout=dropout, scaling=terms.scale, position_bias=bias, **kwargs
    )
