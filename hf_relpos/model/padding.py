"""Without the padding: between two attentions a batch is its real tokens, one after the other.

Projections, feed-forward parts and LayerNorms know nothing of rows; only attention does. So padding is taken out once,
after the embeddings, and put back once, after the last layer, while each attention lays its queries, keys and values
out in rows for as long as it takes (Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, take it out for the
attention, too). Every scheme, mask and backend works as it stands.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Padding:
    """Where the real tokens of a batch are.

    Attributes:
        places: (T,), their places in the batch, row after row.
        batch: B.
        length: L, padding included.
        ends: of every row, the place after its last real token.
    """

    places: torch.Tensor
    batch: int
    length: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> "Padding | None":
        """The padding of a batch, or None if there is none that can be taken out.

        A row must begin with a real token, since a pooler may read its first place.

        Args:
            attention_mask: (B, L), nonzero for real tokens.
        """
        real = attention_mask != 0
        if not bool(real[:, 0].all()) or bool(real.all()):
            return None
        batch, length = real.shape
        ends = length - real.flip(1).int().argmax(1)
        return cls(real.flatten().nonzero().flatten(), batch, length, tuple(ends.tolist()))

    def remove(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (1, T, D)."""
        return rows.flatten(0, 1).index_select(0, self.places)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """(1, T, D) to (B, L, D), with zeros for padding."""
        rows = tokens.new_zeros(self.batch * self.length, *tokens.shape[2:])
        return rows.index_copy(0, self.places, tokens[0]).unflatten(0, (self.batch, self.length))
