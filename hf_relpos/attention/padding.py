"""Unpadded batches: outside of attention a batch consists of its real tokens, one after the other.

Projections, feed-forward layers and LayerNorms act on each token separately; only attention needs rows. So padding is
removed once after the embeddings, and restored once after the last layer. Each attention call pads its queries, keys
and values to rows again (Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, unpad the attention, too). Every
scheme, mask and backend works unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from .tracing import is_traced


@dataclass(frozen=True)
class Padding:
    """The indices of the real tokens of a batch.

    Attributes:
        indices: (T,), the indices of the real tokens in the flattened batch, row after row.
        batch: B.
        length: L, padding included.
        ends: for every row, the index after its last real token.
    """

    indices: torch.Tensor
    batch: int
    length: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> "Padding | None":
        """Return the padding of a batch, or None if it has no padding that can be removed.

        Every row must begin with a real token, since a pooler may read its first state.

        Args:
            attention_mask: (B, L), nonzero for real tokens.
        """
        real = attention_mask != 0
        if not bool(real[:, 0].all()) or bool(real.all()):
            return None
        batch, length = real.shape
        ends = length - real.flip(1).int().argmax(1)
        return cls(real.flatten().nonzero().flatten(), batch, length, tuple(ends.tolist()))

    def to(self, device: torch.device) -> "Padding":
        """Return a copy on another device."""
        return replace(self, indices=self.indices.to(device))

    def remove(self, rows: torch.Tensor) -> torch.Tensor:
        """Remove the padding: (B, L, D) to (1, T, D)."""
        return rows.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """Restore the padding with zeros: (1, T, D) to (B, L, D)."""
        rows = tokens.new_zeros(self.batch * self.length, *tokens.shape[2:])
        return rows.index_copy(0, self.indices, tokens[0]).unflatten(0, (self.batch, self.length))


def removable_padding(
    unpad: bool, config: PreTrainedConfig, attention_mask: torch.Tensor | None, outputs: Mapping[str, Any]
) -> Padding | None:
    """Return the padding to remove from a batch, or None. States that are returned must have the shape of the batch.

    Args:
        unpad: whether padding may be removed at all.
        config: a RelPosBertConfig.
        attention_mask: the mask that `forward` was given.
        outputs: `output_hidden_states` and `output_attentions`, if `forward` was given them.
    """
    kept = ("output_hidden_states", "output_attentions")
    if (
        not unpad
        or not isinstance(attention_mask, torch.Tensor)
        or attention_mask.dim() != 2
        or config.chunk_size_feed_forward
        or config.conv_kernel_size  # a convolution reads neighbouring tokens
        or any(outputs.get(name, getattr(config, name, False)) for name in kept)
        or is_traced()  # shapes that depend on data would break a graph
    ):
        return None
    return Padding.of(attention_mask)
