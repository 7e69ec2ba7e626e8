"""Sliding windows in the kernels: which calls are computed by window, and the global tokens outside of the band.

Every token sees the global tokens from afar, and they see every token. In the matrix of all pairs, each of them is a
column and a row, lines of L and K scores. For these lines the formula is computed as it is written. The kernels start
from the attention to the columns, in one softmax with the band. The rows are computed separately and replace those of
the band.

Nothing is read from the device. What the backward needs of a line, besides the inputs, is recomputed.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ...call import AttentionCall
from ...sliding_window import SlidingWindowMask
from ...toeplitz import ToeplitzTerms
from .dropout import kept
from .ops import LOG2E, TILE


# A call uses the mask of all pairs if it has at most this many times as many keys as the band, which is the window and
# a tile on either side. This is an estimate: the lines of the global tokens are passes over the vectors, too.
FEWEST = 2

# A call also uses the mask of all pairs if it has more global tokens than this.
MOST_GLOBAL = 16


def reads_window(call: AttentionCall) -> bool:
    """Whether the kernels compute a call by its window. If not, they read the mask of all pairs.

    They read it for packed documents, each of which has its own global tokens; for positions with gaps; for few
    queries, as with a cache, which have few pairs but as long lines of global tokens (looked for on the device); and
    for many global tokens, each of which is a pass over the vectors.
    """
    mask = call.mask
    return (
        isinstance(mask, SlidingWindowMask)
        and mask.documents is None
        and mask.positions is None
        and mask.query_length > TILE
        and mask.key_length > most_keys_whole(mask.window)
        and len(mask.global_tokens) <= MOST_GLOBAL
    )


def kernel_mask(call: AttentionCall) -> torch.Tensor | SlidingWindowMask | None:
    """Return the mask of a call as the kernels take it: the window itself, if they compute by it."""
    return call.mask if isinstance(call.mask, SlidingWindowMask) and reads_window(call) else call.tensor_mask


def most_keys_whole(window: int) -> int:
    """Return the largest number of keys with which a call uses the mask of all pairs."""
    return FEWEST * 2 * (window + TILE)


class GlobalTokens:
    """The global tokens of one call.

    Args:
        content: q̂ + u, (B, H, L, d).
        query: q̂, for A.
        key: (B, H, K, d), as is `value`.
        terms: terms without `allow`.
        mask: the window; each row is one document.
        dropout: probability of dropping a weight, in units of 2^−16.
        seed: seed of the dropout, int64, one number on the device; or None.
    """

    def __init__(
        self,
        content: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        terms: ToeplitzTerms,
        mask: SlidingWindowMask,
        dropout: int,
        seed: torch.Tensor | None,
    ):
        self.content, self.query, self.key, self.value = content, query, key, value
        self.terms, self.mask, self.dropout, self.seed = terms, mask, dropout, seed
        self.length, self.keys = query.shape[2], key.shape[2]

    def seen_from_afar(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return attention to global tokens outside of the window, (B, L, H, d), and their log₂ Σ 2^score, (B, H, L).

        A query that sees none gets zeros and −∞. Without global tokens, both results are None.
        """
        tokens = places(self.mask)
        if not tokens:
            return None, None
        query, is_token = torch.arange(self.length, device=self.key.device), self.mask.is_token
        scores, stays = [], []
        for place, there in tokens:
            distance = query + self.mask.start - place
            seen = there & self._is_within_lookback(distance) & (distance.abs() > self.mask.window)
            if is_token is not None:
                seen = seen & is_token.gather(1, place.expand(len(is_token), 1))
            line = self._scores(self.content, self.query, taken(self.key, place), place - query)
            scores.append(line.masked_fill(~seen[:, None], -torch.inf))
            stays.append(self._stays(query, place))
        weights, lse = _softmax(torch.stack(scores, -1), -1)
        if self.seed is not None:
            weights = weights * torch.stack(stays, -1)
        weights = weights.to(self.value.dtype)
        out = weights @ torch.cat([taken(self.value, place) for place, _ in tokens], 2)
        if self.terms.value_table is not None:
            for number, (place, _) in enumerate(tokens):
                out = out + again(self._positional, weights[..., number : number + 1], place - query)
        return out.transpose(1, 2), lse

    def with_rows(self, out: torch.Tensor) -> torch.Tensor:
        """Replace the rows of the output (B, L, H, d) for global tokens among the queries: they see every key."""
        start, key = self.mask.start, torch.arange(self.keys, device=self.key.device)
        if self.mask.index_in_document is None:
            own = [token for token in self.mask.global_tokens if start <= token < start + self.length]
            if not own:
                return out
        for place, there in places(self.mask):
            row = place - start
            there = there & (row >= 0) & (row < self.length)
            row = row.clamp(0, self.length - 1)
            seen = self._is_within_lookback(place - key)
            if self.mask.is_token is not None:
                seen = seen & self.mask.is_token
            scores = self._scores(taken(self.content, row), taken(self.query, row), self.key, key - row)
            weights, _ = _softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1)
            if self.seed is not None:
                weights = weights * self._stays(row, key)
            weights = weights[:, :, None].to(self.value.dtype)
            line = weights @ self.value
            if (table := self.terms.value_table) is not None:
                line = line + weights @ _at(table.rows, table.row_of, key - row + self.length - 1)
            index = row[:, :, None, None].expand(len(out), 1, *out.shape[2:])
            line = torch.where(there[:, :, None, None], line.transpose(1, 2), out.gather(1, index))
            out = out.scatter(1, index, line)
        return out

    def _is_within_lookback(self, distance: torch.Tensor) -> torch.Tensor:
        """Whether a query may see a key at that distance before it, window aside."""
        most = self.keys if self.mask.max_lookback is None else self.mask.max_lookback - 1
        return (distance >= (0 if self.mask.is_causal else -self.keys)) & (distance <= most)

    def _scores(
        self, content: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores of a line, times log₂ e, float32 (B, H, N): one query with all keys, or all with one.

        Args:
            content: (B, H, 1 or N, d), as are `query` and `key`.
            offset: index of the key − index of the query, (1 or B, N).
        """
        terms, row = self.terms, offset + self.length - 1

        def line(
            content: torch.Tensor,
            query: torch.Tensor,
            key: torch.Tensor,
            A: torch.Tensor | None,
            B: torch.Tensor | None,
            c: torch.Tensor | None,
        ) -> torch.Tensor:
            scores = terms.scale * (content @ key.transpose(2, 3)).flatten(2).float()
            if A is not None and terms.query_table is not None:
                scores = scores + (query * _at(A, terms.query_table.row_of, row)).sum(-1, dtype=torch.float32)
            if B is not None and terms.key_table is not None:
                scores = scores + (key * _at(B, terms.key_table.row_of, row)).sum(-1, dtype=torch.float32)
            if c is not None:
                scores = scores + _at(c, None, row)
            return LOG2E * scores

        tables = (terms.query_table, terms.key_table)
        A, B = (None if table is None else table.rows for table in tables)
        return again(line, content, query, key, A, B, terms.bias)

    def _positional(self, weights: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Return α V of a column, (B, H, L, d), for weights (B, H, L, 1)."""
        table = self.terms.value_table
        assert table is not None, "there is a value term"
        return weights * _at(table.rows, table.row_of, offset + self.length - 1)

    def _stays(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the dropout factors, (B, H, N), for indices as the kernels count them."""
        if self.seed is None:
            return query
        batch, heads = self.query.shape[:2]
        pair = torch.arange(batch * heads, device=query.device).view(batch, heads, 1)
        query, key = (index if index.dim() == 1 else index[:, None] for index in (query, key))
        return kept(self.seed, pair, query, key, self.dropout) * (65536 / (65536 - self.dropout))


def places(mask: SlidingWindowMask) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the index of each global token among the keys, and whether it exists, (1 or B, 1) each.

    This is computed once for all layers.
    """
    if "global tokens" not in mask.cached:
        found = []
        for token in mask.global_tokens:
            if mask.index_in_document is None:
                if token >= mask.key_length:
                    continue
                place = torch.full((1, 1), token, device=mask.device)
                there = torch.ones_like(place, dtype=torch.bool)
            else:
                is_token = mask.index_in_document == token
                place, there = is_token.int().argmax(-1, keepdim=True), is_token.any(-1, keepdim=True)
            found.append((place, there))
        mask.cached["global tokens"] = found
    made: list[tuple[torch.Tensor, torch.Tensor]] = mask.cached["global tokens"]
    return made


def taken(vectors: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Take one row of each matrix of (B, H, N, d), by its index, (1 or B, 1); return (B, H, 1, d)."""
    batch, heads, _, size = vectors.shape
    return vectors.gather(2, place[:, None, :, None].expand(batch, heads, 1, size))


def again(function: Callable[..., torch.Tensor], *given: torch.Tensor | None) -> torch.Tensor:
    """Call the function. The backward recomputes it."""
    if not torch.is_grad_enabled():
        return function(*given)
    result: torch.Tensor = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return result


def _at(table: torch.Tensor, row_of: torch.Tensor | None, offset: torch.Tensor) -> torch.Tensor:
    """Return rows of a table (H or 1, P, …) for offsets (1 or B, N), counted from the first: (1 or B, H or 1, N, …).

    If rows are not offsets, the table is first expanded to one row per offset. Then few offsets share an entry whose
    gradients the backward must add up.
    """
    by_offset = table if row_of is None else table[:, row_of]
    return by_offset[:, offset].transpose(0, 1)


def _softmax(scores: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax to base 2, and log₂ Σ 2^score; zeros and −∞ where all scores are −∞."""
    highest = scores.detach().amax(dim, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp2(scores - highest)
    total = weights.sum(dim, keepdim=True)
    is_dead = total == 0
    total = total.masked_fill(is_dead, 1.0)
    lse = (highest + total.log2()).masked_fill(is_dead, -torch.inf)
    return weights / total, lse.squeeze(dim)
