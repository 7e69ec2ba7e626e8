"""The mask of an attention window, kept as vectors and built block by block.

A dense mask of L queries has L² entries, so that time and memory would grow as without a window. Here padding,
documents and positions stay vectors of the K keys. For a block of queries they give the ranges of keys that any of
its queries sees, and the hidden pairs in these ranges. With a window of w, m queries see 2w + m keys and the global
tokens. Queries that are global tokens see far keys, and form blocks of their own.
"""

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from .call import LazyMask
from .context import moved
from .masks import Visibility


T = TypeVar("T")
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


def merged(spans: Iterable[tuple[int, int]], gap: int = GAP) -> tuple[tuple[int, int], ...]:
    """Convert spans (first, last + 1), ascending, to (first, count). Spans less than `gap` apart are merged."""
    ends: list[tuple[int, int]] = []
    for begin, stop in spans:
        if ends and begin - ends[-1][1] < gap:
            begin, before = ends.pop()
            stop = max(stop, before)
        ends.append((begin, stop))
    return tuple((begin, stop - begin) for begin, stop in ends)


@dataclass(frozen=True, eq=False)
class SlidingWindowMask(LazyMask, Visibility):
    """The pairs of L queries and K keys that an attention window lets through.

    A query sees a key by the rules of `Visibility`. Only padding can see no key at all. Its output is finite, and
    otherwise undefined.

    Attributes:
        query_length: L.
        key_length: K.
        window: the largest distance.
        device: the device of the masks that are built.
        start: index of the first query among the keys.
    """

    query_length: int
    key_length: int
    window: int
    device: torch.device
    start: int = 0

    def to(self, device: torch.device | str | int) -> "SlidingWindowMask":
        """Return the mask on another device, made once for each device. On its own device, return the mask itself."""
        device = torch.device(device)
        return (
            self if device == self.device else self.once(device, lambda: replace(moved(self, device), device=device))
        )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what a function makes of the mask, made once for all layers and kept under a key."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @functools.cached_property
    def _made(self) -> dict[Hashable, Any]:
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
        return self.sees(row, query, keys[None, None, :], self.window)[:, None]

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
            left, right = min(extents.first[first:end]), max(extents.last[first:end])
            low = left if far else min(extents.low[first:end])
            high = right if far else max(extents.high[first:end])
            others = [key for key in extents.keys if left <= key <= right and not low <= key <= high]
            spans = [(key, key + 1) for key in others] + [(low, high + 1)] * (low <= high)
            # a block has at least one key
            key = max(0, min(left, right))
            blocks.append(Block(first, end - first, merged(sorted(spans) or [(key, key + 1)])))
            first = end
        return blocks

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
        of_queries = (low.amin(0), high.amax(0), first.amin(0), last.amax(0), far.any(0))
        global_keys = is_global.any(0).nonzero().flatten()
        return _Extents(*(each.tolist() for each in (*of_queries, global_keys)))
