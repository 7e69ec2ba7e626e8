"""Chunks: some rows of the batch, some heads and some queries, whose scores are computed together.

The schedule follows from sizes and from the mask: how many rows, heads and queries form a chunk, and which keys any of
its queries sees. The queries of a chunk are in reverse order. Counted so, query i' and key j meet at row i' + j of a
table by offset (`relative_shift.py`).
"""

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....products.cpu_gemm import has_onednn_bmm
from ...sliding_window import Block, SlidingWindowMask, merged
from ...toeplitz import ToeplitzTerms


# Best number of scores in a chunk, and of its queries, measured on a core with 1 MB of L2.
BUFFER = 1 << 19
QUERIES = 256
# From this number of keys on, chunks have twice as many queries, as the buffer of a single head exceeds the best size
# anyway. They do not if queries see different keys, since a chunk computes all keys that any of its queries sees.
LONG = 2048
# Queries of a chunk under a window. They are few, since a chunk computes the keys of each query for all of them.
WINDOWED = 64
# Vectors in a block of products by offset. With n on the other side, it computes (BLOCK + n − 1) / n of what is used.
# With oneDNN, which copies the rows of the table for each block, a block has twice as many.
BLOCK = 64
# Sizes of products are multiples of the numbers in a vector register, with which libraries are fastest.
ALIGNED = 16

_local = threading.local()


def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer of this thread. It contains whatever was last written to it."""
    buffers = _local.__dict__.setdefault("buffers", {})
    count = math.prod(shape)
    flat = buffers.get((name, dtype))
    if flat is None or flat.numel() < count:
        buffers.pop((name, dtype), None)
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            flat = buffers[name, dtype] = torch.empty(count, dtype=dtype, device="cpu")
    return flat[:count].view(shape)


def rounded_up(count: int) -> int:
    """Round up to a multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


def vectors_per_block(dtype: torch.dtype) -> int:
    """Return the number of vectors in a block of products by offset."""
    return 2 * BLOCK if has_onednn_bmm(dtype) else BLOCK


def blocks_at_once(products: int) -> int:
    """Return how many blocks, of so many products each, form one batch: half the size of a chunk's scores."""
    return max(1, BUFFER // 2 // products)


@dataclass(frozen=True)
class ChunkedCall:
    """One call, without its tensors that have gradients.

    Attributes:
        terms: the terms, without the tensors that have gradients.
        start: index of the first query among the keys.
        mask: boolean (1 or B, 1 or H, L, K), True: may attend; or None.
        window: the mask of an attention window, in the place of `mask`; or None.
        causal: whether queries see no later key. It is only set without a mask.
        dropout: probability of dropping an attention weight, in units of 2^−16.
        seed: the seed of the dropout.
        has_backward: whether gradients are recorded, so that a backward may follow.
        far: offsets at which no key weighs anything for a query that sees its own key, boolean (H or 1, P); or None.
    """

    terms: ToeplitzTerms
    start: int = 0
    mask: torch.Tensor | None = None
    window: SlidingWindowMask | None = None
    causal: bool = False
    dropout: int = 0
    seed: int = 0
    has_backward: bool = False
    far: torch.Tensor | None = None

    @property
    def keep_probability(self) -> float:
        """The probability of keeping a weight."""
        return 1.0 - self.dropout / 65536

    def reach(self, heads: slice) -> tuple[int, int] | None:
        """Return the first and the last offset at which a key weighs something for some of the heads, with `far`."""
        if self.far is None:
            return None
        far = self.far if self.far.shape[0] == 1 else self.far[heads]
        near = (~far).any(0).nonzero()
        return self.terms.low + int(near[0]), self.terms.low + int(near[-1])


def queries_per_chunk(call: ChunkedCall, keys: int) -> int:
    """Return the number of queries in a chunk."""
    if call.window is not None:
        return WINDOWED
    mask = call.mask
    same_keys = not call.causal and call.far is None and (mask is None or mask.shape[2] == 1 or mask.stride(2) == 0)
    return 2 * QUERIES if same_keys and keys >= LONG else QUERIES


def groups(call: ChunkedCall, batch: int, heads: int, queries: int, keys: int) -> tuple[list[slice], list[slice]]:
    """Return groups of rows of the batch, and groups of heads. The scores of a group are near the best size."""
    queries = min(queries, queries_per_chunk(call, keys))
    if call.window is not None:
        keys = min(keys, queries + 2 * call.window.window)
    count = max(1, BUFFER // (queries * keys))
    return _alike(batch, max(1, count // (2 * heads))), _alike(heads, count)


def _alike(count: int, most: int) -> list[slice]:
    """Split `count` into as few parts as possible, of at most that size and similar sizes."""
    size = -(-count // -(-count // min(count, most)))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


@dataclass(frozen=True)
class QueryChunk:
    """m queries in reverse order, the ranges of keys that any of them sees, and the layout of their scores.

    Attributes:
        first: the first query.
        rows: m.
        key_ranges: (first key, number of keys n) of every range.
        is_masked: whether the mask may hide any pair.
        has_empty_rows: whether some query may see no key at all.
        skips_far: whether every query sees its own key, so that those at the offsets `ChunkedCall.far` are left out.
        hidden: under a window, for every range, some of its columns and which pairs in these are hidden, last query
            first, boolean (1 or r, 1, m, c); else None.
    """

    first: int
    rows: int
    key_ranges: Sequence[tuple[int, int]]
    is_masked: bool = False
    has_empty_rows: bool = False
    skips_far: bool = False
    hidden: Sequence[Sequence[tuple[slice, torch.Tensor]]] | None = None

    @functools.cached_property
    def begins(self) -> list[int]:
        """The first column of each range in the buffer of scores, and the width of that buffer.

        Each range has n columns, padded to a multiple of ALIGNED.
        """
        return [0, *itertools.accumulate(rounded_up(count) for _, count in self.key_ranges)]

    @property
    def width(self) -> int:
        """The width of the buffer of scores."""
        return self.begins[-1]


def runs_of(seen: torch.Tensor, gap: int) -> tuple[tuple[int, int], ...]:
    """Return first index and length of every run of True in a vector. Runs less than `gap` apart are merged."""
    edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    return merged(zip(edges[::2], edges[1::2], strict=True), gap)


def schedule(call: ChunkedCall, rows: slice, heads: slice, length: int, keys: int) -> list[QueryChunk]:
    """Return the chunks of some rows of the batch and some heads, without keys that are hidden or too far away."""
    if call.window is not None:
        return _schedule_of_window(call.window, rows)
    mask, reach = call.mask, call.reach(heads)
    if mask is not None:
        mask = (mask[rows] if mask.shape[0] > 1 else mask).flatten(0, 1)  # (rows · heads, L, K)
    constant = mask is not None and (mask.stride(1) == 0 or mask.shape[1] == 1)  # the same for every query: padding
    chunks, size = [], queries_per_chunk(call, keys)
    for first in range(0, length, size):
        count = min(size, length - first)
        own = call.start + first  # the key of the first query
        visible = None if mask is None else mask[:, :1] if constant else mask[:, first : first + count]
        skips_far = reach is not None and (visible is None or _sees_itself(visible, own, count))
        begin, end = 0, min(keys, own + count) if call.causal else keys
        if reach is not None and skips_far:
            begin, end = max(begin, own + reach[0]) // ALIGNED * ALIGNED, min(end, own + count + reach[1])
        if visible is None:
            chunks.append(QueryChunk(first, count, [(begin, end - begin)], skips_far=skips_far))
            continue
        has_empty_rows = not bool(visible.any(-1).all())
        seen = visible.flatten(0, 1).any(0)[begin:end]
        key_ranges = [(0, keys)] if has_empty_rows else [(begin + at, number) for at, number in runs_of(seen, count)]
        is_masked = has_empty_rows or not all(bool(visible[..., at : at + number].all()) for at, number in key_ranges)
        chunks.append(QueryChunk(first, count, key_ranges, is_masked, has_empty_rows, skips_far))
    return chunks


def _sees_itself(visible: torch.Tensor, own: int, count: int) -> bool:
    """Whether `count` queries see their own keys, of which `own` is the first, by a mask (…, 1 or m, K)."""
    keys = visible[..., own : own + count]
    return bool((keys if visible.shape[1] == 1 else keys.diagonal(dim1=-2, dim2=-1)).all())


def _schedule_of_window(mask: SlidingWindowMask, rows: slice) -> list[QueryChunk]:
    """`schedule` under a window. The result depends on the mask only, and is computed once for all layers."""
    return mask.once(
        ("chunks", rows.start, rows.stop),
        lambda: [_chunk_of_window(mask, rows, block) for block in mask.blocks(rows, WINDOWED)],
    )


def _chunk_of_window(mask: SlidingWindowMask, rows: slice, block: Block) -> QueryChunk:
    queries = slice(block.first, block.first + block.queries)
    hidden = ~mask.visible(queries, mask.keys_of(block), rows).flip(2)
    parts = hidden.split([count for _, count in block.key_ranges], dim=-1)
    has_empty_rows = bool(hidden.all(-1).any())
    pieces = [_pieces(part) for part in parts]
    return QueryChunk(block.first, block.queries, block.key_ranges, True, has_empty_rows, hidden=pieces)


def _pieces(hidden: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Return the columns of (r, 1, m, n) in which anything is hidden, and what is hidden there."""
    columns = [slice(begin, begin + count) for begin, count in runs_of(hidden.flatten(0, 2).any(0), ALIGNED)]
    return [(each, hidden[..., each].clone()) for each in columns]
