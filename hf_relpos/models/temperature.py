"""The attention temperature τ of a query, which grows with the logarithm of the number of visible keys."""

import math

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import PreTrainedConfig

from ..attention.call import LazyMask
from ..attention.context import AttentionContext
from ..attention.masks import is_visible
from ..attention.tracing import is_traced


def visible_keys(
    mask: torch.Tensor | LazyMask | BlockMask | None,
    context: AttentionContext,
    is_causal: bool,
    device: torch.device,
) -> torch.Tensor:
    """Number of keys to which each query may attend.

    Args:
        mask: from `SequenceMetadata.mask`: boolean or additive (B, 1 or H, L, K), a LazyMask, a BlockMask, or None.
        is_causal: whether a query without a mask attends to no later key.

    Returns:
        (1 or B, 1 or H, L), integers.
    """
    length, keys = context.query_length, context.key_length
    if isinstance(mask, LazyMask):
        return mask.visible_keys
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], None, length, keys, device)
    if mask is not None:
        return is_visible(mask).sum(-1)
    if is_causal:
        return (torch.arange(1, length + 1, device=device) + context.start)[None, None]
    return torch.full((1, 1, length), keys, device=device)


def trained_length(config: PreTrainedConfig) -> int:
    """n₀, the length up to which every τ is 1."""
    return config.attention_temperature_length or config.max_position_embeddings


def temperature(
    config: PreTrainedConfig,
    mask: torch.Tensor | LazyMask | BlockMask | None,
    context: AttentionContext,
    device: torch.device,
) -> torch.Tensor | None:
    """τ of the formula: max(1, log n / log n₀) for a query that may attend to n keys, with n₀ the trained length.

    A softmax over more keys is flatter. A factor that grows with log n keeps its entropy close to that in training
    (Chiang and Cholak 2022, arXiv 2202.12172; Su 2021, kexue.fm/archives/8823; YaRN's attention factor, Peng et
    al. 2023, arXiv 2309.00071, §3.4, has the same purpose). Rows of at most n₀ keys do not change. τ depends on n
    only, so padding and the rest of a batch have no effect. Keys that a scheme itself hides (`disan`) are counted.

    Args:
        config: a RelPosBertConfig.
        mask: as in `visible_keys`.

    Returns:
        (1 or B, 1 or H, L) in float32; None if every τ is 1.
    """
    if config.attention_temperature == "none":
        return None
    trained = trained_length(config)
    if not is_traced() and context.key_length <= trained:
        return None
    count = visible_keys(mask, context, config.is_decoder, device)
    return (count.clamp(min=1).float().log() / math.log(trained)).clamp(min=1.0)
