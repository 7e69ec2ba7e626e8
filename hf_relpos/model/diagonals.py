"""Products of vectors with the rows of a table that belong to their offsets, read by pair, and their gradients.

    pairs_{g,i,j} = vectors_{g,i} · table_{h, first + i + j}

That is q_i·A_{j−i} for queries in reverse order, and k_j·B_{j−i} with i and j exchanged. For a block of s vectors and
n on the other side it is one product with n + s − 1 rows of the table, in a buffer of rows of W numbers. Element
(i, j) is at i·W + (i + j) = i·(W + 1) + j: the same buffer, read with rows of W + 1 numbers, is by pair, without a
gather. What that view does not cover are gaps. A block is short, so that few of the products are of no pair and the
buffer stays in the cache; a table is padded and W rounded, because products whose sizes are no multiples of a vector
register's take up to twice as long.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .skewed import ALIGNED, rounded_up, vectors_per_block, workspace


class Band(NamedTuple):
    """The columns of a product by offset between which the rows of the table differ.

    Attributes:
        width: the number of offsets.
        left: the first of them; those before have the row of this one.
        right: the last; those after have the row of this one.
    """

    width: int
    left: int
    right: int

    @classmethod
    def of(cls, first: int, width: int, count: int, tails: tuple[int, int]) -> "Band":
        """That of `width` offsets from row `first` on, in a table of `count` rows with these tails."""
        left = min(max(tails[0] - 1 - first, 0), width - 1)
        return cls(width, left, min(max(count - tails[1] - first, left), width - 1))

    @property
    def aligned(self) -> tuple[int, int]:
        """The band and what is computed besides, for its begin and its size to be multiples of ALIGNED."""
        begin = self.left - self.left % ALIGNED
        return begin, begin + rounded_up(self.right + 1 - begin)

    def fill(self, products: torch.Tensor) -> None:
        """Set the columns outside of the band, (…, W)."""
        left, right = self.left, self.right
        if left:
            products[..., :left] = products[..., left : left + 1]
        if right < self.width - 1:
            products[..., right + 1 : self.width] = products[..., right : right + 1]

    def gather(self, products: torch.Tensor) -> None:
        """Add the columns outside of the band to its ends."""
        left, right = self.left, self.right
        if left:
            products[..., left] += products[..., :left].sum(-1)
        if right < self.width - 1:
            products[..., right] += products[..., right + 1 : self.width].sum(-1)


class Block(NamedTuple):
    """Some of the vectors; the row of the table of their first offset; and the band of their products."""

    vectors: slice
    first: int
    band: Band

    @property
    def rows(self) -> slice:
        """Of the table, those of the band."""
        return slice(self.first + self.band.left, self.first + self.band.right + 1)


def padded(table: torch.Tensor) -> torch.Tensor:
    """A table, (…, P, d), with ALIGNED − 1 rows of zeros at its end, up to which products may be taken."""
    return pad(table, (0, 0, 0, ALIGNED - 1))


def unpadded(table: torch.Tensor) -> torch.Tensor:
    """What `padded` was given."""
    return table[:, : table.shape[1] - ALIGNED + 1]


class Diagonals:
    """A table for some heads, and the products with it.

    Args:
        table: (h or 1, P + ALIGNED − 1, d), `padded`.
        tails: how many rows at the beginning and at the end of it are one.
        heads: h; pairs and vectors are of g = h · rows, those of one head together.
    """

    def __init__(self, table: torch.Tensor, tails: tuple[int, int], heads: int):
        self.table, self.tails, self.heads = table, tails, heads
        self.count = table.shape[1] - ALIGNED + 1
        self.is_shared = table.shape[0] == 1

    def blocks(self, pairs: torch.Tensor, first: int) -> Iterator[Block]:
        """The blocks of pairs (g, m, n)."""
        _, rows, others = pairs.shape
        size = vectors_per_block(others, pairs.device)
        for begin in range(0, rows, size):
            end = min(begin + size, rows)
            band = Band.of(first + begin, others + end - begin - 1, self.count, self.tails)
            yield Block(slice(begin, end), first + begin, band)

    def buffer(self, pairs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For pairs (g, s, n): a buffer (g, s, W); the same by product, (g · s, W) or (h, g/h · s, W); and by pair."""
        groups, rows, others = pairs.shape
        row = rounded_up(width)
        buffer = workspace("offsets", (groups, rows, row), pairs.dtype, pairs.device)
        return buffer, self.merged(buffer), buffer.as_strided((groups, rows, others), (rows * row, row + 1, 1))

    def merged(self, vectors: torch.Tensor) -> torch.Tensor:
        """(g, s, x) as (g · s, x) for a table that all heads share, else as (h, g/h · s, x)."""
        size = vectors.shape[-1]
        return vectors.reshape(-1, size) if self.is_shared else vectors.reshape(self.heads, -1, size)

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Rows of the table, (N, d), or (h, N, d)."""
        rows = self.table[:, first:end]
        return rows[0] if self.is_shared else rows

    def add_to(self, pairs: torch.Tensor, vectors: torch.Tensor, first: int, fresh: bool = False) -> None:
        """pairs (g, m, n) += the products of the vectors, (g, m, d).

        Args:
            first: the row of the table of the first vector and the first of the other side.
            fresh: whether `pairs` hold nothing yet.
        """
        for block in self.blocks(pairs, first):
            into = pairs[:, block.vectors]
            buffer, products, by_pair = self.buffer(into, block.band.width)
            begin, end = block.band.aligned
            rows = self.rows(block.first + begin, block.first + end).transpose(-1, -2)
            multiply = torch.mm if self.is_shared else torch.bmm
            multiply(self.merged(vectors[:, block.vectors]), rows, out=products[..., begin:end])
            block.band.fill(buffer)
            if fresh:
                into.copy_(by_pair)
            else:
                into.add_(by_pair)

    def transposed(self, pairs: torch.Tensor, first: int) -> Iterator[tuple[Block, torch.Tensor, torch.Tensor]]:
        """For each block: the sums of its pairs by row of the table, (g · s or h, g/h · s, c), and these rows."""
        for block in self.blocks(pairs, first):
            buffer, by_offset, by_pair = self.buffer(pairs[:, block.vectors], block.band.width)
            buffer.zero_()
            by_pair.copy_(pairs[:, block.vectors])
            block.band.gather(buffer)
            columns = by_offset[..., block.band.left : block.band.right + 1]
            yield block, columns, self.rows(block.rows.start, block.rows.stop)

    def weighed(
        self,
        pairs: torch.Tensor,
        first: int,
        total: torch.Tensor | None = None,
        vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Σ_j pairs_ij · table_{first + i + j}, (g, m, d); with `total`, adds what `table_gradient` does."""
        results = []
        for block, by_row, rows in self.transposed(pairs, first):
            part = torch.matmul(by_row, rows)
            results.append(part.view(pairs.shape[0], -1, part.shape[-1]))
            if total is not None and vectors is not None:
                self._add_to_table(total, block, by_row, vectors)
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def table_gradient(self, pairs: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor) -> None:
        """Add Σ pairs_ij · vectors_i of the pairs of each row of the table to that row of `total`, like the table."""
        for block, by_row, _ in self.transposed(pairs, first):
            self._add_to_table(total, block, by_row, vectors)

    def _add_to_table(self, total: torch.Tensor, block: Block, by_row: torch.Tensor, vectors: torch.Tensor) -> None:
        into = total[:, block.rows]
        into = into[0] if self.is_shared else into
        add_product(into, by_row.transpose(-1, -2), self.merged(vectors[:, block.vectors]))


def diagonal_sums(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums of pairs, (g, m, n), with the same i + j: (g, m + n − 1), summed in that dtype."""
    groups, rows, others = pairs.shape
    width = rows + others - 1
    buffer = workspace("offsets", (groups, rows, width), pairs.dtype, pairs.device).zero_()
    buffer.as_strided(pairs.shape, (rows * width, width + 1, 1)).copy_(pairs)
    return buffer.sum(1, dtype=dtype)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> None:
    """total += alpha · left · right, matrices or batches of them; `total` may be more precise than these."""
    if total.dtype == left.dtype:
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(left, right, alpha=alpha)
    else:
        total.add_(torch.matmul(left, right), alpha=alpha)
