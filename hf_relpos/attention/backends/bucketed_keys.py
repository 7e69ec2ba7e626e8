"""Key-side products of bucketed or clipped tables: one product per distinct row, however many offsets share it.

With buckets and clipping, runs of offsets have the same row of B. k·Bᵀ is then computed once for all queries, with one
row of B for each run. For a block of keys this is a matrix Y[x, j], runs by keys. A chunk of m queries needs the rows
of Y repeated as long as their runs: E[p, j] = Y[run(p), j], for the block's size + m − 1 offsets p. Query i' (in
reverse order) and key j meet at p = i' + j. So E, read with a step of one row and one column from key to key, is the
block's part of the scores. A key needs only one number for all queries of the chunk if its offsets from all of them
are in the first run, or all in the last run.

The backward goes the same way in reverse: E is filled through that view, and its rows are added to their runs. The
sums over all queries are multiplied once with the keys and with B.

Columns are the keys of a block in reverse order. The step from key to key is then shorter than the step from query to
query, so that PyTorch goes through both sides key by key, which is three times as fast.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .chunk_schedule import QueryChunk, workspace


# Keys in a block, and keys in a block with few heads. E has (keys + queries − 1) · keys numbers for each head. It
# should stay in the cache, and the copies of its rows should be long enough to be worth their calls.
KEYS, ROW = 64, 128


class Piece(NamedTuple):
    """Some keys of one block, or some keys that have the same run with all queries.

    Attributes:
        block: the number of the block, or None.
        run: the run, 0 (first) or −1 (last), or None.
        keys: the keys, as a slice of all keys.
        columns: their columns in the scores.
    """

    block: int | None
    run: int | None
    keys: slice
    columns: slice


class KeyRuns:
    """k · Bᵀ and its gradients, for some heads of one row of the batch.

    Args:
        key: (g, K, d).
        B: (g or 1, N, d), one row for each run.
        run_of: (P,), the run of each offset, ascending.
        clamped: the number of offsets in the first run and in the last run.
        first: the index in `run_of` of the offset from the first query to the first key, i = j = 0.
    """

    def __init__(self, key: torch.Tensor, B: torch.Tensor, run_of: torch.Tensor, clamped: tuple[int, int], first: int):
        self.heads, keys, _ = key.shape
        self.key, self.B, self.clamped, self.first = key, B.expand(self.heads, -1, -1), clamped, first
        self.is_shared = B.shape[0] == 1
        self.offsets, self.width = run_of.shape[0], KEYS if self.heads * KEYS >= ROW else ROW  # width: keys of a block
        count = -(-keys // self.width)
        self.run_of = pad(run_of, (0, self.width), value=B.shape[1] - 1)
        padded = pad(key, (0, 0, 0, count * self.width - keys)).unflatten(1, (count, self.width))
        self.blocks = padded.flip(2).unbind(1)  # (g, keys, d) each
        begins = torch.arange(count) * self.width  # the first offset of a block is the one from the last query
        ends = (begins + first + self.width - 1).clamp(max=self.offsets - 1)
        self.runs = list(zip(run_of[begins].tolist(), (run_of[ends] + 1).tolist(), strict=True))  # of each block
        self.products: dict[int | None, torch.Tensor] = {}
        self.gradients: dict[int | None, torch.Tensor] = {}

    def pieces(self, chunk: QueryChunk, index: int) -> Iterator[Piece]:
        """Yield the pieces of a range of keys, from left to right."""
        begin, count = chunk.key_ranges[index]
        end = begin + count
        # all offsets of keys before `left` are in the first run, and those of keys from `right` on in the last
        left = min(max(self.clamped[0] - self.first + chunk.first, begin), end)
        right = min(max(self.offsets - self.clamped[1] - self.first + chunk.first + chunk.rows - 1, left), end)
        if begin < left:
            yield Piece(None, 0, slice(begin, left), slice(0, left - begin))
        for block in range(left // self.width, -(-right // self.width)):
            low, high = max(left, block * self.width), min(right, (block + 1) * self.width)
            yield Piece(block, None, slice(low, high), slice(low - begin, high - begin))
        if right < end:
            yield Piece(None, -1, slice(right, end), slice(right - begin, count))

    def expanded(self, chunk: QueryChunk, piece: Piece, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E, (g, offsets, keys), and its view of the pairs of the piece, (g, m, keys)."""
        size = self.width
        offsets, before = size + chunk.rows - 1, piece.keys.start % size
        buffer = workspace("runs", (self.heads, offsets, size), dtype)
        shape = (self.heads, chunk.rows, piece.keys.stop - piece.keys.start)
        return buffer, buffer.as_strided(shape, (offsets * size, size, size - 1), (before + 1) * (size - 1))

    def rows_of(self, chunk: QueryChunk, block: int) -> torch.Tensor:
        """Return, for each row of E, which row of the block's products it is."""
        offset = self.first + block * self.width - (chunk.first + chunk.rows - 1)
        return self.run_of[offset : offset + self.width + chunk.rows - 1] - self.runs[block][0]

    def by_run(self, name: str, dtype: torch.dtype) -> dict[int | None, torch.Tensor]:
        """Make buffers for every block, (g, its runs, keys), and under None for the first and last run, (g, 2, K)."""
        sizes = [(end - begin) * self.width for begin, end in self.runs]
        buffer = workspace(name, (self.heads * sum(sizes),), dtype)
        parts = buffer.split([self.heads * size for size in sizes])
        buffers: dict[int | None, torch.Tensor] = {
            block: part.view(self.heads, -1, self.width) for block, part in enumerate(parts)
        }
        buffers[None] = self.key.new_zeros(self.heads, 2, self.key.shape[1], dtype=dtype)
        return buffers

    def add_to(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> None:
        """Add k_j · B_p to scores (g, m, n)."""
        if not self.products:
            self._multiply()
        for piece in self.pieces(chunk, index):
            into = scores[:, :, piece.columns]
            if piece.block is None:
                into.add_(self.products[None][:, piece.run, None, piece.keys])
            else:
                products = self.products[piece.block]
                buffer, pairs = self.expanded(chunk, piece, products.dtype)
                torch.index_select(products, 1, self.rows_of(chunk, piece.block), out=buffer)
                into.add_(pairs)

    def _multiply(self) -> None:
        self.products = self.by_run("by run", self.key.dtype)
        for block, (begin, end) in enumerate(self.runs):
            torch.bmm(self.B[:, begin:end], self.blocks[block].transpose(1, 2), out=self.products[block])
        torch.bmm(self.ends(), self.key.transpose(1, 2), out=self.products[None])

    def ends(self) -> torch.Tensor:
        """Return the rows of B of the first and the last run, (g, 2, d)."""
        return torch.stack([self.B[:, 0], self.B[:, -1]], dim=1)

    def collect(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> None:
        """Add the gradient of the scores, (g, m, n), to the sums by run."""
        if not self.gradients:
            self.gradients = self.by_run("gradients by run", torch.promote_types(scores.dtype, torch.float32))
            for gradients in self.gradients.values():
                gradients.zero_()
        for piece in self.pieces(chunk, index):
            part, gradients = scores[:, :, piece.columns], self.gradients[piece.block]
            if piece.block is None:
                gradients[:, piece.run, piece.keys] += part.sum(1, dtype=gradients.dtype)
            else:
                buffer, pairs = self.expanded(chunk, piece, gradients.dtype)
                buffer.zero_()
                pairs.copy_(part)
                gradients.index_add_(1, self.rows_of(chunk, piece.block), buffer)

    def finish(self, d_key: torch.Tensor, d_B: torch.Tensor) -> None:
        """Add the collected sums to the gradients of the keys, (g, K, d), and of B, (g or 1, N, d)."""
        for block, gradients in self.gradients.items():
            by_run = gradients.to(self.B.dtype)
            if block is None:
                d_key += torch.bmm(by_run.transpose(1, 2), self.ends())
                by_row = torch.bmm(by_run, self.key)  # (g, 2, d)
                for run in (0, -1):
                    d_B[:, run] += by_row[:, run].sum(0, keepdim=True) if self.is_shared else by_row[:, run]
                continue
            begin, end = self.runs[block]
            into = d_key[:, block * self.width : (block + 1) * self.width]
            into += torch.bmm(by_run.transpose(1, 2), self.B[:, begin:end]).flip(1)[:, : into.shape[1]]
            by_row = torch.bmm(by_run, self.blocks[block])  # (g, runs, d)
            d_B[:, begin:end] += by_row.sum(0, keepdim=True) if self.is_shared else by_row
        self.gradients = {}
