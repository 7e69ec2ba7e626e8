"""Forward and backward of one chunk: some rows of the batch, some heads, and some queries.

The scores are one dense buffer. Products by offset (`relative_shift.py`) are written or added to it pair by pair, and
the content product is added in place. The columns of each range of keys are padded to a multiple of ALIGNED. Padding
columns are −inf, so that one softmax over the whole buffer is the softmax of every row, with zeros there.

The backward computes the chunk's probabilities again, unless they were kept. It writes the gradients of the scores
through the same views.
"""

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ....products.cpu_gemm import has_onednn_bmm
from ...toeplitz import OffsetTable
from .chunks import ALIGNED, ChunkedCall, QueryChunk, rounded_up, workspace
from .relative_shift import Diagonals, add_product, diagonal_sums


TERMS = ("A", "B", "c", "V", "dense")


class Inputs(NamedTuple):
    """The tensors of a call: content q̂ + u, query q̂ (the same object if there is no u), key, value, and `TERMS`."""

    content: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    A: torch.Tensor | None
    B: torch.Tensor | None
    c: torch.Tensor | None
    V: torch.Tensor | None
    dense: torch.Tensor | None


class Range(NamedTuple):
    """A range of keys in a buffer of a chunk.

    Attributes:
        number: of the range in the chunk.
        first: the row of the tables for the last query, i' = 0, and the first key.
        keys: the keys of the pairs.
        pairs: the columns of the pairs, (g, m, n).
        padded_keys: the keys of all columns.
        columns: all columns of the range with its padding, (g, m, c).
    """

    number: int
    first: int
    keys: slice
    pairs: torch.Tensor
    padded_keys: slice
    columns: torch.Tensor


class HeadGroup:
    """Some heads of some rows of the batch: their keys and values, and the products of one chunk at a time.

    Scores have g = h · r matrices, for h heads and r rows of the batch; those of one head are adjacent. Vectors are
    either by position, (r, m, h, d), as a layer's projections leave them and `relative_shift.py` reads them, or
    matrices, (g, m, d). For one row of the batch, the matrices are a view.
    """

    def __init__(self, call: ChunkedCall, rows: slice, heads: slice, inputs: Inputs):
        self.call, self.rows, self.heads = call, rows, heads
        self.content = self.by_position(inputs.content)
        self.query = None if inputs.query is inputs.content else self.by_position(inputs.query)
        self.grid = self.content.shape[2], self.content.shape[0]  # (h, r)
        self.count = self.grid[0] * self.grid[1]
        self.inputs, self.keys = inputs, inputs.key.shape[2]
        self.key, self.value = (self.padded(self.by_head(x)) for x in (inputs.key, inputs.value))
        terms = call.terms
        self.A, self.V = self.diagonals(inputs.A, terms.query_table), self.diagonals(inputs.V, terms.value_table)
        self.B = self.diagonals(inputs.B, None)
        self.c = None if inputs.c is None else self.of_heads(inputs.c)
        self.near = self.c  # with the lowest number where keys are too far to weigh anything
        if self.c is not None and call.far is not None:
            self.near = self.c.masked_fill(self.of_heads(call.far), torch.finfo(self.c.dtype).min)
        self.allow = None if terms.allow is None else self.of_heads(terms.allow)
        self.dense = None if inputs.dense is None else self.by_head(inputs.dense)
        self.mask = None if call.mask is None else self.by_head(call.mask)

    @cached_property
    def key_by_position(self) -> torch.Tensor:
        """The keys by position, contiguous, for the products with B."""
        return self.by_position(self.inputs.key).contiguous()

    def of_heads(self, table: torch.Tensor) -> torch.Tensor:
        """Return the part of a table, (H or 1, …), that belongs to these heads."""
        return table if table.shape[0] == 1 else table[self.heads]

    def diagonals(self, table: torch.Tensor | None, of: OffsetTable | None) -> Diagonals | None:
        """Return `Diagonals` for the part of a table, (H or 1, P + ALIGNED − 1, d), that belongs to these heads."""
        if table is None:
            return None
        return Diagonals(self.of_heads(table), (1, 1) if of is None else of.clamped, self.grid)

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor (B or 1, H or 1, …) for these heads and rows, (h or 1, r or 1, …)."""
        if tensor.shape[0] > 1:
            tensor = tensor[self.rows]
        if tensor.shape[1] > 1:
            tensor = tensor[:, self.heads]
        return tensor.transpose(0, 1)

    def by_position(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of vectors (B, H, L, d) for these rows and heads, (r, L, h, d)."""
        return tensor[self.rows, self.heads].transpose(1, 2)

    def by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert (g, …) to (r, h, …), the layout of the call's tensors."""
        return tensor.unflatten(0, self.grid).transpose(0, 1)

    def matrices(self, vectors: torch.Tensor) -> torch.Tensor:
        """Convert vectors by position, (r, m, h, d), to matrices, (g, m, d)."""
        return vectors.permute(2, 0, 1, 3).reshape(self.count, vectors.shape[1], vectors.shape[3])

    def padded(self, keys: torch.Tensor) -> torch.Tensor:
        """Convert keys or values (h, r, K, d) to (g, N, d), with zeros up to the last column of any chunk."""
        has_mask = self.call.mask is not None or self.call.window is not None
        missing = ALIGNED - 1 if has_mask else rounded_up(self.keys) - self.keys
        keys = pad(keys, (0, 0, 0, missing)) if missing else keys
        keys = keys.reshape(self.count, keys.shape[2], -1)
        return keys.contiguous() if has_onednn_bmm(keys.dtype) else keys

    def rows_of(self, tensor: torch.Tensor, chunk: QueryChunk) -> torch.Tensor:
        """Return the chunk's rows, last first, of a tensor (h or 1, r or 1, L, …)."""
        return tensor[:, :, chunk.first : chunk.first + chunk.rows].flip(2)

    def vectors_of(self, vectors: torch.Tensor, chunk: QueryChunk) -> torch.Tensor:
        """Return the chunk's rows, last first, contiguous, (r, m, h, d), of vectors by position (r, L, h, d)."""
        return vectors[:, chunk.first : chunk.first + chunk.rows].flip(1)

    def buffer(self, name: str, chunk: QueryChunk) -> torch.Tensor:
        """Return a buffer for all columns of a chunk, (g, m, N)."""
        return workspace(name, (self.count, chunk.rows, chunk.width), self.key.dtype)

    def ranges(self, buffer: torch.Tensor, chunk: QueryChunk) -> list[Range]:
        """Return the ranges of keys in a buffer, (g, m, N)."""
        last, found = self.call.start + chunk.first + chunk.rows - 1, []
        for index, (begin, count) in enumerate(chunk.key_ranges):
            at, end = chunk.begins[index], chunk.begins[index + 1]
            first, keys = begin - last - self.call.terms.low, slice(begin, begin + count)
            pairs, columns = buffer[:, :, at : at + count], buffer[:, :, at:end]
            found.append(Range(index, first, keys, pairs, slice(begin, begin + end - at), columns))
        return found

    # Masks: pairs that are hidden, and the value that their scores get -----------------------------------------------

    def hide_masked(self, part: Range, chunk: QueryChunk, value: float) -> None:
        """Set the scores of pairs that the mask hides to a value."""
        if chunk.hidden is not None:
            by_head = part.columns.unflatten(0, self.grid)
            for columns, hidden in chunk.hidden[part.number]:
                by_head[..., columns].masked_fill_(hidden.transpose(0, 1), value)
        elif chunk.is_masked and self.mask is not None:
            mask = self.mask[..., part.keys]
            constant = mask.shape[2] == 1 or mask.stride(2) == 0
            visible = mask[:, :, :1] if constant else self.rows_of(mask, chunk)
            part.pairs.unflatten(0, self.grid).masked_fill_(~visible, value)

    @staticmethod
    def by_pair(scalars: torch.Tensor, part: Range) -> torch.Tensor:
        """View scalars by offset, (h or 1, P), as scalars by pair, (h or 1, 1, m, n), with overlapping rows."""
        scalars = scalars.contiguous()
        shape = (scalars.shape[0], 1, *part.pairs.shape[1:])
        return scalars.as_strided(shape, (scalars.stride(0), 0, 1, 1), scalars.storage_offset() + part.first)

    def hide(self, part: Range, chunk: QueryChunk, value: float) -> None:
        """Set the scores of pairs that the mask, causality or the scheme hide to a value."""
        self.hide_masked(part, chunk, value)
        count = part.pairs.shape[2]
        own = self.call.start + chunk.first - part.keys.start  # the column of the key at the first query's position
        if self.call.causal and own + 1 < count:
            from_column = max(own, 0)
            column = torch.arange(from_column - own, count - own, device=part.pairs.device)
            pairs = column > torch.arange(chunk.rows - 1, -1, -1, device=part.pairs.device)[:, None]
            part.pairs[:, :, from_column:].masked_fill_(pairs, value)
        if self.allow is not None:
            part.pairs.unflatten(0, self.grid).masked_fill_(~self.by_pair(self.allow, part), value)

    # A chunk ---------------------------------------------------------------------------------------------------------

    def probabilities(
        self, chunk: QueryChunk, content: torch.Tensor, query: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Compute the softmax of the scores, with zeros in padding columns, in `buffer`, (g, m, N).

        Args:
            content: q̂ + u, the chunk's queries as matrices, (g, m, d).
            query: q̂, the chunk's queries by position, (r, m, h, d).
        """
        bias = self.near if chunk.skips_far else self.c
        beta = float(self.A is not None or bias is not None)
        for part in self.ranges(buffer, chunk):
            by_head = part.pairs.unflatten(0, self.grid)
            if self.A is not None:
                self.A.add_to(part.pairs, query, part.first, fresh=True)
            if bias is not None:
                by_pair = self.by_pair(bias, part)
                by_head.copy_(by_pair) if self.A is None else by_head.add_(by_pair)
            keys = self.key[:, part.padded_keys].transpose(1, 2)
            part.columns.baddbmm_(content, keys, beta=beta, alpha=self.call.terms.scale)
            if self.B is not None:
                self.B.add_to(part.pairs.transpose(1, 2), self.key_by_position[:, part.keys], part.first)
            if self.dense is not None:
                by_head += self.rows_of(self.dense, chunk)[..., part.keys]
            self.hide(part, chunk, torch.finfo(buffer.dtype).min)
            part.columns[:, :, part.pairs.shape[2] :] = -torch.inf
        torch.softmax(buffer, dim=-1, out=buffer)
        if self.allow is not None:  # a query that may attend to no key gets zeros
            for part in self.ranges(buffer, chunk):
                self.hide(part, chunk, 0.0)
        return buffer

    def dropout_factors(self, chunk: QueryChunk, generator: torch.Generator | None) -> list[torch.Tensor]:
        """Return 1 for pairs to keep and 0 for pairs to drop, (g, m, c) for every range, drawn by the generator."""
        if generator is None:
            return []
        # Where contents leave keys out, numbers are drawn for all, as they must not depend on contents.
        whole = self._drawn(chunk, rounded_up(self.keys) + ALIGNED, generator) if chunk.skips_far else None
        drawn_masks = []
        for index, (begin, end) in enumerate(pairwise(chunk.begins)):
            drawn, least = whole or self._drawn(chunk, end - begin, generator)
            first = chunk.key_ranges[index][0] if whole else 0
            # multiplying takes a tenth of the time of masked_fill
            factors = workspace(f"kept{index}", (self.count, chunk.rows, end - begin), self.key.dtype)
            drawn_masks.append(torch.ge(drawn[..., first : first + end - begin], least, out=factors))
        return drawn_masks

    def _drawn(self, chunk: QueryChunk, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a byte for each weight, (g, m, width), and for each query what its bytes are compared with, (g, m, 1).

        This is a multiple of 2^−8, on average the requested multiple of 2^−16.
        """
        total = self.count * chunk.rows * width
        words = workspace("bits", (-(-total // 8),), torch.int64)
        words.random_(-(1 << 63), None, generator=generator)
        low, rest = divmod(self.call.dropout, 256)
        least = torch.randint(256, (self.count, chunk.rows, 1), generator=generator, device=words.device) < rest
        return words.view(torch.uint8)[:total].view(self.count, chunk.rows, width), least.to(torch.uint8) + low

    def forward(
        self, chunk: QueryChunk, generator: torch.Generator | None, kept: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the output for the chunk's queries, in their original order, (r, m, h, d).

        Args:
            kept: a list that gets the probabilities, if the backward is not to compute them again; or None.
        """
        content, query = self.queries(chunk)
        no_copy = kept is not None and generator is None
        buffer = self.key.new_empty((self.count, chunk.rows, chunk.width)) if no_copy else self.buffer("scores", chunk)
        self.probabilities(chunk, self.matrices(content), query, buffer)
        if kept is not None:
            kept.append(buffer if no_copy else buffer.clone())
        factors = self.dropout_factors(chunk, generator)
        out = self.by_row(self.value.new_zeros(self.count, chunk.rows, self.value.shape[2])).transpose(1, 2)
        for part in self.ranges(buffer, chunk):
            if factors:
                part.columns.mul_(factors[part.number])
            out += self.by_row(torch.bmm(part.columns, self.value[:, part.padded_keys])).transpose(1, 2)
            if self.V is not None:
                out += self.V.weighed(part.pairs, part.first)
        if generator is not None:
            out /= self.call.keep_probability
        return out.flip(1)

    def queries(self, chunk: QueryChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q̂ + u and q̂ of a chunk, last first, (r, m, h, d)."""
        content = self.vectors_of(self.content, chunk)
        return content, content if self.query is None else self.vectors_of(self.query, chunk)

    def backward(
        self,
        chunk: QueryChunk,
        generator: torch.Generator | None,
        d_out: torch.Tensor,
        total: "Gradients",
        probabilities: torch.Tensor | None = None,
    ) -> None:
        """Add the chunk's share to all gradients.

        Args:
            d_out: gradient of the output of the whole call, (B, H, L, d).
            probabilities: the probabilities that `forward` kept for the chunk, or None.
        """
        terms = self.call.terms
        content_by_position, query = self.queries(chunk)
        d_out_by_position = self.vectors_of(self.by_position(d_out), chunk)
        if generator is not None:
            d_out_by_position /= self.call.keep_probability
        content, d_out = self.matrices(content_by_position), self.matrices(d_out_by_position)
        if probabilities is None:
            buffer = self.probabilities(chunk, content, query, self.buffer("scores", chunk))
        else:  # copied if it is written to below
            buffer = probabilities if generator is None else self.buffer("scores", chunk).copy_(probabilities)
        gradients = self.buffer("gradients", chunk)
        kept = self.dropout_factors(chunk, generator)
        mean = content.new_zeros(self.count, chunk.rows, 1)  # Σ_j α_ij ∂α_ij
        both = list(zip(self.ranges(gradients, chunk), self.ranges(buffer, chunk), strict=True))
        for part, weights in both:
            columns, beta = part.columns, float(self.V is not None)
            if self.V is not None:
                columns[:, :, part.pairs.shape[2] :] = 0.0
                self.V.add_to(part.pairs, d_out_by_position, part.first, fresh=True)
            columns.baddbmm_(d_out, self.value[:, part.padded_keys].transpose(1, 2), beta=beta)
            if kept:
                columns.mul_(kept[part.number])
            products = torch.mul(columns, weights.columns, out=workspace("products", columns.shape, columns.dtype))
            mean += products.sum(-1, keepdim=True)
        d_content, d_query = torch.zeros_like(content), torch.zeros_like(query)
        for part, weights in both:
            scores, keys, first = part.pairs, part.padded_keys, part.first
            # the subtraction comes first: where a weight is near 1, the difference is near 0
            part.columns.sub_(mean).mul_(weights.columns)
            if kept:
                weights.columns.mul_(kept[part.number])
            if chunk.has_empty_rows and self.allow is None:
                self.hide_masked(part, chunk, 0.0)  # their weights are not zero; the gradients of their scores must be
            add_product(total.value[:, keys], weights.columns.transpose(1, 2), d_out)
            add_product(total.key[:, keys], part.columns.transpose(1, 2), content, terms.scale)
            d_content += torch.bmm(part.columns, self.key[:, keys])
            if self.B is not None:
                by_position, table = self.key_by_position[:, part.keys], self.of_heads(total.terms["B"])
                weighed = self.B.weighed(scores.transpose(1, 2), first, table, by_position)
                total.key[:, part.keys] += self.matrices(weighed)
            if self.V is not None:
                self.V.table_gradient(weights.pairs, d_out_by_position, first, self.of_heads(total.terms["V"]))
            if self.A is not None:
                d_query += self.A.weighed(scores, first, self.of_heads(total.terms["A"]), query)
            if "c" in total.terms:
                into = self.of_heads(total.terms["c"])
                by_offset = diagonal_sums(scores.unflatten(0, self.grid).sum(1), into.dtype)
                into = into[:, first : first + by_offset.shape[1]]
                into += by_offset.sum(0, keepdim=True) if into.shape[0] == 1 else by_offset
            if "dense" in total.terms:
                into = self.by_head(total.terms["dense"])
                into = into[:, :, chunk.first : chunk.first + chunk.rows, part.keys]
                into += scores.flip(1).unflatten(0, self.grid).sum_to_size(into.shape)
        rows = (self.rows, self.heads, slice(chunk.first, chunk.first + chunk.rows))
        d_content = self.by_row(d_content * terms.scale).transpose(1, 2)
        if total.query is None:
            d_content = d_content + d_query
        else:
            total.query[rows] = d_query.flip(1).transpose(1, 2)
        total.content[rows] = d_content.flip(1).transpose(1, 2)


class Gradients:
    """The gradients that the backward fills, summed in float32 at least. Those of key and value are of one group."""

    def __init__(self, inputs: Inputs, needs_dense: bool):
        self.content = torch.empty_like(inputs.content)
        self.query = None if inputs.query is inputs.content else torch.empty_like(inputs.query)
        self.terms: dict[str, torch.Tensor] = {}  # of the terms that the call has
        for name in TERMS:
            table = getattr(inputs, name)
            if table is not None and (needs_dense or name != "dense"):
                self.terms[name] = zeros_like_sum(table)

    def start_group(self, group: HeadGroup) -> None:
        """Make zeros for the gradients of another group's key and value."""
        self.key, self.value = zeros_like_sum(group.key), zeros_like_sum(group.value)

    def of_terms(self, inputs: Inputs) -> list[torch.Tensor | None]:
        """Return the gradients of `TERMS`, in the dtypes of these."""
        return [self.terms[name].to(getattr(inputs, name).dtype) if name in self.terms else None for name in TERMS]


def zeros_like_sum(like: torch.Tensor) -> torch.Tensor:
    """Make zeros to add to, in float32 at least, of the shape of `like`."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
