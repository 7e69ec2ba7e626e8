"""The mask of an attention window as vectors, for backends that read only the keys in the window."""

import torch
from transformers import PreTrainedConfig

from ..attention.sliding_window import SlidingWindowMask
from ..attention.tracing import is_traced
from .sequence import LAZY_MASKS, SequenceMetadata, global_tokens_of, token_mask


def window_mask(
    metadata: SequenceMetadata,
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> SlidingWindowMask | None:
    """The mask of an attention window; None without a window, and if the mask must be a tensor.

    Args:
        metadata: the tokens of the call.
        config, hidden_states, attention_mask: as in `SequenceMetadata.mask`.
    """
    if (
        config.attention_window is None
        or config._attn_implementation == "flex_attention"
        or isinstance(metadata.start, torch.Tensor)
        or metadata.prepared_mask is not None
        or (attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2))
        or is_traced()
    ):
        return None
    is_token = metadata.is_token
    if metadata.memory is None and attention_mask is not None:
        is_token = token_mask(attention_mask, hidden_states.shape[0], metadata.key_length, hidden_states.device)
    return SlidingWindowMask(
        metadata.query_length,
        metadata.key_length,
        config.attention_window,
        hidden_states.device,
        start=metadata.start,
        global_tokens=global_tokens_of(config),
        is_causal=config.is_decoder,
        positions=metadata.positions if metadata.memory is not None else None,
        documents=metadata.documents,
        index_in_document=metadata.index_in_document,
        is_token=is_token,
    )


def register_window_mask() -> None:
    """Register this mask for models. Idempotent."""
    if window_mask not in LAZY_MASKS:
        LAZY_MASKS.append(window_mask)
