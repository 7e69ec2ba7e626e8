"""The mask of an attention window as vectors, for backends that read only the keys in it."""

import torch
from transformers import PreTrainedConfig

from ..attention.sliding_window import BandMask
from ..attention.tracing import is_traced
from .sequence import LAZY_MASKS, TokenLayout, global_tokens_of, token_mask


def band_mask(
    layout: TokenLayout,
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> BandMask | None:
    """The mask of an attention window; None without one, and where a mask must be a tensor or shows more.

    Args:
        layout: the tokens of the call.
        config, hidden_states, attention_mask: as those of `TokenLayout.mask`.
    """
    if (
        config.attention_window is None
        or config._attn_implementation == "flex_attention"
        or isinstance(layout.start, torch.Tensor)
        or layout.prepared_mask is not None
        or (attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2))
        or is_traced()
    ):
        return None
    is_token = layout.is_token
    if layout.memory is None and attention_mask is not None:
        is_token = token_mask(attention_mask, hidden_states.shape[0], layout.key_length, hidden_states.device)
    return BandMask(
        layout.query_length,
        layout.key_length,
        config.attention_window,
        hidden_states.device,
        start=layout.start,
        global_tokens=global_tokens_of(config),
        is_causal=config.is_decoder,
        reach=config.memory_length if config.memory_same_length else None,
        positions=layout.positions if layout.memory is not None else None,
        documents=layout.documents,
        index_in_document=layout.index_in_document,
        is_token=is_token,
    )


def register_window_mask() -> None:
    """Let models make this mask. Idempotent."""
    if band_mask not in LAZY_MASKS:
        LAZY_MASKS.append(band_mask)
