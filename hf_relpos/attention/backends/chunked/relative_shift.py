"""Relative shift: products of vectors with the table rows of their offsets, read by pair, and their gradients.

    pairs_{g,i,j} = vectors_{g,i} · table_{h, first + i + j}

For queries in reverse order this is q_i·A_{j−i}; with i and j exchanged it is k_j·B_{j−i}. For a block of s vectors
and n on the other side, one product with n + s − 1 rows of the table fills a buffer with rows of W numbers. Element
(i, j) is at i·W + (i + j) = i·(W + 1) + j. So the same buffer, read with rows of W + 1 numbers, is by pair, without a
gather. Numbers outside of that view belong to no pair. A block is short, so that few products belong to no pair and
the buffer stays in the cache. The blocks of a chunk are one batch of products, with views of the table. A table is
padded and W is rounded up, because products whose sizes are not multiples of a vector register take up to twice as
long.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....products.cpu_gemm import has_onednn_bmm
from .chunks import ALIGNED, blocks_at_once, rounded_up, vectors_per_block, workspace


class DistinctColumns(NamedTuple):
    """The columns of a product by offset between which the rows of the table differ.

    Attributes:
        width: the number of offsets.
        left: the first of these columns; columns before it have its row.
        right: the last of these columns; columns after it have its row.
    """

    width: int
    left: int
    right: int

    @classmethod
    def of(cls, first: int, width: int, count: int, clamped: tuple[int, int]) -> "DistinctColumns":
        """Return the columns for `width` offsets from row `first` on, in a table of `count` rows with clamped ends."""
        left = min(max(clamped[0] - 1 - first, 0), width - 1)
        return cls(width, left, min(max(count - clamped[1] - first, left), width - 1))

    @property
    def aligned(self) -> tuple[int, int]:
        """Begin and end of these columns, extended so that the begin and the size are multiples of ALIGNED."""
        begin = self.left - self.left % ALIGNED
        return begin, begin + rounded_up(self.right + 1 - begin)

    def fill(self, products: torch.Tensor) -> None:
        """Copy the first and the last of these columns to the columns beyond them, in (…, W)."""
        left, right = self.left, self.right
        if left:
            products[..., :left] = products[..., left : left + 1]
        if right < self.width - 1:
            products[..., right + 1 : self.width] = products[..., right : right + 1]

    def gather(self, products: torch.Tensor) -> None:
        """Add the columns beyond these to the first and the last of these, in (…, W)."""
        left, right = self.left, self.right
        if left:
            products[..., left] += products[..., :left].sum(-1)
        if right < self.width - 1:
            products[..., right] += products[..., right + 1 : self.width].sum(-1)


class Blocks(NamedTuple):
    """Consecutive blocks of vectors, and the columns of their products.

    Attributes:
        vectors: the vectors of all these blocks.
        number: the number of blocks.
        size: s, the number of vectors in one block.
        first: the row of the table for the first offset of the first block. Each further block begins s rows later.
        distinct: the distinct columns of a block's products.
    """

    vectors: slice
    number: int
    size: int
    first: int
    distinct: DistinctColumns

    def rows(self, block: int) -> slice:
        """Return the distinct rows of the table for one block."""
        first = self.first + block * self.size
        return slice(first + self.distinct.left, first + self.distinct.right + 1)


def padded(table: torch.Tensor) -> torch.Tensor:
    """Pad a table, (…, P, d), with ALIGNED − 1 rows of zeros at its end, for products of rounded sizes."""
    # `pad` would first fill everything with zeros; under a window, few rows of a long table are computed with
    return torch.cat([table, table.new_zeros(*table.shape[:-2], ALIGNED - 1, table.shape[-1])], dim=-2)


class Diagonals:
    """A table for some heads, and the products with it.

    Pairs are (g, m, n) with g = h · r matrices; those of one head are adjacent. Vectors are by position, (r, m, h, d),
    as a layer's projection leaves them. Heads that share a table then make one matrix of a block without a copy.

    Args:
        table: (h or 1, P + ALIGNED − 1, d), `padded`.
        clamped: the number of equal rows at the beginning and at the end of the table.
        grid: (h, r), heads and rows of the batch.
    """

    def __init__(self, table: torch.Tensor, clamped: tuple[int, int], grid: tuple[int, int]):
        self.table, self.clamped, self.grid = table, clamped, grid
        self.count = table.shape[1] - ALIGNED + 1
        self.is_shared = table.shape[0] == 1

    def blocks(self, pairs: torch.Tensor, first: int) -> Iterator[Blocks]:
        """Yield the blocks of pairs (g, m, n), several at once if they share distinct columns and fit the buffer."""
        groups, rows, others = pairs.shape
        size = vectors_per_block(pairs.dtype)
        width, number = size + others - 1, max(1, rows // size)
        distinct = DistinctColumns.of(first, width + (number - 1) * size, self.count, self.clamped)
        most = blocks_at_once(groups * size * rounded_up(width))
        if distinct.left or distinct.right + 1 < distinct.width:  # equal rows begin at another column in each block
            most = 1
        begin = 0
        while begin < rows:
            number = max(1, min(most, (rows - begin) // size))
            count = min(number * size, rows - begin)
            distinct = DistinctColumns.of(first + begin, others + count // number - 1, self.count, self.clamped)
            yield Blocks(slice(begin, begin + count), number, count // number, first + begin, distinct)
            begin += count

    def buffer(self, pairs: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make a buffer for pairs (g, b · s, n) of b blocks.

        Returns:
            The buffer; its view by product, (r, b, s · h, W) or (r, b, h, s, W); its view by pair, (h, r, b, s, n).
        """
        (heads, rows), others = self.grid, pairs.shape[2]
        count, size, width = blocks.number, blocks.size, rounded_up(blocks.distinct.width)
        if self.is_shared:
            head, vector = width, heads * width
            block = size * (vector + (count > 1))  # the step from vector to vector is then the same across blocks
        else:
            head, vector = size * width, width
            block = heads * head
        row = count * block
        buffer = workspace("offsets", (rows * row,), pairs.dtype)
        if self.is_shared:
            products = buffer.as_strided((rows, count, size * heads, width), (row, block, width, 1))
        else:
            products = buffer.view(rows, count, heads, size, width)
        by_pair = buffer.as_strided((heads, rows, count, size, others), (head, row, block, vector + 1, 1))
        return buffer, products, by_pair

    def of_blocks(self, pairs: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """View pairs (g, m, n) of some blocks as (h, r, b, s, n)."""
        return pairs[:, blocks.vectors].unflatten(0, self.grid).unflatten(2, (blocks.number, blocks.size))

    def vectors(self, vectors: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """View vectors (r, m, h, d) of some blocks in the layout of products: (r, b, s · h, d) or (r, b, h, s, d)."""
        by_block = vectors[:, blocks.vectors].unflatten(1, (blocks.number, blocks.size))
        return by_block.flatten(2, 3) if self.is_shared else by_block.transpose(2, 3)

    def windows(self, blocks: Blocks, begin: int, end: int) -> torch.Tensor:
        """View the rows of the table from `begin` to `end` of each block, (h or 1, b, end − begin, d)."""
        table, step = self.table, self.table.stride(1)
        return table.as_strided(
            (table.shape[0], blocks.number, end - begin, table.shape[2]),
            (table.stride(0), blocks.size * step, step, table.stride(2)),
            table.storage_offset() + (blocks.first + begin) * step,
        )

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Write left · right to `out` for each block.

        Args:
            left: (r, b, s · h, x) or (r, b, h, s, x).
            right: (h or 1, b, x, y).
        """
        if not self.is_shared:
            for row in range(left.shape[0]):
                for block in range(left.shape[1]):
                    torch.bmm(left[row, block], right[:, block], out=out[row, block])
        elif left.shape[1] == 1:
            torch.bmm(left[:, 0], right[0].expand(len(left), -1, -1), out=out[:, 0])
        else:
            for row in range(left.shape[0]):
                torch.bmm(left[row], right[0], out=out[row])

    def add_to(self, pairs: torch.Tensor, vectors: torch.Tensor, first: int, fresh: bool = False) -> None:
        """Add the products of the vectors, (r, m, h, d), to pairs (g, m, n).

        Args:
            first: the row of the table for the first vector and the first one of the other side.
            fresh: whether to write `pairs` instead of adding to them.
        """
        for blocks in self.blocks(pairs, first):
            _, products, by_pair = self.buffer(pairs, blocks)
            begin, end = blocks.distinct.aligned
            windows = self.windows(blocks, begin, end)
            if has_onednn_bmm(pairs.dtype):  # it would copy the transposed ones, in three times the time
                windows = windows.contiguous()
            self.multiply(self.vectors(vectors, blocks), windows.transpose(2, 3), products[..., begin:end])
            blocks.distinct.fill(products)
            into = self.of_blocks(pairs, blocks)
            if fresh:
                into.copy_(by_pair)
            else:
                into.add_(by_pair)

    def transposed(self, pairs: torch.Tensor, first: int) -> Iterator[tuple[Blocks, torch.Tensor]]:
        """Yield blocks with the sums of their pairs by distinct row, (r, b, s · h, c) or (r, b, h, s, c)."""
        for blocks in self.blocks(pairs, first):
            buffer, by_offset, by_pair = self.buffer(pairs, blocks)
            buffer.zero_()
            by_pair.copy_(self.of_blocks(pairs, blocks))
            blocks.distinct.gather(by_offset)
            yield blocks, by_offset[..., blocks.distinct.left : blocks.distinct.right + 1]

    def weighed(
        self, pairs: torch.Tensor, first: int, total: torch.Tensor | None = None, vectors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute Σ_j pairs_ij · table_{first + i + j}, (r, m, h, d). With `total`, also do as `table_gradient`."""
        heads, rows = self.grid
        result = pairs.new_empty((rows, pairs.shape[1], heads, self.table.shape[2]))
        for blocks, by_row in self.transposed(pairs, first):
            windows = self.windows(blocks, blocks.distinct.left, blocks.distinct.right + 1)
            self.multiply(by_row, windows, self.vectors(result, blocks))
            if total is not None and vectors is not None:
                self._add_to_table(total, blocks, by_row, vectors)
        return result

    def table_gradient(self, pairs: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor) -> None:
        """Add Σ pairs_ij · vectors_i, over the pairs of each row of the table, to that row of `total`."""
        for blocks, by_row in self.transposed(pairs, first):
            self._add_to_table(total, blocks, by_row, vectors)

    def _add_to_table(self, total: torch.Tensor, blocks: Blocks, by_row: torch.Tensor, vectors: torch.Tensor) -> None:
        right = self.vectors(vectors, blocks)
        for block in range(blocks.number):
            into = total[:, blocks.rows(block)]
            for row in range(len(right)):
                if self.is_shared:
                    add_product(into[0], by_row[row, block].transpose(0, 1), right[row, block])
                else:
                    add_product(into, by_row[row, block].transpose(1, 2), right[row, block])


def diagonal_sums(pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum pairs (g, m, n) with the same i + j: (g, m + n − 1), summed in that dtype."""
    groups, rows, others = pairs.shape
    width = rows + others - 1
    buffer = workspace("offsets", (groups, rows, width), pairs.dtype).zero_()
    buffer.as_strided(pairs.shape, (rows * width, width + 1, 1)).copy_(pairs)
    return buffer.sum(1, dtype=dtype)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> None:
    """Add alpha · left · right, matrices or batches of them, to `total`, which may have a more precise dtype."""
    if total.dtype == left.dtype:
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(left, right, alpha=alpha)
    else:
        total.add_(torch.matmul(left, right), alpha=alpha)
