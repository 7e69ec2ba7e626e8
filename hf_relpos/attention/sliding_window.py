"""The mask of an attention window, kept as vectors and made block by block.

A dense mask of L queries has L² entries, and with it both time and memory of a window grow as without one. Here
padding, documents and positions stay vectors of the K keys; for a block of queries they say which ranges of keys any
of its queries sees, and which pairs of these are hidden. With a window of w, m queries see 2w + m keys and
the global tokens. Queries that are global tokens see far keys, and are blocks of their own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .call import LazyMask


# Keys between two ranges up to which these are one: a range of its own is padded to this many columns.
GAP = 16


class Block(NamedTuple):
    """Some queries, and the keys that any of them sees.

    Attributes:
        first: the first of the queries.
        queries: how many.
        key_ranges: (first key, count), in ascending order.
        is_far: whether they are global tokens, with keys outside of their window.
        global_keys: the global tokens among the keys, in ascending order; of far queries none.
    """

    first: int
    queries: int
    key_ranges: tuple[tuple[int, int], ...]
    is_far: bool
    global_keys: tuple[int, ...]


class _Extents(NamedTuple):
    """The range of keys of every query, over some rows of the batch, with and without the window.

    Attributes:
        low: first key in the window, (L,) integers, as the others.
        high: last key in the window.
        first: first key of the document or row.
        last: last key of it.
        far: whether it is a global token and there are keys outside of its window, booleans.
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
    """How far keys are before queries, of index tensors that broadcast; of positions (B, K), None for indices."""
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
        positions: (B, K), as `SlidingWindowMask` has them; likewise the two before and the one after.
        row: index of the row of the batch, a tensor; row, query and key broadcast.
    """
    near = distances(positions, row, query, key).abs() <= window
    if index_in_document is not None:
        query, key = index_in_document[row, query], index_in_document[row, key]
    for token in global_tokens:
        near = near | (query == token) | (key == token)
    return near


def merged(spans: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """(first, count) of spans (first, last + 1), in ascending order; those less than `GAP` apart are one."""
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

    Query and key must be at most `window` apart, or one of them be a global token. Both must be of one document; the
    key must be no padding, and neither later than a causal query nor `max_lookback` or more positions before it. Only
    padding can see no key at all. Its output is finite, and otherwise undefined.

    Attributes:
        query_length: L.
        key_length: K.
        window: the largest distance.
        device: of the masks that are made.
        start: index of the first query among the keys.
        global_tokens: which tokens of a document are global, by their index in it.
        is_causal: whether a query sees no later key.
        max_lookback: one more than how far a query sees to the left, global tokens or not; None for no such limit.
        positions: (B, K), by which distances are counted; padding may have any. None for indices.
        documents: (B, K), the number of each key's document, ascending; None for one in each row.
        index_in_document: (B, K), by which global tokens are counted; None for the index among the keys.
        is_token: boolean (B, K), False for padding; None without any.
    """

    query_length: int
    key_length: int
    window: int
    device: torch.device
    start: int = 0
    global_tokens: tuple[int, ...] = (0,)
    is_causal: bool = False
    max_lookback: int | None = None
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    index_in_document: torch.Tensor | None = None
    is_token: torch.Tensor | None = None

    def to(self, device: torch.device | str | int) -> "SlidingWindowMask":
        """The same on another device, made once for each; itself where it is there."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._on(device)
        return self._elsewhere[device]

    @functools.cached_property
    def _elsewhere(self) -> dict[torch.device, "SlidingWindowMask"]:
        return {}

    def _on(self, device: torch.device) -> "SlidingWindowMask":

        def moved(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else vector.to(device)

        return replace(
            self,
            device=device,
            positions=moved(self.positions),
            documents=moved(self.documents),
            index_in_document=moved(self.index_in_document),
            is_token=moved(self.is_token),
        )

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The first and the last offset, key minus query, within the window; None where these are no indices."""
        if self.positions is not None:
            return None
        left = self.window if self.max_lookback is None else min(self.window, self.max_lookback - 1)
        return -left, 0 if self.is_causal else self.window

    @functools.cached_property
    def cached(self) -> dict[Any, Any]:
        """A cache: backends keep here what they make of the mask once for all layers, under keys of their own."""
        return {}

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """The mask of all pairs, boolean (1 or B, 1, L, K), for what needs it whole."""
        return self.visible(slice(0, self.query_length), torch.arange(self.key_length, device=self.device))

    def visible(self, queries: slice, keys: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Whether queries attend to keys, boolean (1 or rows, 1, m, n).

        Args:
            keys: (n,), indices of keys.
            rows: of the batch.
        """

        vectors = (self.positions, self.documents, self.index_in_document, self.is_token)
        batch = next((len(vector) for vector in vectors if vector is not None), 1)
        row = torch.arange(batch, device=self.device)[rows][:, None, None]
        query = (torch.arange(queries.start, queries.stop, device=self.device) + self.start)[None, :, None]
        seen = self.sees(row, query, keys[None, None, :])
        return seen[:, None]

    def sees(self, row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query attends to a key, of index tensors that broadcast; `query` is an index among the keys."""
        seen = in_window(self.window, self.global_tokens, self.positions, self.index_in_document, row, query, key)
        if self.max_lookback is not None:
            seen = seen & (distances(self.positions, row, query, key) < self.max_lookback)
        if self.is_causal:
            seen = seen & (key <= query)
        if self.documents is not None:
            seen = seen & (self.documents[row, query] == self.documents[row, key])
        if self.is_token is not None:
            seen = seen & self.is_token[row, key]
        return seen

    @functools.cached_property
    def visible_keys(self) -> torch.Tensor:
        """How many keys each query attends to, (1 or B, 1, L); of padding any number."""
        counts = []
        for block in self.blocks(slice(None), max(self.window, GAP)):
            keys = self.keys_of(block)
            counts.append(self.visible(slice(block.first, block.first + block.queries), keys).sum(-1))
        return torch.cat(counts, dim=-1)

    def keys_of(self, block: Block) -> torch.Tensor:
        """The indices of a block's keys, (n,)."""
        ranges = [torch.arange(begin, begin + count, device=self.device) for begin, count in block.key_ranges]
        return torch.cat(ranges)

    def blocks(self, rows: slice, size: int, length: int | None = None) -> list[Block]:
        """Blocks of queries and the keys that any query of some rows of the batch sees.

        The vectors are read, which on a device is to wait for it; so do it once for all layers.

        Args:
            size: how many queries a block may have; of those that see all keys, so many fewer that there are no more
                pairs.
            length: of the queries, how many of the first ones; None for all.
        """
        extents = self._extents(rows)
        length = self.query_length if length is None else length
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
        global_keys = () if far else tuple(key for key in extents.keys if left <= key <= right)
        spans += [[key, key + 1] for key in global_keys if not low <= key <= high]
        spans = sorted(spans) or [[min(max(left, 0), right) if right >= 0 else 0] * 2]
        return Block(first, end - first, merged(spans), far, global_keys)

    def _extents(self, rows: slice) -> _Extents:
        positions, documents, index, is_token = (
            None if vector is None else vector[rows].cpu().contiguous()
            for vector in (self.positions, self.documents, self.index_in_document, self.is_token)
        )
        queries = (torch.arange(self.query_length) + self.start)[None]
        keys = torch.arange(self.key_length)[None]
        last = torch.full_like(queries, self.key_length - 1)
        first = torch.zeros_like(queries)
        lookback = self.key_length + 1 if self.max_lookback is None else self.max_lookback
        if positions is None:
            low, high, first = queries - self.window, queries + self.window, queries - lookback + 1
        else:  # ascending, but for padding, which then has the position of the token before it
            assert is_token is not None, "positions come with a memory, and it says which keys are tokens"
            ascending = torch.where(is_token, positions, -(1 << 62)).cummax(-1).values
            own = ascending[:, queries[0]].contiguous()
            low = torch.searchsorted(ascending, own - self.window)
            high = torch.searchsorted(ascending, own + self.window, right=True) - 1
            if self.max_lookback is not None:
                first = torch.searchsorted(ascending, own - lookback, right=True)
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
