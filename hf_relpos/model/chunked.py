"""Attention in chunks: relative terms at nearly the price of absolute attention, in memory linear in the length.

For one chunk, some heads and some queries, all that is relative is a few matrix products, because the skew is an
affine address. Let X be the products of m queries with the W = n + m − 1 rows of A that they and n keys can ask for:
`X[h, i', x]`, one buffer with rows of W numbers, and let the queries stand in it last first. Query i' and key j then
meet at row x = i' + j of the table, that is at address i'·W + i' + j = i'·(W + 1) + j: the same buffer, read with
rows of W + 1 numbers, *is* q·A by pairs. No gather, no copy. The content product is added to that view in place; what
it does not cover, one gap between any two of its rows, is set to −inf, so that one softmax over the whole buffer is
the softmax of every row, with zeros in the gaps. Read with rows of W again these zeros make the value term one product
with V. The key side is the same with keys and queries exchanged, key block by key block.

The backward computes the chunk's probabilities again, and writes the gradients of the scores through the same view:
then the buffer times A is the gradient of q, q times the buffer that of A, and its column sums are that of c. All
gradients are exact, every sum has a fixed order, and nothing is kept from the forward but its inputs.
Dropout is replayed from a seed.

Buffers are kept between calls, since fresh pages cost as much as the arithmetic (`release_workspace` frees them).
Plain PyTorch throughout; the second derivative is left out (`once_differentiable`): `eager` has it.
"""

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.autograd.function import once_differentiable

from .lowering import NormalForm


# Numbers in the largest buffer of a chunk, and queries of a chunk: by measurement, on a core with 1 MB of L2.
BUFFER = 1 << 19
QUERIES = 128
# Keys of a block on the key side, whose products cost (KEYS + queries − 1) / queries of what is used of them.
KEYS = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# The same on other devices, where a launch costs more than a cache: all heads of a row of BERT-base in one go.
DEVICE_BUFFER = 1 << 24
DEVICE_QUERIES = 1024

_local = threading.local()


def _workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer of this thread, with whatever was last written to it."""
    if device.type != "cpu":  # PyTorch keeps memory of other devices itself, stream by stream
        return torch.empty(shape, dtype=dtype, device=device)
    buffers = _local.__dict__.setdefault("buffers", {})
    count = 1
    for size in shape:
        count *= size
    flat = buffers.get((name, dtype))
    if flat is None or flat.numel() < count:
        buffers.pop((name, dtype), None)
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            flat = buffers[name, dtype] = torch.empty(count, dtype=dtype)
    return flat[:count].view(shape)


def release_workspace() -> None:
    """Free the buffers that this thread keeps between calls: a few MB, more for rows of many thousands of tokens."""
    _local.__dict__.pop("buffers", None)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16; without them those of float32 are faster."""
    told = getattr(torch.cpu, "get_capabilities", dict)()  # older releases of PyTorch do not tell
    return not told or any(told.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True)
class Call:
    """What one call is, besides tensors with gradients.

    Attributes:
        form: the terms; its tensors are not read.
        start: place of the first query among the keys.
        mask: boolean (1 or B, 1 or H, L, K), True: may attend; or None.
        causal: whether a query sees no key after its own place; only without a mask.
        allow: boolean (H or 1, P), what the scheme lets through by offset; or None.
        dropout: probability of dropping an attention weight, in units of 2^−16.
        seed: of the dropout.
        ends: of every row, how many of its queries are wanted; None for all.
    """

    form: NormalForm
    start: int = 0
    mask: torch.Tensor | None = None
    causal: bool = False
    allow: torch.Tensor | None = None
    dropout: int = 0
    seed: int = 0
    ends: tuple[int, ...] | None = None

    @property
    def kept(self) -> float:
        """The probability of keeping a weight."""
        return 1.0 - self.dropout / 65536


def chunked_attention(
    content: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: NormalForm,
    start: int = 0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    ends: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """`formula.attend` of the normal form, without the weights.

    Args:
        content: q̂ + u, (B, H, L, d), one of `DTYPES`, on other devices also float16; the others likewise.
        query: q̂, (B, H, L, d), for A; `content` itself where there is no u.
        key: k̂, (B, H, K, d).
        value: (B, H, K, d); of another width, if there is no V.
        start: place of the first query among the keys.
        mask: boolean, broadcastable to (B, H, L, K), True: may attend. Rows with no visible key average all keys.
        causal: hide keys after the query's own place. A mask says so itself.
        dropout: probability of dropping an attention weight, rounded to a multiple of 2^−16, at most 1 − 2^−8.
        ends: of every row, how many queries are wanted, the first ones; the others get zeros. None for all.

    Returns:
        (B, L, H, d), contiguous.
    """
    dtype = content.dtype
    if dtype == torch.bfloat16 and content.device.type == "cpu" and not _multiplies_bfloat16():
        same = query is content
        content, key, value = content.float(), key.float(), value.float()
        query = content if same else query.float()
        tables = {name: getattr(form, name) for name in ("A", "B", "c", "V", "dense")}
        form = replace(form, **{name: None if table is None else table.float() for name, table in tables.items()})
    drop = round(dropout * 65536)
    call = Call(
        form=replace(form, A=None, B=None, c=None, V=None, allow=None, dense=None),
        start=start,
        mask=mask,
        causal=causal,
        allow=form.allow,
        dropout=drop,
        seed=int(torch.randint(1 << 62, ())) if drop else 0,
        ends=ends,
    )
    out = _Chunked.apply(content, query, key, value, form.A, form.B, form.c, form.V, form.dense, call)
    return out.to(dtype)


@dataclass(frozen=True)
class Strip:
    """m queries, last first, and the ranges of keys that any of them sees; and where their scores stand in a buffer.

    Attributes:
        first: the first of the queries.
        rows: m.
        pieces: (first key, number of keys n) of every range.
        begins: where the numbers of each range begin in a row of the buffer.
        width: W, the sum of n + m − 1 over the ranges.
        hides: whether the mask may hide any pair of them.
        dead: whether one of the queries may see no key at all.
    """

    first: int
    rows: int
    pieces: tuple[tuple[int, int], ...]
    begins: tuple[int, ...]
    width: int
    hides: bool
    dead: bool

    def skewed(self, buffer: torch.Tensor, piece: int) -> torch.Tensor:
        """The pairs of that range, (g, m, n), in a buffer (g, m, W)."""
        heads, rows, width = buffer.shape
        return buffer.as_strided(
            (heads, rows, self.pieces[piece][1]),
            (rows * width, width + 1, 1),
            buffer.storage_offset() + self.begins[piece],
        )

    def fill_gaps(self, buffer: torch.Tensor, value: float) -> None:
        """Set what is no pair."""
        heads, rows, width = buffer.shape
        strides = (rows * width, width + 1, 1)
        for place, (begin, (_, count)) in enumerate(zip(self.begins, self.pieces, strict=True)):
            last = place == len(self.pieces) - 1
            shape = (heads, rows - 1, rows) if last else (heads, rows, rows - 1)
            buffer.as_strided(shape, strides, buffer.storage_offset() + begin + count).fill_(value)


def _strip(first: int, rows: int, pieces: list[tuple[int, int]], hides: bool, dead: bool) -> Strip:
    begins, width = [], 0
    for _, count in pieces:
        begins.append(width)
        width += count + rows - 1
    return Strip(first, rows, tuple(pieces), tuple(begins), width, hides, dead)


def _may_look(device: torch.device) -> bool:
    """Whether the contents of a mask may decide what is computed: elsewhere that would be to wait for the device."""
    return device.type == "cpu"


def _runs(seen: torch.Tensor, gap: int) -> list[tuple[int, int]]:
    """First place and length of every run of True in a vector; runs less than `gap` places apart are one."""
    edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    runs = []
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if runs and begin - runs[-1][1] < gap:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    return [(begin, end - begin) for begin, end in runs]


def _schedule(call: Call, row: int, length: int, keys: int, device: torch.device) -> list[Strip]:
    """The strips of one row of the batch: keys that no query of a strip sees are not there."""
    mask = None if call.mask is None else call.mask[row if call.mask.shape[0] > 1 else 0]  # (1 or H, L, K)
    constant = mask is not None and (mask.stride(1) == 0 or mask.shape[1] == 1)  # the same for every query: padding
    strips, step = [], QUERIES if device.type == "cpu" else DEVICE_QUERIES
    length = length if call.ends is None else call.ends[row]
    for first in range(0, length, step):
        rows = min(step, length - first)
        if mask is None:
            reach = min(keys, call.start + first + rows) if call.causal else keys
            strips.append(_strip(first, rows, [(0, reach)], False, False))
            continue
        if not _may_look(device):
            strips.append(_strip(first, rows, [(0, keys)], True, True))
            continue
        visible = mask[:, :1] if constant else mask[:, first : first + rows]
        dead = not bool(visible.any(-1).all())
        pieces = [(0, keys)] if dead else _runs(visible.flatten(0, 1).any(0), rows)
        hides = dead or not all(bool(visible[..., begin : begin + count].all()) for begin, count in pieces)
        strips.append(_strip(first, rows, pieces, hides, dead))
    return strips


class _Group:
    """Some heads of one row of the batch: their keys and values, and the products of one strip at a time."""

    def __init__(self, call: Call, row: int, heads: slice, content, query, key, value, A, B, c, V, dense):
        self.call, self.row, self.heads = call, row, heads
        self.content, self.query = content[row, heads], None if query is content else query[row, heads]
        self.key, self.value = key[row, heads].contiguous(), value[row, heads].contiguous()  # (g, K, d)
        self.count, self.keys, self.size = self.key.shape
        self.A, self.B, self.c, self.V = (self.of_heads(table) for table in (A, B, c, V))
        self.allow = self.of_heads(call.allow)
        self.dense = None if dense is None else self.of_heads(dense[row if dense.shape[0] > 1 else 0])
        self.blocks = {}
        # products of bfloat16 are slow, one head at a time, where they read or write through a skewed view
        self.apart = key.dtype == torch.bfloat16 and key.device.type == "cpu"
        self.identity = torch.eye(KEYS, dtype=key.dtype) if B is not None and self.apart else None

    def of_heads(self, table: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a table, (H or 1, …), that belongs to these heads."""
        return table if table is None or table.shape[0] == 1 else table[self.heads]

    def window(self, strip: Strip, piece: int) -> tuple[int, int]:
        """First row, and number of rows, of the tables that the pairs of a range ask for."""
        begin, count = strip.pieces[piece]
        last = self.call.start + strip.first + strip.rows - 1
        return begin - last - self.call.form.low, count + strip.rows - 1

    def rows_of(self, tensor: torch.Tensor, strip: Strip) -> torch.Tensor:
        """The strip's rows, last first, contiguous, of a tensor (g, L, …)."""
        return tensor[:, strip.first : strip.first + strip.rows].flip(1).contiguous()

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer of that shape, of the dtype of the keys if no other is given."""
        return _workspace(name, shape, self.key.dtype if dtype is None else dtype, self.key.device)

    def buffer(self, name: str, strip: Strip) -> torch.Tensor:
        """(g, m, W)."""
        return self.workspace(name, (self.count, strip.rows, strip.width))

    def by_pairs(self, skewed: torch.Tensor, name: str) -> torch.Tensor:
        """The pairs of a skewed view, (g, m, n), as products should read them: a copy where that is faster."""
        return self.workspace(name, skewed.shape).copy_(skewed) if self.apart else skewed

    # By the offset: a product with a table, and its gradients --------------------------------------------------------

    def bands(
        self, strip: Strip, table: torch.Tensor, tails: tuple[int, int]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """For every range of a strip: where its columns begin and end in the buffer; the columns between which the
        table's rows differ, first and last; and the row of the table at the first of these."""
        for piece, begin in enumerate(strip.begins):
            first, width = self.window(strip, piece)
            left = min(max(tails[0] - 1 - first, 0), width - 1)
            right = min(max(table.shape[1] - tails[1] - first, left), width - 1)
            yield begin, begin + width, begin + left, begin + right + 1, first + left

    def table_product(self, buffer, strip, vectors, table, tails) -> None:
        """buffer = vectors · tableᵀ, the vectors being (g, m, d)."""
        for begin, end, left, right, row in self.bands(strip, table, tails):
            rows = table[:, row : row + right - left].transpose(1, 2)
            if table.shape[0] == 1:
                buffer.flatten(0, 1)[:, left:right].addmm_(vectors.flatten(0, 1), rows[0], beta=0)
            else:
                buffer[:, :, left:right].baddbmm_(vectors, rows, beta=0)
            if left > begin:
                buffer[:, :, begin:left] = buffer[:, :, left : left + 1]
            if end > right:
                buffer[:, :, right:end] = buffer[:, :, right - 1 : right]

    def table_gradients(self, buffer, strip, vectors, table, tails, total) -> torch.Tensor:
        """Add bufferᵀ · vectors to `total`, like the table; return buffer · table, (g, m, d). Spoils the buffer."""
        result = None
        for begin, end, left, right, row in self.bands(strip, table, tails):
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

    def key_blocks(self, strip: Strip, piece: int) -> Iterator[tuple[int, int, int]]:
        """(first key, number of blocks, keys of a block): blocks of `KEYS` keys, and what is left of the range."""
        begin, count = strip.pieces[piece]
        blocks = count // KEYS
        if blocks:
            yield begin, blocks, KEYS
        if count % KEYS:
            yield begin + blocks * KEYS, 1, count % KEYS

    def block_keys(self, begin: int, blocks: int, size: int) -> torch.Tensor:
        """Those keys, (blocks, g · size, d) for a table that all heads share, else (g, blocks, size, d)."""
        if (begin, blocks, size) not in self.blocks:
            keys = self.key[:, begin : begin + blocks * size].view(self.count, blocks, size, self.size)
            if self.B.shape[0] == 1:
                keys = keys.transpose(0, 1).reshape(blocks, self.count * size, self.size)
            self.blocks[begin, blocks, size] = keys
        return self.blocks[begin, blocks, size]

    def block_rows(self, strip: Strip, begin: int, blocks: int, size: int) -> tuple[torch.Tensor, int]:
        """The rows of B that every block asks for, (H or 1, blocks, w, d), w = size + m − 1; and the first of all."""
        first = begin - (self.call.start + strip.first + strip.rows - 1) - self.call.form.low
        table = self.B
        shape = (table.shape[0], blocks, size + strip.rows - 1, self.size)
        strides = (table.stride(0), size * self.size, self.size, 1)
        return table.as_strided(shape, strides, table.storage_offset() + first * self.size), first

    def key_buffer(self, strip: Strip, blocks: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer for k · Bᵀ, (blocks, g, size, w) for a shared table, else (g, blocks, size, w); and its pairs,
        (g, m, blocks, size)."""
        width = size + strip.rows - 1
        shared = self.B.shape[0] == 1
        lead = (blocks, self.count) if shared else (self.count, blocks)
        buffer = self.workspace("keys", (*lead, size, width))
        by_head, by_block = (buffer.stride(1), buffer.stride(0)) if shared else (buffer.stride(0), buffer.stride(1))
        pairs = buffer.as_strided((self.count, strip.rows, blocks, size), (by_head, 1, by_block, width + 1))
        return buffer, pairs

    def add_key_side(self, scores: torch.Tensor, strip: Strip, piece: int) -> None:
        """scores (g, m, n) += k_j · B_p."""
        at = 0
        for begin, blocks, size in self.key_blocks(strip, piece):
            keys, (rows, _) = self.block_keys(begin, blocks, size), self.block_rows(strip, begin, blocks, size)
            buffer, pairs = self.key_buffer(strip, blocks, size)
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
                    by_key = self.by_pairs(pairs[:, :, block].transpose(1, 2), "block")
                    into[:, :, block].baddbmm_(by_key.transpose(1, 2), identity)
            at += blocks * size

    def key_side_gradients(self, scores: torch.Tensor, strip: Strip, piece: int, d_key, d_B) -> None:
        """From the gradient of the scores (g, m, n): add to those of the keys (g, K, d) and of B."""
        at = 0
        for begin, blocks, size in self.key_blocks(strip, piece):
            keys, (rows, first) = self.block_keys(begin, blocks, size), self.block_rows(strip, begin, blocks, size)
            buffer, pairs = self.key_buffer(strip, blocks, size)
            given = scores[:, :, at : at + blocks * size].unflatten(2, (blocks, size))
            if self.identity is None:
                pairs.copy_(given)
            else:
                identity = self.identity[:size, :size].expand(self.count, -1, -1)
                for block in range(blocks):
                    by_key = torch.bmm(identity, given[:, :, block].transpose(1, 2))
                    pairs[:, :, block].copy_(by_key.transpose(1, 2))
            width = buffer.shape[-1]
            gaps = (buffer.shape[0] * buffer.shape[1], size - 1, size)
            buffer.as_strided(gaps, (size * width, width + 1, 1), strip.rows).zero_()
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

    # A strip ---------------------------------------------------------------------------------------------------------

    def hidden(self, strip: Strip, piece: int) -> torch.Tensor | None:
        """The pairs of a range that the mask hides, broadcastable to (g, m, n), or None."""
        if not strip.hides:
            return None
        begin, count = strip.pieces[piece]
        mask = self.call.mask[self.row if self.call.mask.shape[0] > 1 else 0]
        mask = self.of_heads(mask)[:, :, begin : begin + count]
        if mask.shape[1] == 1 or mask.stride(1) == 0:
            return ~mask[:, :1]
        return ~mask[:, strip.first : strip.first + strip.rows].flip(1)

    def late(self, scores: torch.Tensor, strip: Strip, piece: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For a causal call: the columns of `scores` where some keys are later than the query, and these pairs."""
        begin, count = strip.pieces[piece]
        own = self.call.start + strip.first - begin  # the column of the first query's own place
        if not self.call.causal or own + 1 >= count:
            return None
        from_column = max(own, 0)
        place = torch.arange(from_column - own, count - own, device=scores.device)
        pairs = place > torch.arange(strip.rows - 1, -1, -1, device=scores.device)[:, None]
        return scores[:, :, from_column:], pairs

    def allowed(self, strip: Strip, piece: int) -> torch.Tensor | None:
        """What the scheme lets through, (g or 1, m, n); a view in which all rows overlap."""
        if self.allow is None:
            return None
        first, _ = self.window(strip, piece)
        return self.by_pair(self.allow, first, strip.rows, strip.pieces[piece][1])

    @staticmethod
    def by_pair(rows: torch.Tensor, first: int, queries: int, keys: int) -> torch.Tensor:
        """Scalars by offset, (h, P), as scalars by pair, (h, m, n): the entry of row i' and column j is i' + j on."""
        rows = rows.contiguous()
        strides = (rows.stride(0), 1, 1)
        return rows.as_strided((rows.shape[0], queries, keys), strides, rows.storage_offset() + first)

    def probabilities(self, strip: Strip, content: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """softmax of the scores, in a buffer (g, m, W) with zeros in its gaps."""
        buffer = self.buffer("scores", strip)
        lowest = torch.finfo(buffer.dtype).min
        filled = self.A is not None
        if filled:
            self.table_product(buffer, strip, query, self.A, self.call.form.tails_A)
        for piece, (begin, count) in enumerate(strip.pieces):
            scores = strip.skewed(buffer, piece)
            first, width = self.window(strip, piece)
            if self.c is not None:
                if filled:
                    at = strip.begins[piece]
                    buffer[:, :, at : at + width] += self.c[:, None, first : first + width]
                else:
                    scores.copy_(self.by_pair(self.c, first, strip.rows, count))
            keys = self.key[:, begin : begin + count].transpose(1, 2)
            other = filled or self.c is not None
            into = self.workspace("pairs0", scores.shape) if self.apart else scores
            into.baddbmm_(content, keys, beta=float(other and not self.apart), alpha=self.call.form.scale)
            if self.B is not None:
                self.add_key_side(into, strip, piece)
            if self.apart:
                scores.add_(into) if other else scores.copy_(into)
            if self.dense is not None:
                scores += self.rows_of(self.dense, strip)[:, :, begin : begin + count]
            hidden, late, allowed = (
                self.hidden(strip, piece),
                self.late(scores, strip, piece),
                self.allowed(strip, piece),
            )
            if hidden is not None:
                scores.masked_fill_(hidden, lowest)
            if late is not None:
                late[0].masked_fill_(late[1], lowest)
            if allowed is not None:
                scores.masked_fill_(~allowed, lowest)
        strip.fill_gaps(buffer, -torch.inf)
        torch.softmax(buffer, dim=-1, out=buffer)
        if self.allow is not None:  # a query that may attend to nothing gets zeros
            for piece in range(len(strip.pieces)):
                scores = strip.skewed(buffer, piece)
                scores.masked_fill_(~self.allowed(strip, piece), 0.0)
                hidden, late = self.hidden(strip, piece), self.late(scores, strip, piece)
                if hidden is not None:
                    scores.masked_fill_(hidden, 0.0)
                if late is not None:
                    late[0].masked_fill_(late[1], 0.0)
        return buffer

    def kept(self, strip: Strip, generator: torch.Generator | None) -> list[torch.Tensor]:
        """1 for pairs to keep and 0 for those to drop, (g, m, n) for every range: the generator's next numbers."""
        if generator is None:
            return []
        found = []
        for piece, (_, count) in enumerate(strip.pieces):
            shape = (self.count, strip.rows, count)
            total = self.count * strip.rows * count
            words = self.workspace("bits", (-(-total // 8),), torch.int64)
            words.random_(-(1 << 63), None, generator=generator)
            drawn = words.view(torch.uint8)[:total].view(shape)
            # a byte for each weight, and for each query which multiple of 2^−8 it is compared with: on the average
            # the multiple of 2^−16 that was asked for
            low, rest = divmod(self.call.dropout, 256)
            least = torch.randint(256, (*shape[:2], 1), generator=generator, device=drawn.device) < rest
            factors = self.workspace(f"kept{piece}", shape)  # a product takes a tenth of a masked_fill
            found.append(torch.ge(drawn, least.to(torch.uint8) + low, out=factors))
        return found

    def forward(self, strip: Strip, generator: torch.Generator | None) -> torch.Tensor:
        """What the strip's queries get, in their order, (g, m, d)."""
        content = self.rows_of(self.content, strip)
        query = content if self.query is None else self.rows_of(self.query, strip)
        buffer = self.probabilities(strip, content, query)
        for piece, factors in enumerate(self.kept(strip, generator)):
            strip.skewed(buffer, piece).mul_(factors)
        out = None
        for piece, (begin, count) in enumerate(strip.pieces):
            weights = self.by_pairs(strip.skewed(buffer, piece), "pairs0")
            part = torch.bmm(weights, self.value[:, begin : begin + count])
            out = part if out is None else out.add_(part)
        if self.V is not None:
            for begin, end, left, right, row in self.bands(strip, self.V, self.call.form.tails_V):
                _gather_tails(buffer, begin, end, left, right)
                rows = self.V[:, row : row + right - left]
                if self.V.shape[0] == 1:
                    out += torch.mm(buffer.flatten(0, 1)[:, left:right], rows[0]).view(out.shape)
                else:
                    out += torch.bmm(buffer[:, :, left:right], rows)
        if generator is not None:
            out /= self.call.kept
        return out.flip(1)

    def backward(self, strip: Strip, generator: torch.Generator | None, d_out, total: "_Gradients") -> None:
        """Add the strip's share to all gradients.

        Args:
            d_out: gradient of what `forward` gave, for all queries, (g, L, d).
        """
        form = self.call.form
        content = self.rows_of(self.content, strip)
        query = content if self.query is None else self.rows_of(self.query, strip)
        d_out = self.rows_of(d_out, strip)
        if generator is not None:
            d_out /= self.call.kept
        weights = self.probabilities(strip, content, query)
        kept = self.kept(strip, generator)
        buffer = self.buffer("gradients", strip)
        if self.V is not None:
            self.table_product(buffer, strip, d_out, self.V, form.tails_V)
        by_pair, mean = [], 0.0  # Σ_j α_ij ∂α_ij
        for piece, (begin, count) in enumerate(strip.pieces):
            skewed, weight = (
                strip.skewed(buffer, piece),
                self.by_pairs(strip.skewed(weights, piece), f"weights{piece}"),
            )
            scores = self.workspace(f"pairs{piece}", skewed.shape) if self.apart else skewed
            values = self.value[:, begin : begin + count].transpose(1, 2)
            scores.baddbmm_(d_out, values, beta=float(self.V is not None and not self.apart))
            if self.V is not None and self.apart:
                scores.add_(skewed)
            if kept:
                scores.mul_(kept[piece])
            products = torch.mul(scores, weight, out=self.workspace("products", scores.shape))
            mean = mean + products.sum(-1, keepdim=True)
            by_pair.append((skewed, scores, weight))
        d_content = None
        for piece, (begin, count) in enumerate(strip.pieces):
            skewed, scores, weight = by_pair[piece]
            scores.sub_(mean).mul_(weight)  # in this order: where a weight is near 1 the difference is near 0
            if kept:
                weight.mul_(kept[piece])
                if self.apart and self.V is not None:
                    strip.skewed(weights, piece).copy_(weight)
            if strip.dead and self.allow is None:  # their weights are not zero, and no score of theirs matters
                scores.masked_fill_(self.hidden(strip, piece), 0.0)
            if self.apart:
                skewed.copy_(scores)
            keys = self.key[:, begin : begin + count]
            part = torch.bmm(scores, keys)
            d_content = part if d_content is None else d_content.add_(part)
            _add_product(total.value[:, begin : begin + count], weight.transpose(1, 2), d_out)
            _add_product(total.key[:, begin : begin + count], scores.transpose(1, 2), content, form.scale)
            if self.B is not None:
                self.key_side_gradients(scores, strip, piece, total.key, self.of_heads(total.B))
            if total.dense is not None:
                into = total.dense[self.row if total.dense.shape[0] > 1 else 0]
                into = self.of_heads(into)[:, strip.first : strip.first + strip.rows, begin : begin + count]
                into += scores.flip(1).sum(0, keepdim=True) if into.shape[0] == 1 else scores.flip(1)
        d_content = d_content * form.scale
        if self.V is not None:
            self.table_gradients(weights, strip, d_out, self.V, form.tails_V, self.of_heads(total.V))
        strip.fill_gaps(buffer, 0.0)
        if self.c is not None:
            diagonals = buffer.sum(1, dtype=total.c.dtype)  # (g, W)
            into = self.of_heads(total.c)
            for piece, at in enumerate(strip.begins):
                first, width = self.window(strip, piece)
                part = diagonals[:, at : at + width]
                into[:, first : first + width] += part.sum(0, keepdim=True) if into.shape[0] == 1 else part
        place = slice(strip.first, strip.first + strip.rows)
        if self.A is not None:
            by_table = self.table_gradients(buffer, strip, query, self.A, form.tails_A, self.of_heads(total.A))
            if self.query is None:
                d_content = d_content + by_table
            else:
                total.query[self.row, self.heads, place] = by_table.flip(1)
        total.content[self.row, self.heads, place] = d_content.flip(1)


class _Gradients:
    """What the backward fills: gradients like the inputs, summed in float32 at least; key and value of one group."""

    def __init__(self, content, query, A, B, c, V, dense, needs_dense, gaps):
        self.content = (torch.zeros_like if gaps else torch.empty_like)(content)
        self.query = None if query is content else torch.zeros_like(query)
        self.A, self.B, self.c, self.V = (None if table is None else _zeros(table) for table in (A, B, c, V))
        self.dense = _zeros(dense) if needs_dense else None
        self.key = self.value = None


def _zeros(like: torch.Tensor) -> torch.Tensor:
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


def _groups(heads: int, keys: int, queries: int, device: torch.device) -> list[slice]:
    """Heads, so many at a time that their buffer stays near `BUFFER`."""
    most, step = (BUFFER, QUERIES) if device.type == "cpu" else (DEVICE_BUFFER, DEVICE_QUERIES)
    rows = min(queries, step)
    count = max(1, min(heads, most // (rows * (keys + rows - 1))))
    count = -(-heads // -(-heads // count))  # alike in size
    return [slice(first, min(first + count, heads)) for first in range(0, heads, count)]


class _Chunked(torch.autograd.Function):
    """`chunked_attention`."""

    @staticmethod
    def forward(ctx, content, query, key, value, A, B, c, V, dense, call):
        batch, heads, length, _ = content.shape
        keys = key.shape[2]
        tables = tuple(None if table is None else table.contiguous() for table in (A, B, c, V))
        inputs = (content, query, key, value, *tables, dense)
        new = content.new_empty if call.ends is None else content.new_zeros
        out = new(batch, length, heads, value.shape[3])
        generator = torch.Generator(content.device).manual_seed(call.seed) if call.dropout else None
        with torch.autocast(content.device.type, enabled=False):
            for row in range(batch):
                strips = _schedule(call, row, length, keys, content.device)
                for group_heads in _groups(heads, keys, length, content.device):
                    group = _Group(call, row, group_heads, *inputs)
                    for strip in strips:
                        place = out[row, strip.first : strip.first + strip.rows, group_heads]
                        place.copy_(group.forward(strip, generator).transpose(0, 1))
        ctx.save_for_backward(*inputs)
        ctx.same, ctx.call = query is content, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        inputs, call = list(ctx.saved_tensors), ctx.call
        content, query, key, value, A, B, c, V, dense = inputs
        query = content if ctx.same else query
        inputs[1] = query
        batch, heads, length, _ = content.shape
        keys = key.shape[2]
        total = _Gradients(content, query, A, B, c, V, dense, ctx.needs_input_grad[8], call.ends is not None)
        d_key, d_value = torch.empty_like(key), torch.empty_like(value)
        generator = torch.Generator(content.device).manual_seed(call.seed) if call.dropout else None
        with torch.autocast(content.device.type, enabled=False):
            for row in range(batch):
                strips = _schedule(call, row, length, keys, content.device)
                for group_heads in _groups(heads, keys, length, content.device):
                    group = _Group(call, row, group_heads, *inputs)
                    total.key, total.value = _zeros(group.key), _zeros(group.value)
                    for strip in strips:
                        group.backward(strip, generator, d_out[row, :, group_heads].transpose(0, 1), total)
                    d_key[row, group_heads], d_value[row, group_heads] = total.key, total.value
        tables = [
            None if sum_ is None else sum_.to(table.dtype)
            for sum_, table in zip((total.A, total.B, total.c, total.V, total.dense), (A, B, c, V, dense), strict=True)
        ]
        return total.content, total.query, d_key, d_value, *tables, None
