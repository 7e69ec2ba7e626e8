"""The mask of an attention window, kept as vectors and built block by block.

A dense mask of L queries has L² entries, so that time and memory would grow as without a window. Here padding,
documents and positions stay vectors of the K keys. For a block of queries they give the ranges of keys that any of
its queries sees, and the hidden pairs in these ranges. With a window of w, m queries see 2w + m keys and the global
tokens. Queries that are global tokens see far keys, and form blocks of their own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .call import LazyMask
from .context import moved


# Ranges with fewer keys than this between them are merged, since each range is padded to this many columns.
GAP = 16


class Block(NamedTuple):
    """Some queries, and the keys that any of them sees.

    Attributes:
        first: the first query.
        queries: the number of queries.
        key_ranges: (first key, count) of each range, in ascending order.
    """

    first: int
    queries: int
    key_ranges: tuple[tuple[int, int], ...]


class _Extents(NamedTuple):
    """The range of keys of every query, over some rows of the batch, with and without the window.

    Attributes:
        low: first key in the window, (L,) integers; `high`, `first` and `last` likewise.
        high: last key in the window.
        first: first key that is visible without the window, such as the first of the document or row.
        last: last key that is visible without the window.
        far: whether the query is a global token with visible keys outside of its window, (L,) booleans.
        keys: the keys that are global tokens, in ascending order.
    """

    low: list[int]
    high: list[int]
    first: list[int]
    last: list[int]
    far: list[bool]
    keys: list[int]


def distances(
    positions: torch.Tensor | None, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Return how far keys are before queries, by `positions` (B, K), or by index if it is None. Indices broadcast."""
    return query - key if positions is None else positions[row, query] - positions[row, key]


def in_window(
    window: int,
    global_tokens: Sequence[int],
    positions: torch.Tensor | None,
    index_in_document: torch.Tensor | None,
    row: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Whether query and key are at most `window` apart, or one of them is a global token.

    Args:
        window, global_tokens, positions, index_in_document: as in `SlidingWindowMask`.
        row: index of the row of the batch, a tensor; row, query and key broadcast.
    """
    near = distances(positions, row, query, key).abs() <= window
    if index_in_document is not None:
        query, key = index_in_document[row, query], index_in_document[row, key]
    for token in global_tokens:
        near = near | (query == token) | (key == token)
    return near


def merged(spans: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Convert spans (first, last + 1), ascending, to (first, count). Spans less than `GAP` apart are merged."""
    ends = [list(spans[0])]
    for begin, stop in spans[1:]:
        if begin - ends[-1][1] < GAP:
            ends[-1][1] = max(stop, ends[-1][1])
        else:
            ends.append([begin, stop])
    return tuple((begin, max(stop - begin, 1)) for begin, stop in ends)


@dataclass(frozen=True, eq=False)
class SlidingWindowMask(LazyMask):
    """The pairs of L queries and K keys that an attention window lets through.

    Query and key must be at most `window` apart, or one of them must be a global token. Both must belong to one
    document. The key must not be padding, and not later than a causal query. Only padding can see no key at all. Its
    output is finite, and otherwise undefined.

    Attributes:
        query_length: L.
        key_length: K.
        window: the largest distance.
        device: the device of the masks that are built.
        start: index of the first query among the keys.
        global_tokens: the global tokens of a document, by their index in it.
        is_causal: whether queries see no later key.
        positions: (B, K), the positions from which distances are computed, arbitrary for padding; None for indices.
        documents: (B, K), the number of each key's document, ascending; None for one document in each row.
        index_in_document: (B, K), the index by which tokens are global; None for the index among the keys.
        is_token: boolean (B, K), False for padding; None without padding.
    """

    query_length: int
    key_length: int
    window: int
    device: torch.device
    start: int = 0
    global_tokens: tuple[int, ...] = (0,)
    is_causal: bool = False
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    index_in_document: torch.Tensor | None = None
    is_token: torch.Tensor | None = None

    def to(self, device: torch.device | str | int) -> "SlidingWindowMask":
        """Return the mask on another device, made once for each device. On its own device, return the mask itself."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(moved(self, device), device=device)
        return self._elsewhere[device]

    @functools.cached_property
    def _elsewhere(self) -> dict[torch.device, "SlidingWindowMask"]:
        return {}

    @functools.cached_property
    def cached(self) -> dict[Any, Any]:
        """A cache in which backends keep what they make of the mask once for all layers, under their own keys."""
        return {}

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """The dense mask, boolean (1 or B, 1, L, K), for backends that need it whole."""
        return self.visible(slice(0, self.query_length), torch.arange(self.key_length, device=self.device))

    def visible(self, queries: slice, keys: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Return whether queries attend to keys, boolean (1 or rows, 1, m, n).

        Args:
            keys: (n,), indices of keys.
            rows: the rows of the batch.
        """

        vectors = (self.positions, self.documents, self.index_in_document, self.is_token)
        batch = next((len(vector) for vector in vectors if vector is not None), 1)
        row = torch.arange(batch, device=self.device)[rows][:, None, None]
        query = (torch.arange(queries.start, queries.stop, device=self.device) + self.start)[None, :, None]
        seen = self.sees(row, query, keys[None, None, :])
        return seen[:, None]

    def sees(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether queries attend to keys, for index tensors that broadcast. `query` is an index among the keys."""
        seen = in_window(self.window, self.global_tokens, self.positions, self.index_in_document, row, query, key)
        if self.is_causal:
            seen = seen & (key <= query)
        if self.documents is not None:
            seen = seen & (self.documents[row, query] == self.documents[row, key])
        if self.is_token is not None:
            seen = seen & self.is_token[row, key]
        return seen

    def keys_of(self, block: Block) -> torch.Tensor:
        """Return the indices of a block's keys, (n,)."""
        ranges = [torch.arange(begin, begin + count, device=self.device) for begin, count in block.key_ranges]
        return torch.cat(ranges)

    def blocks(self, rows: slice, size: int) -> list[Block]:
        """Return blocks of queries with the keys that any query sees in some rows of the batch.

        This reads the vectors, so that the CPU must wait for a device. Call it once for all layers.

        Args:
            size: the largest number of queries in a block. Blocks of queries that see all keys have fewer, so that
                they have no more pairs.
        """
        extents, length = self._extents(rows), self.query_length
        most = max(1, size * (size + 2 * self.window) // self.key_length)
        blocks, first = [], 0
        while first < length:
            far = extents.far[first]
            end = first
            while end < min(length, first + (min(size, most) if far else size)) and extents.far[end] == far:
                end += 1
            blocks.append(self._block(extents, first, end))
            first = end
        return blocks

    @staticmethod
    def _block(extents: _Extents, first: int, end: int) -> Block:
        far = extents.far[first]
        left = min(extents.first[first:end])
        right = max(extents.last[first:end])
        low = left if far else min(extents.low[first:end])
        high = right if far else max(extents.high[first:end])
        spans = [[low, high + 1]] if low <= high else []
        if not far:
            spans += [[key, key + 1] for key in extents.keys if left <= key <= right and not low <= key <= high]
        spans = sorted(spans) or [[min(max(left, 0), right) if right >= 0 else 0] * 2]
        return Block(first, end - first, merged(spans))

    def _extents(self, rows: slice) -> _Extents:
        positions, documents, index, is_token = (
            None if vector is None else vector[rows].cpu().contiguous()
            for vector in (self.positions, self.documents, self.index_in_document, self.is_token)
        )
        queries = (torch.arange(self.query_length) + self.start)[None]
        keys = torch.arange(self.key_length)[None]
        last = torch.full_like(queries, self.key_length - 1)
        first = torch.zeros_like(queries)
        if positions is None:
            low, high = queries - self.window, queries + self.window
        else:  # ascending, once each padding token is given the position of the token before it
            assert is_token is not None, "positions come with a memory, and it says which keys are tokens"
            ascending = torch.where(is_token, positions, -(1 << 62)).cummax(-1).values
            own = ascending[:, queries[0]].contiguous()
            low = torch.searchsorted(ascending, own - self.window)
            high = torch.searchsorted(ascending, own + self.window, right=True) - 1
        if documents is not None:
            own = documents[:, queries[0]].contiguous()
            first = torch.maximum(first, torch.searchsorted(documents, own))
            last = torch.minimum(last, torch.searchsorted(documents, own, right=True) - 1)
        if is_token is not None:
            real = is_token.int()
            first = torch.maximum(first, real.argmax(-1, keepdim=True))
            last = torch.minimum(last, self.key_length - 1 - real.flip(-1).argmax(-1, keepdim=True))
        if self.is_causal:
            last = torch.minimum(last, queries)
        first = first.clamp(min=0)
        low, high = torch.maximum(low, first), torch.minimum(high, last)
        counted = keys if index is None else index
        is_global = torch.isin(counted, torch.tensor(self.global_tokens, dtype=counted.dtype))
        far = is_global[:, queries[0]] & ((first < low) | (last > high))
        if is_token is not None:
            is_global = is_global & is_token
        return _Extents(
            low.amin(0).tolist(),
            high.amax(0).tolist(),
            first.amin(0).tolist(),
            last.amax(0).tolist(),
            far.any(0).tolist(),
            is_global.any(0).nonzero().flatten().tolist(),
        )
