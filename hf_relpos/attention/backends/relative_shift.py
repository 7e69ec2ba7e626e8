"""Products of vectors with the rows of a table that belong to their offsets, read by pair, and their gradients.

    pairs_{g,i,j} = vectors_{g,i} · table_{h, first + i + j}

That is q_i·A_{j−i} for queries in reverse order, and k_j·B_{j−i} with i and j exchanged. For a block of s vectors and
n on the other side it is one product with n + s − 1 rows of the table, in a buffer of rows of W numbers. Element
(i, j) is at i·W + (i + j) = i·(W + 1) + j: the same buffer, read with rows of W + 1 numbers, is by pair, without a
gather. What that view does not cover are gaps. A block is short, so that few of the products are of no pair and the
buffer stays in the cache; the blocks of a chunk are one batch of products, with windows of the table that are views. A
table is padded and W rounded, because products whose sizes are no multiples of a vector register's take up to twice as
long.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..formula import total_of
from .chunk_schedule import ALIGNED, blocks_at_once, rounded_up, vectors_per_block, workspace


class DistinctColumns(NamedTuple):
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
    def of(cls, first: int, width: int, count: int, clamped: tuple[int, int]) -> "DistinctColumns":
        """That of `width` offsets from row `first` on, in a table of `count` rows with these clamped ends."""
        left = min(max(clamped[0] - 1 - first, 0), width - 1)
        return cls(width, left, min(max(count - clamped[1] - first, left), width - 1))

    @property
    def aligned(self) -> tuple[int, int]:
        """These, and what is computed besides, for its begin and its size to be multiples of ALIGNED."""
        begin = self.left - self.left % ALIGNED
        return begin, begin + rounded_up(self.right + 1 - begin)

    def fill(self, products: torch.Tensor) -> None:
        """Set the other columns, (…, W)."""
        left, right = self.left, self.right
        if left:
            products[..., :left] = products[..., left : left + 1]
        if right < self.width - 1:
            products[..., right + 1 : self.width] = products[..., right : right + 1]

    def gather(self, products: torch.Tensor) -> None:
        """Add the other columns to the first and the last of these."""
        left, right = self.left, self.right
        if left:
            products[..., left] += products[..., :left].sum(-1)
        if right < self.width - 1:
            products[..., right] += products[..., right + 1 : self.width].sum(-1)


class Blocks(NamedTuple):
    """Blocks of vectors one after the other, and the products of one of them.

    Attributes:
        vectors: those of all of them.
        number: how many.
        size: s, vectors of one.
        first: the row of the table of the first offset of the first of them; the next has the row s further.
        distinct: of their products.
    """

    vectors: slice
    number: int
    size: int
    first: int
    distinct: DistinctColumns

    def rows(self, block: int) -> slice:
        """Of the table, the distinct ones of one block."""
        first = self.first + block * self.size
        return slice(first + self.distinct.left, first + self.distinct.right + 1)


def padded(table: torch.Tensor) -> torch.Tensor:
    """A table, (…, P, d), with ALIGNED − 1 rows of zeros at its end, up to which products may be taken."""
    # `pad` would fill all of it with zeros first, and under a window tables are long beside what is computed with them
    return torch.cat([table, table.new_zeros(*table.shape[:-2], ALIGNED - 1, table.shape[-1])], dim=-2)


def unpadded(table: torch.Tensor) -> torch.Tensor:
    """What `padded` was given."""
    return table[:, : table.shape[1] - ALIGNED + 1]


class Diagonals:
    """A table for some heads, and the products with it.

    Pairs are (g, m, n) with g = h · r matrices, those of one head together. Vectors are by position, (r, m, h, d), as
    a layer's projection leaves them: heads that share a table make a matrix of a block without being copied.

    Args:
        table: (h or 1, P + ALIGNED − 1, d), `padded`.
        clamped: how many rows at the beginning and at the end of it are one.
        grid: (h, r), heads and rows of the batch.
    """

    def __init__(self, table: torch.Tensor, clamped: tuple[int, int], grid: tuple[int, int]):
        self.table, self.clamped, self.grid = table, clamped, grid
        self.count = table.shape[1] - ALIGNED + 1
        self.is_shared = table.shape[0] == 1

    def blocks(self, pairs: torch.Tensor, first: int) -> Iterator[Blocks]:
        """The blocks of pairs (g, m, n), of those with the same distinct columns as many at once as a buffer holds."""
        groups, rows, others = pairs.shape
        size = vectors_per_block(others, pairs.device)
        width, number = size + others - 1, max(1, rows // size)
        distinct = DistinctColumns.of(first, width + (number - 1) * size, self.count, self.clamped)
        most = blocks_at_once(groups * size * rounded_up(width))
        if distinct.left or distinct.right + 1 < distinct.width:  # equal rows begin elsewhere in each block
            most = 1
        begin = 0
        while begin < rows:
            number = max(1, min(most, (rows - begin) // size))
            count = min(number * size, rows - begin)
            distinct = DistinctColumns.of(first + begin, others + count // number - 1, self.count, self.clamped)
            yield Blocks(slice(begin, begin + count), number, count // number, first + begin, distinct)
            begin += count

    def buffer(self, pairs: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For pairs (g, b · s, n) of b blocks.

        Returns:
            A buffer; the same by product, (r, b, s · h, W) or (r, b, h, s, W); and by pair, (h, r, b, s, n).
        """
        (heads, rows), others = self.grid, pairs.shape[2]
        count, size, width = blocks.number, blocks.size, rounded_up(blocks.distinct.width)
        if self.is_shared:
            head, vector = width, heads * width
            block = size * (vector + (count > 1))  # from vector to vector it is then one step, across blocks too
        else:
            head, vector = size * width, width
            block = heads * head
        row = count * block
        buffer = workspace("offsets", (rows * row,), pairs.dtype, pairs.device)
        if self.is_shared:
            products = buffer.as_strided((rows, count, size * heads, width), (row, block, width, 1))
        else:
            products = buffer.view(rows, count, heads, size, width)
        by_pair = buffer.as_strided((heads, rows, count, size, others), (head, row, block, vector + 1, 1))
        return buffer, products, by_pair

    def of_blocks(self, pairs: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Pairs (g, m, n) of some blocks, (h, r, b, s, n)."""
        return pairs[:, blocks.vectors].unflatten(0, self.grid).unflatten(2, (blocks.number, blocks.size))

    def vectors(self, vectors: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Of (r, m, h, d), those of some blocks, as `buffer` has products: (r, b, s · h, d) or (r, b, h, s, d)."""
        by_block = vectors[:, blocks.vectors].unflatten(1, (blocks.number, blocks.size))
        return by_block.flatten(2, 3) if self.is_shared else by_block.transpose(2, 3)

    def windows(self, blocks: Blocks, begin: int, end: int) -> torch.Tensor:
        """The rows of the table from `begin` to `end` of each block, a view (h or 1, b, end − begin, d)."""
        table, step = self.table, self.table.stride(1)
        return table.as_strided(
            (table.shape[0], blocks.number, end - begin, table.shape[2]),
            (table.stride(0), blocks.size * step, step, table.stride(2)),
            table.storage_offset() + (blocks.first + begin) * step,
        )

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """out = left · right for each block.

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
        """pairs (g, m, n) += the products of the vectors, (r, m, h, d).

        Args:
            first: the row of the table of the first vector and the first of the other side.
            fresh: whether `pairs` hold nothing yet.
        """
        for blocks in self.blocks(pairs, first):
            _, products, by_pair = self.buffer(pairs, blocks)
            begin, end = blocks.distinct.aligned
            windows = self.windows(blocks, begin, end).transpose(2, 3)
            self.multiply(self.vectors(vectors, blocks), windows, products[..., begin:end])
            blocks.distinct.fill(products)
            into = self.of_blocks(pairs, blocks)
            if fresh:
                into.copy_(by_pair)
            else:
                into.add_(by_pair)

    def transposed(self, pairs: torch.Tensor, first: int) -> Iterator[tuple[Blocks, torch.Tensor]]:
        """Blocks, and the sums of their pairs by distinct row of the table, (r, b, s · h, c) or (r, b, h, s, c)."""
        for blocks in self.blocks(pairs, first):
            buffer, by_offset, by_pair = self.buffer(pairs, blocks)
            buffer.zero_()
            by_pair.copy_(self.of_blocks(pairs, blocks))
            blocks.distinct.gather(by_offset)
            yield blocks, by_offset[..., blocks.distinct.left : blocks.distinct.right + 1]

    def weighed(
        self,
        pairs: torch.Tensor,
        first: int,
        total: torch.Tensor | None = None,
        vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Σ_j pairs_ij · table_{first + i + j}, (r, m, h, d); with `total`, adds what `table_gradient` does."""
        heads, rows = self.grid
        result = pairs.new_empty((rows, pairs.shape[1], heads, self.table.shape[2]))
        for blocks, by_row in self.transposed(pairs, first):
            windows = self.windows(blocks, blocks.distinct.left, blocks.distinct.right + 1)
            self.multiply(by_row, windows, self.vectors(result, blocks))
            if total is not None and vectors is not None:
                self._add_to_table(total, blocks, by_row, vectors)
        return result

    def table_gradient(self, pairs: torch.Tensor, vectors: torch.Tensor, first: int, total: torch.Tensor) -> None:
        """Add Σ pairs_ij · vectors_i of the pairs of each row of the table to that row of `total`, like the table."""
        for blocks, by_row in self.transposed(pairs, first):
            self._add_to_table(total, blocks, by_row, vectors)

    # Columns of a buffer by offset, (g, m, N): column x is that of row `first` + x of the table, for all vectors ----

    def write_columns(self, buffer: torch.Tensor, columns: slice, vectors: torch.Tensor, first: int) -> None:
        """buffer_{g,i,x} = vectors_{g,i} · table_{first + x} in some of the columns; others near them are overwritten.

        Args:
            buffer: contiguous, of a multiple of ALIGNED columns that have rows of the padded table.
            vectors: (g, m, d).
        """
        vectors = vectors.contiguous()
        distinct = self.distinct_columns(columns, first)
        begin, end = columns.start + distinct.left, columns.start + distinct.right + 1
        from_column = begin - begin % ALIGNED
        to_column = from_column + rounded_up(end - from_column)
        for left, table, out in zip(
            self.by_table(vectors), self.table, self.by_table(buffer[..., from_column:to_column]), strict=True
        ):
            torch.mm(left, table[first + from_column : first + to_column].t(), out=out)
        buffer[..., columns.start : begin] = buffer[..., begin : begin + 1]
        buffer[..., end : columns.stop] = buffer[..., end - 1 : end]

    def weigh_columns(self, buffer: torch.Tensor, columns: slice, first: int) -> torch.Tensor:
        """Σ_x buffer_{g,i,x} · table_{first + x} over some of the columns, (r, m, h, d)."""
        sums = []
        for part, rows in self.column_parts(buffer, columns, first):
            products = [torch.mm(one, table[rows]) for one, table in zip(self.by_table(part), self.table, strict=True)]
            sums.append(products[0] if self.is_shared else torch.cat(products))
        total = total_of(sums).view(*self.grid, buffer.shape[1], -1)  # (h, r, m, d)
        return total.permute(1, 2, 0, 3)

    def column_gradient(
        self, buffer: torch.Tensor, columns: slice, vectors: torch.Tensor, first: int, total: torch.Tensor
    ) -> None:
        """Add Σ buffer_{g,i,x} · vectors_{g,i}, (g, m, d), of some of the columns x to rows `first` + x of `total`."""
        vectors = vectors.contiguous()
        for part, rows in self.column_parts(buffer, columns, first):
            for one, right, into in zip(self.by_table(part), self.by_table(vectors), total, strict=True):
                add_product(into[rows], one.t(), right)

    def distinct_columns(self, columns: slice, first: int) -> DistinctColumns:
        """Those between which the rows of the table differ, counted from the first of the columns."""
        return DistinctColumns.of(first + columns.start, columns.stop - columns.start, self.count, self.clamped)

    def column_parts(self, buffer: torch.Tensor, columns: slice, first: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Columns with rows of their own, and the sums of those that have one; (g, m, c) and rows of the table."""
        distinct = self.distinct_columns(columns, first)
        begin, end = columns.start + distinct.left, columns.start + distinct.right + 1
        yield buffer[..., begin:end], slice(first + begin, first + end)
        for rest, row in ((slice(columns.start, begin), first + begin), (slice(end, columns.stop), first + end - 1)):
            if rest.start < rest.stop:
                yield buffer[..., rest].sum(-1, keepdim=True), slice(row, row + 1)

    def by_table(self, matrices: torch.Tensor) -> torch.Tensor:
        """(g, m, x) as one matrix for each table, (h or 1, …, x), a view."""
        tables, (groups, rows, _) = self.table.shape[0], matrices.shape
        per_table = groups // tables * rows
        strides = (per_table * matrices.stride(1), matrices.stride(1), matrices.stride(2))
        return matrices.as_strided((tables, per_table, matrices.shape[2]), strides, matrices.storage_offset())

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
