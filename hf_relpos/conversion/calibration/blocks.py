"""Rows of attention for the fits, and their products with tables by relative shift: strided views, no gather."""

import torch
from torch import nn


# Query rows of a block, and keys of a tile of the key-side product.
ROWS = 32


class Block:
    """Up to `ROWS` consecutive query rows of several windows of one length, with all their keys.

    Heads are the first dimension of tensors, so that all windows of a head are one matrix product. Rows are in
    descending order, so that offsets grow with the row as with the key. There are m rows, L keys, and P = L + m − 1
    offsets.

    Attributes:
        first: position of the first row.
        query: the student's q, (H, B, m, d).
        tiles: the student's k in tiles of keys, padded with zeros, (H, T, B, ROWS, d): a tile needs few offsets.
        content: the student's scores without the fitted terms, (H, B, m, L); −inf at hidden keys.
        target: the teacher's attention, (H, B, m, L); 0 at hidden keys, rows sum to 1.
        weight: weight of each row, (B, m, 1); 0 for padding.
        values: the student's v, (H, B, L, d).
        target_output: the teacher's output of each head, (H, B, m, d).
    """

    def __init__(
        self,
        first: int,
        query: torch.Tensor,
        key: torch.Tensor,
        content: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        values: torch.Tensor,
        target_output: torch.Tensor,
    ):
        """
        Args:
            query, content, target, target_output: as the attributes, but (B, H, m, …), rows in ascending order.
            key, values: (B, H, L, d).
            weight: (B, m).
        """
        self.first = first
        self.rows, self.length = content.shape[2:]
        self.span = self.length + self.rows - 1
        self.query, self.content, self.target, self.target_output = (
            tensor.transpose(0, 1).flip(2).contiguous() for tensor in (query, content, target, target_output)
        )
        padded = nn.functional.pad(key.transpose(0, 1), (0, 0, 0, -self.length % ROWS))
        self.tiles = padded.unflatten(2, (-1, ROWS)).transpose(1, 2).contiguous()
        self.values = values.transpose(0, 1).contiguous()
        self.weight = weight.flip(1)[..., None].contiguous()

    @property
    def key(self) -> torch.Tensor:
        """k, (H, B, L, d)."""
        return self.tiles.transpose(1, 2).flatten(2, 3)[:, :, : self.length]

    def part(self, table: torch.Tensor) -> torch.Tensor:
        """Select the offsets of this block from a table over all offsets: (H or 1, 2N − 1, …) to (H or 1, P, …)."""
        low = table.shape[1] // 2 + 1 - self.first - self.rows
        return table[:, low : low + self.span]

    @staticmethod
    def _diagonals(tensor: torch.Tensor, width: int) -> torch.Tensor:
        """The view (…, N, width) of (…, N, M), M ≥ N + width − 1, whose entry (n, w) is entry (n, n + w)."""
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        strides = (*tensor.stride()[:-2], tensor.shape[-1] + 1, 1)
        return tensor.as_strided((*tensor.shape[:-1], width), strides, tensor.storage_offset())

    def skew(self, per_offset: torch.Tensor) -> torch.Tensor:
        """Relative shift, as a view: (…, m, P), a column per offset, to (…, m, L), a column per key."""
        return self._diagonals(per_offset, self.length)

    def unskew(self, per_pair: torch.Tensor) -> torch.Tensor:
        """The inverse of `skew`: (…, m, L) to (…, m, P), zero if an offset does not occur in a row."""
        out = per_pair.new_zeros(*per_pair.shape[:-1], self.span)
        self.skew(out).copy_(per_pair)
        return out

    def query_scores(self, table: torch.Tensor) -> torch.Tensor:
        """q_i·A_r, (H, B, m, L), for A over all offsets, (H or 1, 2N − 1, d)."""
        rows = self.part(table).transpose(-1, -2)
        per_offset = torch.matmul(self.query.flatten(1, 2), rows)
        return self.skew(per_offset.unflatten(1, (-1, self.rows)))

    def query_gradient(self, per_offset: torch.Tensor) -> torch.Tensor:
        """Σ over rows of w_ir q_i, (H, P, d), for w (H, B, m, P)."""
        return torch.matmul(per_offset.flatten(1, 2).transpose(-1, -2), self.query.flatten(1, 2))

    def key_scores(self, table: torch.Tensor) -> torch.Tensor:
        """k_j·B_r, (H, B, m, L), for B over all offsets, (H or 1, 2N − 1, d)."""
        heads, tiles, batch = self.tiles.shape[:3]
        rows = self.part(table).expand(heads, -1, -1)
        rows = nn.functional.pad(rows, (0, 0, 0, tiles * ROWS + self.rows - 1 - rows.shape[1]))
        windows = rows.unfold(1, ROWS + self.rows - 1, ROWS)  # (H, T, d, ROWS + m − 1)
        tile_scores = torch.matmul(self.tiles.flatten(2, 3), windows).unflatten(2, (batch, ROWS))
        pairs = self._diagonals(tile_scores, self.rows)  # (H, T, B, ROWS, m)
        return pairs.permute(0, 2, 4, 1, 3).flatten(3)[..., : self.length]

    def key_gradient(self, pairs: torch.Tensor) -> torch.Tensor:
        """Σ over pairs of one offset of w_ij k_j, (H, P, d), for w (H, B, m, L)."""
        heads, tiles, batch = self.tiles.shape[:3]
        width = ROWS + self.rows - 1
        padded = nn.functional.pad(pairs, (0, tiles * ROWS - self.length)).unflatten(3, (tiles, ROWS))
        spread = pairs.new_zeros(heads, tiles, batch, ROWS, width)
        self._diagonals(spread, self.rows).copy_(padded.permute(0, 3, 1, 4, 2))
        parts = torch.matmul(spread.flatten(2, 3).transpose(-1, -2), self.tiles.flatten(2, 3))
        total = pairs.new_zeros(heads, tiles * ROWS + self.rows - 1, parts.shape[-1])
        for tile in range(tiles):
            total[:, tile * ROWS : tile * ROWS + width] += parts[:, tile]
        return total[:, : self.span]
