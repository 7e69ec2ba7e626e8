"""The key-side products of tables with few distinct rows: one for each row, however many offsets share it.

Buckets and clipping give runs of offsets one row of B. k·Bᵀ is then made once for all queries, with one row of B for
each run: for a block of keys a matrix Y[x, j], runs by keys. A chunk of m queries needs its runs repeated, which is to
copy rows of that matrix, E[p, j] = Y[run(p), j] for the block's size + m − 1 offsets p. Query i' (in reverse order)
and key j meet at p = i' + j, so that E, read with a step of one row and one column for each key, is the block's part
of the scores. Blocks whose offsets are all of the first or of the last run have one number for each key.

The gradients go the same way back: E is filled through that view, its rows are added to their runs, and what all
queries have left there is multiplied once with the keys and with B.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .skewed import QueryChunk, workspace


# Keys of a block, and of one of few heads: E, (keys + queries − 1) · keys numbers for each head, is to stay in the
# cache, and copies of its rows are to be worth their calls.
KEYS, ROW = 64, 128


class Piece(NamedTuple):
    """Blocks of keys that are treated alike, and which of their keys belong to the range.

    Attributes:
        block: the first.
        blocks: how many; one where the offsets of the block are of several runs.
        begin: of the first of the keys, in the block.
        end: of the last, exclusive; 0 and all keys unless there is only one block.
        run: that of all their offsets, or None.
        at: the column of the scores where they begin.
    """

    block: int
    blocks: int
    begin: int
    end: int
    run: int | None
    at: int

    @property
    def columns(self) -> slice:
        """Of the scores."""
        return slice(self.at, self.at + self.blocks * (self.end - self.begin))


class KeyRuns:
    """k · Bᵀ and its gradients for some heads of one row of the batch.

    Args:
        key: (g, K, d).
        B: (g or 1, N, d), one row for each run.
        run_of: (P,), the run of each offset, ascending.
        tails: how many offsets the first and the last run have.
        first: what the offset of the first key to the first query is after, in `run_of`: its index for i = j = 0.
    """

    def __init__(self, key: torch.Tensor, B: torch.Tensor, run_of: torch.Tensor, tails: tuple[int, int], first: int):
        self.heads, self.keys, size = key.shape
        self.width = KEYS if self.heads * KEYS >= ROW else ROW  # keys of a block
        self.count = -(-self.keys // self.width)
        self.B, self.tails, self.first = B, tails, first
        self.offsets = run_of.shape[0]
        self.run_of = torch.nn.functional.pad(run_of, (0, self.width), value=B.shape[1] - 1)
        padded = torch.nn.functional.pad(key, (0, 0, 0, self.count * self.width - self.keys))
        self.blocks = padded.view(self.heads, self.count, self.width, size).transpose(0, 1)  # (count, g, keys, d)
        self.products: torch.Tensor | None = None
        self.gradients: torch.Tensor | None = None

    def pieces(self, chunk: QueryChunk, index: int) -> Iterator[Piece]:
        """The pieces of a range of keys, from left to right."""
        begin, count = chunk.key_ranges[index]
        end, last = begin + count, chunk.first + chunk.rows - 1
        size, width = self.width, self.width + chunk.rows - 1
        block = begin // size
        while block * size < end:
            low, high = max(begin - block * size, 0), min(end - block * size, size)
            whole = (end - block * size) // size if high - low == size else 0  # blocks in the range, from this one on
            offset = self.first + block * size - last
            blocks, run = 1, None
            if offset + width <= self.tails[0]:
                run = 0
                blocks = max(min(whole, (self.tails[0] - width - offset) // size + 1), 1)
            elif offset >= self.offsets - self.tails[1]:
                run = self.B.shape[1] - 1
                blocks = max(whole, 1)
            yield Piece(block, blocks, low, high, run, block * size + low - begin)
            block += blocks

    def expanded(self, chunk: QueryChunk, piece: Piece, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """E, (offsets, g · keys), and the pairs in it that belong to the piece, (g, m, keys)."""
        width, row = self.width + chunk.rows - 1, self.heads * self.width
        buffer = workspace("runs", (width, row), dtype, self.blocks.device)
        shape = (self.heads, chunk.rows, piece.end - piece.begin)
        return buffer, buffer.as_strided(shape, (self.width, row, row + 1), piece.begin * (row + 1))

    def runs(self, chunk: QueryChunk, piece: Piece) -> torch.Tensor:
        """The runs of the rows of E."""
        offset = self.first + piece.block * self.width - (chunk.first + chunk.rows - 1)
        return self.run_of[offset : offset + self.width + chunk.rows - 1]

    def of_run(self, by_run: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The numbers of a piece with one run, (g, blocks, keys)."""
        return by_run[piece.block : piece.block + piece.blocks, piece.run, :, piece.begin : piece.end].transpose(0, 1)

    def add_to(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> None:
        """scores (g, m, n) += k_j · B_p."""
        if self.products is None:
            self.products = self._multiply()
        for piece in self.pieces(chunk, index):
            into = scores[:, :, piece.columns]
            if piece.run is None:
                buffer, pairs = self.expanded(chunk, piece, self.products.dtype)
                torch.index_select(self.products[piece.block].flatten(1), 0, self.runs(chunk, piece), out=buffer)
                into.add_(pairs)
            else:
                into.unflatten(2, (piece.blocks, -1)).add_(self.of_run(self.products, piece)[:, None])

    def _multiply(self) -> torch.Tensor:
        """k · Bᵀ by block: (count, N, g, keys)."""
        rows = self.B.shape[1]
        shape = (self.count, rows, self.heads, self.width)
        products = workspace("by run", shape, self.blocks.dtype, self.blocks.device)
        if self.B.shape[0] == 1:
            keys = self.blocks.flatten(1, 2).transpose(1, 2)  # (count, d, g · keys)
            torch.bmm(self.B.expand(self.count, -1, -1), keys, out=products.flatten(2))
        else:
            for head in range(self.heads):
                keys = self.blocks[:, head].transpose(1, 2)  # (count, d, keys)
                torch.bmm(self.B[head].expand(self.count, -1, -1), keys, out=products[:, :, head])
        return products

    def collect(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> None:
        """Take in the gradient of the scores, (g, m, n)."""
        if self.gradients is None:
            shape = (self.count, self.B.shape[1], self.heads, self.width)
            precise = torch.promote_types(scores.dtype, torch.float32)
            self.gradients = workspace("gradients by run", shape, precise, scores.device).zero_()
        for piece in self.pieces(chunk, index):
            part = scores[:, :, piece.columns]
            if piece.run is None:
                buffer, pairs = self.expanded(chunk, piece, self.gradients.dtype)
                buffer.zero_()
                pairs.copy_(part)
                self.gradients[piece.block].flatten(1).index_add_(0, self.runs(chunk, piece), buffer)
            else:
                total = part.sum(1, dtype=self.gradients.dtype).unflatten(1, (piece.blocks, -1))
                self.of_run(self.gradients, piece).add_(total)

    def finish(self, d_key: torch.Tensor, d_B: torch.Tensor) -> None:
        """Add what was collected to the gradients of the keys, (g, K, d), and of B, (g or 1, N, d)."""
        if self.gradients is None:
            return
        gradients = self.gradients.to(self.B.dtype)
        for head in range(self.heads):
            own = head if self.B.shape[0] > 1 else 0
            by_run = gradients[:, :, head]  # (count, N, keys)
            by_key = torch.bmm(by_run.transpose(1, 2), self.B[own].expand(self.count, -1, -1))
            d_key[head] += by_key.flatten(0, 1)[: self.keys]
            d_B[own] += torch.bmm(by_run, self.blocks[:, head]).sum(0, dtype=d_B.dtype)
        self.gradients = None
