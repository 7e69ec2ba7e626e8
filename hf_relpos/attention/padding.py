"""Unpadded batches: outside of attention a batch is its real tokens, one after the other.

Projections, feed-forward parts and LayerNorms act on each token by itself; only attention needs rows. So padding is
taken out once, after the embeddings, and put back once, after the last layer, while each attention lays its queries,
keys and values out in rows (Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, unpad the attention, too). Every
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
    """Where the real tokens of a batch are.

    Attributes:
        indices: (T,), their indices in the flattened batch, row after row.
        batch: B.
        length: L, padding included.
        ends: of every row, the index after its last real token.
    """

    indices: torch.Tensor
    batch: int
    length: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> "Padding | None":
        """The padding of a batch, or None if there is none that can be taken out.

        A row must begin with a real token, since a pooler may read its first state.

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
        """The same on another device."""
        return replace(self, indices=self.indices.to(device))

    def remove(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (1, T, D)."""
        return rows.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """(1, T, D) to (B, L, D), with zeros for padding."""
        rows = tokens.new_zeros(self.batch * self.length, *tokens.shape[2:])
        return rows.index_copy(0, self.indices, tokens[0]).unflatten(0, (self.batch, self.length))


def removable_padding(
    unpad: bool, config: PreTrainedConfig, attention_mask: torch.Tensor | None, outputs: Mapping[str, Any]
) -> Padding | None:
    """The padding to take out of a batch, or None; states that are returned must have the shape of the batch.

    Args:
        unpad: whether padding is to be taken out at all.
        config: a RelPosBertConfig.
        attention_mask: as `forward` was given it.
        outputs: `output_hidden_states` and `output_attentions`, where they were given to `forward`.
    """
    kept = ("output_hidden_states", "output_attentions")
    if (
        not unpad
        or not isinstance(attention_mask, torch.Tensor)
        or attention_mask.dim() != 2
        or config.chunk_size_feed_forward
        or config.conv_kernel_size  # which has neighbours
        or any(outputs.get(name, getattr(config, name, False)) for name in kept)
        or is_traced()  # a graph would be cut where data decide on shapes
    ):
        return None
    return Padding.of(attention_mask)
