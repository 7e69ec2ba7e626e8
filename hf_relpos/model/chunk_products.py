"""Forward and backward of one chunk: some heads of one row of the batch, and some queries.

For one chunk all that is relative is a few matrix products. The content product is added to the skewed view of q·A
(`skewed.py`) in place; the gaps of the view are set to −inf, so that one softmax over the whole buffer is the softmax
of every row, with zeros in the gaps. Read with rows of W numbers again, these zeros make the value term one product
with V. The key side is the same with keys and queries exchanged, block of keys by block of keys.

The backward computes the chunk's probabilities again, unless they were kept, and writes the gradients of the scores
through the same view: then the buffer times A is the gradient of q, q times the buffer that of A, and its column sums
are that of c.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .key_runs import KeyRuns
from .skewed import ChunkedCall, QueryChunk, keys_per_block, workspace


class Inputs(NamedTuple):
    """The tensors of a call: content q̂ + u, query q̂ (the same object where there is no u), key, value, and terms."""

    content: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    A: torch.Tensor | None
    B: torch.Tensor | None
    c: torch.Tensor | None
    V: torch.Tensor | None
    dense: torch.Tensor | None


class HeadGroup:
    """Some heads of one row of the batch: their keys and values, and the products of one chunk at a time."""

    def __init__(self, call: ChunkedCall, row: int, heads: slice, inputs: Inputs):
        self.call, self.row, self.heads = call, row, heads
        self.content = inputs.content[row, heads]
        self.query = None if inputs.query is inputs.content else inputs.query[row, heads]
        self.key, self.value = (x[row, heads].contiguous() for x in (inputs.key, inputs.value))  # (g, K, d)
        self.count, self.keys, self.size = self.key.shape
        self.A, self.B, self.c, self.V = (self.of_heads(x) for x in (inputs.A, inputs.B, inputs.c, inputs.V))
        self.allow = self.of_heads(call.allow)
        dense = inputs.dense
        self.dense = None if dense is None else self.of_heads(dense[row if dense.shape[0] > 1 else 0])
        self.blocks = {}
        # products of bfloat16 are slow, one head at a time, where they read or write through a skewed view
        self.separate_buffers = self.key.dtype == torch.bfloat16 and self.key.device.type == "cpu"
        transposes = self.B is not None and self.separate_buffers
        self.identity = torch.eye(keys_per_block(), dtype=self.key.dtype) if transposes else None
        self.runs = None
        if call.terms.run_of_B is not None:
            first = -call.start - call.terms.low
            self.runs = KeyRuns(self.key, self.B, call.terms.run_of_B, call.terms.tails_B, first)

    def of_heads(self, table: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a table, (H or 1, …), that belongs to these heads."""
        return table if table is None or table.shape[0] == 1 else table[self.heads]

    def window(self, chunk: QueryChunk, index: int) -> tuple[int, int]:
        """First row, and number of rows, of the tables that belong to the pairs of a range."""
        begin, count = chunk.key_ranges[index]
        last = self.call.start + chunk.first + chunk.rows - 1
        return begin - last - self.call.terms.low, count + chunk.rows - 1

    def rows_of(self, tensor: torch.Tensor, chunk: QueryChunk) -> torch.Tensor:
        """The chunk's rows, last first, contiguous, of a tensor (g, L, …)."""
        return tensor[:, chunk.first : chunk.first + chunk.rows].flip(1).contiguous()

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer of that shape, of the dtype of the keys if no other is given."""
        return workspace(name, shape, self.key.dtype if dtype is None else dtype, self.key.device)

    def buffer(self, name: str, chunk: QueryChunk) -> torch.Tensor:
        """(g, m, W)."""
        return self.workspace(name, (self.count, chunk.rows, chunk.width))

    def as_operand(self, skewed: torch.Tensor, name: str) -> torch.Tensor:
        """The pairs of a skewed view, (g, m, n), as products should read them: a copy where that is faster."""
        return self.workspace(name, skewed.shape).copy_(skewed) if self.separate_buffers else skewed

    # By the offset: a product with a table, and its gradients --------------------------------------------------------

    def bands(
        self, chunk: QueryChunk, table: torch.Tensor, tails: tuple[int, int]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """For every range of a chunk: where its columns begin and end in the buffer; the columns between which the
        table's rows differ, first and last; and the row of the table at the first of these."""
        for index, begin in enumerate(chunk.begins):
            first, width = self.window(chunk, index)
            left = min(max(tails[0] - 1 - first, 0), width - 1)
            right = min(max(table.shape[1] - tails[1] - first, left), width - 1)
            yield begin, begin + width, begin + left, begin + right + 1, first + left

    def table_product(self, buffer, chunk, vectors, table, tails) -> None:
        """buffer = vectors · tableᵀ, the vectors being (g, m, d)."""
        for begin, end, left, right, row in self.bands(chunk, table, tails):
            rows = table[:, row : row + right - left].transpose(1, 2)
            if table.shape[0] == 1:
                buffer.flatten(0, 1)[:, left:right].addmm_(vectors.flatten(0, 1), rows[0], beta=0)
            else:
                buffer[:, :, left:right].baddbmm_(vectors, rows, beta=0)
            if left > begin:
                buffer[:, :, begin:left] = buffer[:, :, left : left + 1]
            if end > right:
                buffer[:, :, right:end] = buffer[:, :, right - 1 : right]

    def table_gradients(self, buffer, chunk, vectors, table, tails, total) -> torch.Tensor:
        """Add bufferᵀ · vectors to `total`, like the table; return buffer · table, (g, m, d). Spoils the buffer."""
        result = None
        for begin, end, left, right, row in self.bands(chunk, table, tails):
            _gather_tails(buffer, begin, end, left, right)
            band, rows = buffer[:, :, left:right], table[:, row : row + right - left]
            into = total[:, row : row + right - left]
            if table.shape[0] == 1:
                flat = buffer.flatten(0, 1)[:, left:right]
                _add_product(into[0], flat.t(), vectors.flatten(0, 1))
                part = torch.mm(flat, rows[0]).view(vectors.shape)
            else:
                _add_product(into, band.transpose(1, 2), vectors)
                part = torch.bmm(band, rows)
            result = part if result is None else result + part
        return result

    # By the key: the same with keys and queries exchanged, a block of keys at a time ---------------------------------

    def key_blocks(self, chunk: QueryChunk, index: int) -> Iterator[tuple[int, int, int]]:
        """(first key, number of blocks, keys of a block): whole blocks of keys, and what is left of the range."""
        begin, count = chunk.key_ranges[index]
        size = keys_per_block()
        blocks = count // size
        if blocks:
            yield begin, blocks, size
        if count % size:
            yield begin + blocks * size, 1, count % size

    def block_keys(self, begin: int, blocks: int, size: int) -> torch.Tensor:
        """Those keys, (blocks, g · size, d) for a table that all heads share, else (g, blocks, size, d)."""
        if (begin, blocks, size) not in self.blocks:
            keys = self.key[:, begin : begin + blocks * size].view(self.count, blocks, size, self.size)
            if self.B.shape[0] == 1:
                keys = keys.transpose(0, 1).reshape(blocks, self.count * size, self.size)
            self.blocks[begin, blocks, size] = keys
        return self.blocks[begin, blocks, size]

    def block_rows(self, chunk: QueryChunk, begin: int, blocks: int, size: int) -> tuple[torch.Tensor, int]:
        """The rows of B for every block of keys, (H or 1, blocks, w, d), w = size + m − 1; and the first of all."""
        first = begin - (self.call.start + chunk.first + chunk.rows - 1) - self.call.terms.low
        table = self.B
        shape = (table.shape[0], blocks, size + chunk.rows - 1, self.size)
        strides = (table.stride(0), size * self.size, self.size, 1)
        return table.as_strided(shape, strides, table.storage_offset() + first * self.size), first

    def key_buffer(self, chunk: QueryChunk, blocks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer for k · Bᵀ, (blocks, g, size, w) for a shared table, else (g, blocks, size, w); and its pairs,
        (g, m, blocks, size)."""
        width = size + chunk.rows - 1
        shared = self.B.shape[0] == 1
        lead = (blocks, self.count) if shared else (self.count, blocks)
        buffer = self.workspace("keys", (*lead, size, width))
        by_head, by_block = (buffer.stride(1), buffer.stride(0)) if shared else (buffer.stride(0), buffer.stride(1))
        pairs = buffer.as_strided((self.count, chunk.rows, blocks, size), (by_head, 1, by_block, width + 1))
        return buffer, pairs

    def add_key_side(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> None:
        """scores (g, m, n) += k_j · B_p."""
        if self.runs is not None:
            self.runs.add_to(scores, chunk, index)
            return
        at = 0
        for begin, blocks, size in self.key_blocks(chunk, index):
            keys, (rows, _) = self.block_keys(begin, blocks, size), self.block_rows(chunk, begin, blocks, size)
            buffer, pairs = self.key_buffer(chunk, blocks, size)
            if self.B.shape[0] == 1:
                torch.bmm(keys, rows[0].transpose(1, 2), out=buffer.flatten(1, 2))
            else:
                for head in range(self.count):
                    torch.bmm(keys[head], rows[head].transpose(1, 2), out=buffer[head])
            into = scores[:, :, at : at + blocks * size].unflatten(2, (blocks, size))
            if self.identity is None:
                into.add_(pairs)
            else:  # a product transposes faster than a strided addition
                identity = self.identity[:size, :size].expand(self.count, -1, -1)
                for block in range(blocks):
                    by_key = self.as_operand(pairs[:, :, block].transpose(1, 2), "block")
                    into[:, :, block].baddbmm_(by_key.transpose(1, 2), identity)
            at += blocks * size

    def key_side_gradients(self, scores: torch.Tensor, chunk: QueryChunk, index: int, d_key, d_B) -> None:
        """From the gradient of the scores (g, m, n): add to those of the keys (g, K, d) and of B.

        With runs they are only complete after `finish`.
        """
        if self.runs is not None:
            self.runs.collect(scores, chunk, index)
            return
        at = 0
        for begin, blocks, size in self.key_blocks(chunk, index):
            keys, (rows, first) = self.block_keys(begin, blocks, size), self.block_rows(chunk, begin, blocks, size)
            buffer, pairs = self.key_buffer(chunk, blocks, size)
            gradients = scores[:, :, at : at + blocks * size].unflatten(2, (blocks, size))
            if self.identity is None:
                pairs.copy_(gradients)
            else:
                identity = self.identity[:size, :size].expand(self.count, -1, -1)
                for block in range(blocks):
                    by_key = torch.bmm(identity, gradients[:, :, block].transpose(1, 2))
                    pairs[:, :, block].copy_(by_key.transpose(1, 2))
            width = buffer.shape[-1]
            gaps = (buffer.shape[0] * buffer.shape[1], size - 1, size)
            buffer.as_strided(gaps, (size * width, width + 1, 1), chunk.rows).zero_()
            into = d_key[:, begin : begin + blocks * size].unflatten(1, (blocks, size))  # (g, blocks, size, d)
            if self.B.shape[0] == 1:
                flat = buffer.flatten(1, 2)  # (blocks, g · size, w)
                into.add_(torch.bmm(flat, rows[0]).view(blocks, self.count, size, self.size).transpose(0, 1))
                by_row = torch.bmm(flat.transpose(1, 2), keys)[None]  # (1, blocks, w, d)
            else:
                by_row = []
                for head in range(self.count):
                    into[head].add_(torch.bmm(buffer[head], rows[head]))
                    by_row.append(torch.bmm(buffer[head].transpose(1, 2), keys[head]))
                by_row = torch.stack(by_row)
            for block in range(blocks):
                d_B[:, first + block * size : first + block * size + width] += by_row[:, block]
            at += blocks * size

    def finish(self, total: "Gradients") -> None:
        """Add what is multiplied once for all chunks to the gradients."""
        if self.runs is not None:
            self.runs.finish(total.key, self.of_heads(total.B))

    # A chunk ---------------------------------------------------------------------------------------------------------

    def masked(self, chunk: QueryChunk, index: int) -> torch.Tensor | None:
        """The pairs of a range that the mask hides, broadcastable to (g, m, n), or None."""
        if not chunk.is_masked:
            return None
        begin, count = chunk.key_ranges[index]
        mask = self.call.mask[self.row if self.call.mask.shape[0] > 1 else 0]
        mask = self.of_heads(mask)[:, :, begin : begin + count]
        if mask.shape[1] == 1 or mask.stride(1) == 0:
            return ~mask[:, :1]
        return ~mask[:, chunk.first : chunk.first + chunk.rows].flip(1)

    def future(self, scores: torch.Tensor, chunk: QueryChunk, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For a causal call: the columns of `scores` where some keys are later than the query, and these pairs."""
        begin, count = chunk.key_ranges[index]
        own = self.call.start + chunk.first - begin  # the column of the key at the first query's position
        if not self.call.causal or own + 1 >= count:
            return None
        from_column = max(own, 0)
        column = torch.arange(from_column - own, count - own, device=scores.device)
        pairs = column > torch.arange(chunk.rows - 1, -1, -1, device=scores.device)[:, None]
        return scores[:, :, from_column:], pairs

    def allowed(self, chunk: QueryChunk, index: int) -> torch.Tensor | None:
        """What the scheme lets through, (g or 1, m, n); a view in which all rows overlap."""
        if self.allow is None:
            return None
        first, _ = self.window(chunk, index)
        return self.skewed_scalars(self.allow, first, chunk.rows, chunk.key_ranges[index][1])

    @staticmethod
    def skewed_scalars(rows: torch.Tensor, first: int, queries: int, keys: int) -> torch.Tensor:
        """Scalars by offset, (h, P), as scalars by pair, (h, m, n): the entry of row i' and column j is i' + j on."""
        rows = rows.contiguous()
        strides = (rows.stride(0), 1, 1)
        return rows.as_strided((rows.shape[0], queries, keys), strides, rows.storage_offset() + first)

    def probabilities(self, chunk: QueryChunk, content: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """softmax of the scores, in a buffer (g, m, W) with zeros in its gaps."""
        buffer = self.buffer("scores", chunk)
        lowest = torch.finfo(buffer.dtype).min
        filled = self.A is not None
        if filled:
            self.table_product(buffer, chunk, query, self.A, self.call.terms.tails_A)
        for index, (begin, count) in enumerate(chunk.key_ranges):
            scores = chunk.skewed(buffer, index)
            first, width = self.window(chunk, index)
            if self.c is not None:
                if filled:
                    at = chunk.begins[index]
                    buffer[:, :, at : at + width] += self.c[:, None, first : first + width]
                else:
                    scores.copy_(self.skewed_scalars(self.c, first, chunk.rows, count))
            keys = self.key[:, begin : begin + count].transpose(1, 2)
            other = filled or self.c is not None
            into = self.workspace("pairs0", scores.shape) if self.separate_buffers else scores
            into.baddbmm_(content, keys, beta=float(other and not self.separate_buffers), alpha=self.call.terms.scale)
            if self.B is not None:
                self.add_key_side(into, chunk, index)
            if self.separate_buffers:
                scores.add_(into) if other else scores.copy_(into)
            if self.dense is not None:
                scores += self.rows_of(self.dense, chunk)[:, :, begin : begin + count]
            masked, future, allowed = (
                self.masked(chunk, index),
                self.future(scores, chunk, index),
                self.allowed(chunk, index),
            )
            if masked is not None:
                scores.masked_fill_(masked, lowest)
            if future is not None:
                future[0].masked_fill_(future[1], lowest)
            if allowed is not None:
                scores.masked_fill_(~allowed, lowest)
        chunk.fill_gaps(buffer, -torch.inf)
        torch.softmax(buffer, dim=-1, out=buffer)
        if self.allow is not None:  # a query that may attend to nothing gets zeros
            for index in range(len(chunk.key_ranges)):
                scores = chunk.skewed(buffer, index)
                scores.masked_fill_(~self.allowed(chunk, index), 0.0)
                masked, future = self.masked(chunk, index), self.future(scores, chunk, index)
                if masked is not None:
                    scores.masked_fill_(masked, 0.0)
                if future is not None:
                    future[0].masked_fill_(future[1], 0.0)
        return buffer

    def dropout_factors(self, chunk: QueryChunk, generator: torch.Generator | None) -> list[torch.Tensor]:
        """1 for pairs to keep and 0 for those to drop, (g, m, n) for every range: the generator's next numbers."""
        if generator is None:
            return []
        drawn_masks = []
        for index, (_, count) in enumerate(chunk.key_ranges):
            shape = (self.count, chunk.rows, count)
            total = self.count * chunk.rows * count
            words = self.workspace("bits", (-(-total // 8),), torch.int64)
            words.random_(-(1 << 63), None, generator=generator)
            drawn = words.view(torch.uint8)[:total].view(shape)
            # a byte for each weight, and for each query which multiple of 2^−8 it is compared with: on the average
            # the requested multiple of 2^−16
            low, rest = divmod(self.call.dropout, 256)
            least = torch.randint(256, (*shape[:2], 1), generator=generator, device=drawn.device) < rest
            factors = self.workspace(f"kept{index}", shape)  # a product takes a tenth of a masked_fill
            drawn_masks.append(torch.ge(drawn, least.to(torch.uint8) + low, out=factors))
        return drawn_masks

    def forward(
        self, chunk: QueryChunk, generator: torch.Generator | None, kept: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What the chunk's queries get, in their order, (g, m, d).

        Args:
            kept: where to put the probabilities, if the backward is not to compute them again.
        """
        content = self.rows_of(self.content, chunk)
        query = content if self.query is None else self.rows_of(self.query, chunk)
        buffer = self.probabilities(chunk, content, query)
        if kept is not None:
            kept.append(buffer.clone())
        for index, factors in enumerate(self.dropout_factors(chunk, generator)):
            chunk.skewed(buffer, index).mul_(factors)
        out = None
        for index, (begin, count) in enumerate(chunk.key_ranges):
            weights = self.as_operand(chunk.skewed(buffer, index), "pairs0")
            part = torch.bmm(weights, self.value[:, begin : begin + count])
            out = part if out is None else out.add_(part)
        if self.V is not None:
            for begin, end, left, right, row in self.bands(chunk, self.V, self.call.terms.tails_V):
                _gather_tails(buffer, begin, end, left, right)
                rows = self.V[:, row : row + right - left]
                if self.V.shape[0] == 1:
                    out += torch.mm(buffer.flatten(0, 1)[:, left:right], rows[0]).view(out.shape)
                else:
                    out += torch.bmm(buffer[:, :, left:right], rows)
        if generator is not None:
            out /= self.call.keep_probability
        return out.flip(1)

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
            d_out: gradient of what `forward` gave, for all queries, (g, L, d).
            probabilities: what `forward` kept for the chunk, or None.
        """
        terms = self.call.terms
        content = self.rows_of(self.content, chunk)
        query = content if self.query is None else self.rows_of(self.query, chunk)
        d_out = self.rows_of(d_out, chunk)
        if generator is not None:
            d_out /= self.call.keep_probability
        if probabilities is None:
            weights = self.probabilities(chunk, content, query)
        else:
            weights = self.buffer("scores", chunk).copy_(probabilities)
        kept = self.dropout_factors(chunk, generator)
        buffer = self.buffer("gradients", chunk)
        if self.V is not None:
            self.table_product(buffer, chunk, d_out, self.V, terms.tails_V)
        skewed_scalars, mean = [], 0.0  # Σ_j α_ij ∂α_ij
        for index, (begin, count) in enumerate(chunk.key_ranges):
            skewed, weight = (
                chunk.skewed(buffer, index),
                self.as_operand(chunk.skewed(weights, index), f"weights{index}"),
            )
            scores = self.workspace(f"pairs{index}", skewed.shape) if self.separate_buffers else skewed
            values = self.value[:, begin : begin + count].transpose(1, 2)
            scores.baddbmm_(d_out, values, beta=float(self.V is not None and not self.separate_buffers))
            if self.V is not None and self.separate_buffers:
                scores.add_(skewed)
            if kept:
                scores.mul_(kept[index])
            products = torch.mul(scores, weight, out=self.workspace("products", scores.shape))
            mean = mean + products.sum(-1, keepdim=True)
            skewed_scalars.append((skewed, scores, weight))
        d_content = None
        for index, (begin, count) in enumerate(chunk.key_ranges):
            skewed, scores, weight = skewed_scalars[index]
            scores.sub_(mean).mul_(weight)  # in this order: where a weight is near 1 the difference is near 0
            if kept:
                weight.mul_(kept[index])
                if self.separate_buffers and self.V is not None:
                    chunk.skewed(weights, index).copy_(weight)
            if (
                chunk.has_empty_rows and self.allow is None
            ):  # their weights are not zero, and no score of theirs matters
                scores.masked_fill_(self.masked(chunk, index), 0.0)
            if self.separate_buffers:
                skewed.copy_(scores)
            keys = self.key[:, begin : begin + count]
            part = torch.bmm(scores, keys)
            d_content = part if d_content is None else d_content.add_(part)
            _add_product(total.value[:, begin : begin + count], weight.transpose(1, 2), d_out)
            _add_product(total.key[:, begin : begin + count], scores.transpose(1, 2), content, terms.scale)
            if self.B is not None:
                self.key_side_gradients(scores, chunk, index, total.key, self.of_heads(total.B))
            if total.dense is not None:
                into = total.dense[self.row if total.dense.shape[0] > 1 else 0]
                into = self.of_heads(into)[:, chunk.first : chunk.first + chunk.rows, begin : begin + count]
                into += scores.flip(1).sum(0, keepdim=True) if into.shape[0] == 1 else scores.flip(1)
        d_content = d_content * terms.scale
        if self.V is not None:
            self.table_gradients(weights, chunk, d_out, self.V, terms.tails_V, self.of_heads(total.V))
        chunk.fill_gaps(buffer, 0.0)
        if self.c is not None:
            diagonals = buffer.sum(1, dtype=total.c.dtype)  # (g, W)
            into = self.of_heads(total.c)
            for index, at in enumerate(chunk.begins):
                first, width = self.window(chunk, index)
                part = diagonals[:, at : at + width]
                into[:, first : first + width] += part.sum(0, keepdim=True) if into.shape[0] == 1 else part
        rows = slice(chunk.first, chunk.first + chunk.rows)
        if self.A is not None:
            by_table = self.table_gradients(buffer, chunk, query, self.A, terms.tails_A, self.of_heads(total.A))
            if self.query is None:
                d_content = d_content + by_table
            else:
                total.query[self.row, self.heads, rows] = by_table.flip(1)
        total.content[self.row, self.heads, rows] = d_content.flip(1)


class Gradients:
    """What the backward fills: gradients like the inputs, summed in float32 at least; key and value of one group."""

    def __init__(self, inputs: Inputs, needs_dense: bool, gaps: bool):
        self.content = (torch.zeros_like if gaps else torch.empty_like)(inputs.content)
        self.query = None if inputs.query is inputs.content else torch.zeros_like(inputs.query)
        tables = (inputs.A, inputs.B, inputs.c, inputs.V)
        self.A, self.B, self.c, self.V = (None if table is None else zeros_like_sum(table) for table in tables)
        self.dense = zeros_like_sum(inputs.dense) if needs_dense else None

    def start_group(self, group: HeadGroup) -> None:
        """Zeros for the key and value of another group."""
        self.key, self.value = zeros_like_sum(group.key), zeros_like_sum(group.value)

    def of_terms(self, inputs: Inputs) -> list[torch.Tensor | None]:
        """Those of A, B, c, V and dense, in the dtypes of these."""
        names = ("A", "B", "c", "V", "dense")
        sums = (getattr(self, name) for name in names)
        return [
            None if total is None else total.to(getattr(inputs, name).dtype)
            for name, total in zip(names, sums, strict=True)
        ]


def zeros_like_sum(like: torch.Tensor) -> torch.Tensor:
    """Zeros of that shape to add to, in float32 at least."""
    precise = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=precise, device=like.device)


def _gather_tails(buffer: torch.Tensor, begin: int, end: int, left: int, right: int) -> None:
    """Add the columns from `begin` to `left` to that at `left`, and those from `right` to `end` to that before."""
    if left > begin:
        buffer[:, :, left] += buffer[:, :, begin:left].sum(-1)
    if end > right:
        buffer[:, :, right - 1] += buffer[:, :, right:end].sum(-1)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> None:
    """total += alpha · left · right, matrices or batches of them; `total` may be more precise than these."""
    if total.dtype == left.dtype:
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(left, right, alpha=alpha)
    else:
        total.add_(torch.matmul(left, right), alpha=alpha)
