"""Attention with Toeplitz terms as PyTorch operators, which the compiler and CUDA graphs can handle.

`hf_relpos::attention` and its backward divide the work into chunks and launch the kernels of tiles.py. A chunk is some
pairs (batch, head) and, for long inputs, some queries, so that its pair matrices fit into `WORKSPACE`. Nothing waits
for the device, and nothing of size L·K outlives a call. Triton is imported when a kernel first runs.

Under a sliding window, a chunk has only the keys that its queries see, and its pair matrices hold only the offsets
within the window. So time and memory grow linearly with the length.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


# Bytes for the pair matrices of a chunk.
WORKSPACE = 256 << 20
# TILE is the largest tile: pair matrices have multiples of it as rows and columns. MARGIN numbers lie before and after
# the matrices.
TILE, MARGIN = 128, 512
LOG2E = math.log2(math.e)
SIZES = (16, 32, 64, 128)  # head sizes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRID = 65535  # largest number of programs along the second and third axis of a launch


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a kernel's tiles (queries and keys, or rows of a table), and its options for Triton."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


# Keys are (kernel, whether numbers have 16 bits, whether heads are larger than 64). The tiles were chosen for sm_90 by
# registers and spills (tests/test_kernels.py); bench_gpu.py measures others. "backward_many" is for at least two of B,
# V and dropout. One kernel may read in whole tiles what another writes in whole tiles: columns of table_apply divide
# those of backward, and rows of backward and forward divide those of table_product.
TILES = {
    ("forward", True, False): Tile(128, 64, 8, 3),
    ("forward", True, True): Tile(128, 64, 8, 2),
    ("forward", False, False): Tile(32, 32, 4, 2),
    ("forward", False, True): Tile(32, 32, 8, 1),
    ("backward", True, False): Tile(128, 64, 8, 2),
    ("backward", True, True): Tile(64, 64, 8, 2),
    ("backward", False, False): Tile(32, 32, 8, 1),
    ("backward", False, True): Tile(32, 32, 8, 1),
    ("backward_many", True, False): Tile(64, 64, 8, 2),
    ("backward_many", True, True): Tile(32, 64, 8, 1),
    ("backward_many", False, False): Tile(32, 32, 8, 1),
    ("backward_many", False, True): Tile(32, 32, 8, 1),
    ("table_product", True, False): Tile(128, 64, 4, 1),
    ("table_product", True, True): Tile(128, 64, 8, 1),
    ("table_product", False, False): Tile(32, 32, 4, 1),
    ("table_product", False, True): Tile(32, 32, 4, 1),
    ("table_apply", True, False): Tile(64, 64, 4, 2),
    ("table_apply", True, True): Tile(64, 64, 8, 2),
    ("table_apply", False, False): Tile(32, 32, 4, 1),
    ("table_apply", False, True): Tile(32, 32, 4, 1),
    ("table_gradient", True, False): Tile(64, 64, 4, 2),
    ("table_gradient", True, True): Tile(64, 64, 8, 2),
    ("table_gradient", False, False): Tile(32, 32, 4, 1),
    ("table_gradient", False, True): Tile(32, 32, 4, 1),
}


def tile(kernel: str, size: int, dtype: torch.dtype) -> Tile:
    """Return the tile of `kernel` for heads of that size."""
    return TILES[kernel, dtype.itemsize == 2, size > 64]


def scratch(count: int, like: torch.Tensor) -> torch.Tensor:
    """Allocate `count` numbers without initialising them."""
    return like.new_empty(count)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class PairMatrices:
    """Matrices of numbers by row and column, one per pair (batch, head). The n-th begins at n · `stride`.

    Rows are `ld` numbers apart, a multiple of the largest tile, so that tiles are aligned in memory and whole.

    Args:
        offsets: number of offsets to which the pairs are limited; None means no limit.
    """

    def __init__(self, count: int, rows: int, columns: int, like: torch.Tensor, offsets: int | None = None):
        self.ld, whole = numbers_per_row(columns, offsets), _up(columns, TILE)
        self.stride = _up(rows, TILE) * self.ld + (whole if self.ld < whole else 0)
        self.memory = scratch(count * self.stride + 2 * MARGIN, like)[MARGIN:]


def numbers_per_row(columns: int, offsets: int | None = None) -> int:
    """Return how far apart the rows of a pair matrix are in memory. Arguments are those of `PairMatrices`.

    A tile that meets the pairs reaches less than two tiles past them on either side. Within that reach, no number of
    one row shares its address with a number of another row.
    """
    whole = _up(columns, TILE)
    return whole if offsets is None else min(whole, _up(offsets + 4 * TILE - 5, TILE))


def _bytes_per_row(matrices: int, numbers: int, itemsize: int) -> int:
    return max(matrices, 1) * numbers * itemsize


def chunks(pairs: int, length: int, row_bytes: int, together: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first pair, number of pairs, first query, last query + 1) of every chunk, whatever the contents.

    Args:
        row_bytes: bytes of one row in all pair matrices of a pair.
        together: number of pairs that share their matrices.
    """
    whole = _up(length, TILE) * row_bytes
    rows = length if whole <= WORKSPACE else max(WORKSPACE // row_bytes // TILE, 1) * TILE
    count = min(together * max(WORKSPACE // whole, 1), pairs, GRID)
    for row in range(0, length, rows):
        for first in range(0, pairs, count):
            yield first, min(count, pairs - first), row, min(row + rows, length)


class Chunk(NamedTuple):
    """Some pairs (batch, head), some queries, and the keys that they see.

    Attributes:
        first: first pair.
        count: number of pairs.
        row: first query.
        end: last query + 1.
        key: first key.
        key_end: last key + 1.
    """

    first: int
    count: int
    row: int
    end: int
    key: int
    key_end: int

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.end - self.row

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.key_end - self.key

    def by_query(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk's queries of a tensor (…, …, L, …)."""
        return tensor[:, :, self.row : self.end]

    def by_key(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk's keys of a tensor (…, …, K, …)."""
        return tensor[:, :, self.key : self.key_end]


def _launch(name: str, grid: tuple[int, ...], how: Tile | None, **arguments) -> None:
    from . import tiles

    options = {} if how is None else {"num_warps": how.warps, "num_stages": how.stages}
    getattr(tiles, name)[grid](**arguments, **options)


def _strides(prefix: str, tensor: torch.Tensor, letters: str) -> dict[str, int]:
    return {f"{prefix}_{letter}": step for letter, step in zip(letters, tensor.stride(), strict=False)}


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@torch.compiler.assume_constant_result
def precision(device: torch.device) -> str:
    """Return the precision of float32 products on the device, under the name that `tl.dot` gives it."""
    # `allow_tf32` raises if anyone, such as Transformers' Trainer, has set the newer `fp32_precision`
    fast = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if fast else "ieee"


def is_mask_of_keys(mask: torch.Tensor) -> bool:
    """Whether a mask (1 or B, 1 or H, 1 or L, K) is the same for every query, without reading it."""
    return mask.shape[2] == 1 or mask.stride(2) == 0


class Rows:
    """A table, (H or 1, N, …), as kernels read it.

    Args:
        index: row of each offset, int32 (P,); None if every offset has its own row.
    """

    def __init__(self, table: torch.Tensor, index: torch.Tensor | None = None):
        self.table = table.contiguous()
        self.index = None if index is None else index.contiguous()
        self.offsets = table.shape[1] if index is None else index.shape[0]

    def arguments(self, flipped: bool) -> dict:
        """Return the arguments for `table_product` and `table_apply`. With `flipped`, offsets count from the last."""
        table, index, step = self.table, self.index, self.table.shape[-1]
        if flipped and index is None:
            table, step = table[:, -1:], -step
        elif flipped and index is not None:
            index = index[-1:]
        return {
            "table": table,
            "index": index,
            "table_h": _by_head(self.table),
            "table_x": step,
            "index_x": -1 if flipped else 1,
        }

    def gradient(self, by_offset: torch.Tensor) -> torch.Tensor:
        """Return the gradient in the table's shape and dtype, given the gradient by offset, (H, P, …)."""
        if self.table.shape[0] == 1:
            by_offset = by_offset.sum(0, keepdim=True)
        if self.index is not None:  # CUDA sorts the indices, so the order of the sum is fixed
            total = by_offset.new_zeros(self.table.shape[1], *by_offset.transpose(0, 1).shape[1:])
            total.index_put_((self.index.long(),), by_offset.transpose(0, 1), accumulate=True)
            by_offset = total.transpose(0, 1)
        return by_offset.to(self.table.dtype)


NO_TABLE = {"table": None, "index": None, "table_h": 0, "table_x": 0, "index_x": 0}


def _by_head(table: torch.Tensor) -> int:
    """Return the step from head to head; 0 if the heads share the table."""
    return table.stride(0) if table.shape[0] > 1 else 0


class Call:
    """One call: inputs as kernels take them, and the launches that forward and backward share.

    Args:
        content: q̂ + u, (B, H, L, d).
        query: q̂, for A; None if it is `content`.
        mask: boolean (1 or B, 1 or H, 1 or L, K), or None.
        seed: seed of the dropout, int64, one number; or None.
        dropout: probability in units of 2^−16.
        index_A: as in `Rows`; likewise index_B and index_V.
        window: first and last offset j − i − start that counts, or None.
        rest: output of attention to other keys, (B, L, H, d), or None.
        rest_lse: log-sum-exp of the other keys, (B, H, L), or None.
    """

    def __init__(
        self,
        content,
        query,
        key,
        value,
        A,
        B,
        c,
        V,
        index_A,
        index_B,
        index_V,
        mask,
        seed,
        start,
        scale,
        causal,
        dropout,
        window=None,
        rest=None,
        rest_lse=None,
    ):
        self.content, self.key, self.value = (_rows_contiguous(x) for x in (content, key, value))
        self.query = self.content if query is None else _rows_contiguous(query)
        self.A, self.B, self.c, self.V = (
            None if table is None else Rows(table, index)
            for table, index in ((A, index_A), (B, index_B), (c, None), (V, index_V))
        )
        self.batch, self.heads, self.length, self.size = content.shape
        self.keys, self.pairs = key.shape[2], self.batch * self.heads
        self.start, self.scale, self.causal = start, scale, causal
        self.seed, self.dropout = (seed, dropout) if dropout else (None, 0)
        self.window = None if window is None else tuple(window)
        self.rest = None if rest is None else _rows_contiguous(rest).transpose(1, 2)
        self.rest_lse = None if rest_lse is None else rest_lse.contiguous()
        self.dtype = content.dtype
        self.precision = precision(content.device)
        self.mask = self.visible_keys = None
        self.by_key, self.mask_strides = False, dict.fromkeys(("mask_b", "mask_h", "mask_i"), 0)
        if mask is not None:
            mask = _rows_contiguous(mask)
            self.by_key = mask.shape[2] == 1
            steps = (step if many > 1 else 0 for step, many in zip(mask.stride()[:3], mask.shape[:3], strict=True))
            self.mask_strides = dict(zip(self.mask_strides, steps, strict=True))
            self.mask = mask.view(torch.uint8)
            if self.by_key:
                number = torch.arange(1, self.keys + 1, device=mask.device, dtype=torch.int32)
                visible_keys = (mask[:, :, 0].any(1) * number).amax(-1).to(torch.int32)
                self.visible_keys = visible_keys.expand(self.batch).contiguous()

    @property
    def offsets(self) -> int | None:
        """Number of offsets in the window; None without a window."""
        return None if self.window is None else self.window[1] - self.window[0] + 1

    def chunks(self, matrices: int, together: int = 1) -> list[Chunk]:
        """Return the chunks of a pass that holds `matrices` pair matrices per pair; see the function `chunks`."""
        row_bytes = _bytes_per_row(matrices, numbers_per_row(self.keys, self.offsets), self.dtype.itemsize)
        plan = chunks(self.pairs, self.length, row_bytes, together)
        return [Chunk(first, count, row, end, *self.seen(row, end)) for first, count, row, end in plan]

    def seen(self, row: int, end: int) -> tuple[int, int]:
        """Return the first key, rounded down to a tile, and the last key + 1 that those queries see by the window."""
        if self.window is None:
            return 0, self.keys
        low, high = (self.start + offset for offset in self.window)
        return max(row + low, 0) // TILE * TILE, min(end + high, self.keys)

    def band(self, chunk: Chunk, flipped: bool = False) -> dict[str, int]:
        """Return the offsets between rows and columns of a chunk that count. With `flipped`, rows are keys."""
        if self.window is None:
            return {"low": 0, "high": 0}
        low, high = (self.start + chunk.row - chunk.key + offset for offset in self.window)
        return {"low": -high, "high": -low} if flipped else {"low": low, "high": high}

    def shift(self, chunk: Chunk, flipped: bool = False) -> int:
        """Return the number that turns column − row into a row of a table.

        With `flipped`, rows are keys, and rows of the table count from the last one.
        """
        place = chunk.row - chunk.key
        return self.keys - 1 + place if flipped else self.length - 1 - place

    def matrices(self, chunk: Chunk, count: int | None = None, flipped: bool = False) -> PairMatrices:
        """Allocate pair matrices of a chunk. With `flipped`, rows are keys."""
        rows, columns = (chunk.keys, chunk.queries) if flipped else (chunk.queries, chunk.keys)
        return PairMatrices(chunk.count if count is None else count, rows, columns, self.content, self.offsets)

    def common(self, chunk: Chunk) -> dict:
        """Return the arguments that `forward` and `backward` share, except bias matrices."""
        content, key, value = chunk.by_query(self.content), chunk.by_key(self.key), chunk.by_key(self.value)
        mask, visible_keys = self.mask, self.visible_keys
        if mask is not None:
            mask = (mask if self.by_key else chunk.by_query(mask))[..., chunk.key : chunk.key_end]
        if visible_keys is not None and chunk.key:
            visible_keys = visible_keys - chunk.key
        return {
            "content": content,
            "key": key,
            "value": value,
            "mask": mask,
            "visible_keys": visible_keys,
            "seed": self.seed,
            "first": chunk.first,
            "batch": self.batch,
            "heads": self.heads,
            "R": chunk.queries,
            "K": chunk.keys,
            "start": self.start + chunk.row - chunk.key,
            "row0": chunk.row,
            "key0": chunk.key,
            **self.band(chunk),
            "scale": self.scale * LOG2E,
            "dropout": self.dropout,
            **_strides("content", content, "bhi"),
            **_strides("key", key, "bhj"),
            **_strides("value", value, "bhj"),
            **self.mask_strides,
            "D": self.size,
            "CAUSAL": self.causal,
            "BAND": self.window is not None,
            "BY_KEY": self.by_key,
            "PRECISION": self.precision,
        }

    def product(self, out, chunk, rows, table, scalars, factor, heads=None, flipped=False) -> None:
        """Launch `table_product` for rows (B, H, R, d). Where tiles go beyond the rows, it writes finite numbers.

        Args:
            heads: (first head, number of heads), if the product is by head and not by pair.
        """
        how = tile("table_product", self.size, self.dtype)
        either = table if table is not None else scalars
        R, columns = rows.shape[2], _up(chunk.queries if flipped else chunk.keys, TILE)
        first, count = heads or (chunk.first, chunk.count)
        _launch(
            "table_product",
            (-(-(self.offsets or columns + how.rows - 1) // how.columns), -(-R // how.rows), count),
            how,
            rows=None if table is None else rows,
            scalars=None if scalars is None else scalars.table,
            out=out.memory,
            first=first,
            batch=self.batch if heads is None else 1,
            R=R,
            C=columns,
            P=either.offsets,
            shift=self.shift(chunk, flipped),
            factor=factor,
            **self.band(chunk, flipped),
            **_strides("rows", rows, "bhi"),
            **(NO_TABLE if table is None else table.arguments(flipped)),
            scalars_h=0 if scalars is None else _by_head(scalars.table),
            scalars_x=1,
            ld=out.ld,
            out_n=out.stride,
            D=self.size,
            BM=how.rows,
            BX=how.columns,
            BAND=self.window is not None,
            PRECISION=self.precision,
        )

    def apply(self, matrix, chunk, out, dense, table, initial, factor=1.0, flipped=False):
        """Launch `table_apply` with the result in `out`, (B, H, R, d)."""
        how, R = tile("table_apply", self.size, self.dtype), out.shape[2]
        _launch(
            "table_apply",
            (-(-R // how.rows), chunk.count),
            how,
            matrix=matrix.memory,
            dense=dense,
            initial=initial,
            out=out,
            first=chunk.first,
            batch=self.batch,
            R=R,
            C=chunk.queries if flipped else chunk.keys,
            P=0 if table is None else table.offsets,
            shift=self.shift(chunk, flipped),
            factor=factor,
            **self.band(chunk, flipped),
            **_strides("dense", self.key if dense is None else dense, "bhj"),
            **(NO_TABLE if table is None else table.arguments(flipped)),
            **_strides("initial", out if initial is None else initial, "bhi"),
            **_strides("out", out, "bhi"),
            ld=matrix.ld,
            matrix_n=matrix.stride,
            D=self.size,
            BM=how.rows,
            BX=how.columns,
            BAND=self.window is not None,
            PRECISION=self.precision,
        )

    def biases(self, chunk: Chunk) -> tuple[dict, dict]:
        """Compute the bias matrices of a chunk. Return those by query and those by key, as arguments."""
        query = chunk.by_query(self.query)
        by_query = {"bias": None, "bias_n": 0, "bias_h": 0, "ld": 0}
        if self.A is not None:
            made = self.matrices(chunk)
            self.product(made, chunk, query, self.A, self.c, LOG2E)
            by_query = {"bias": made.memory, "bias_n": made.stride, "bias_h": 0, "ld": made.ld}
        elif self.c is not None:  # the same for every row of the batch
            head, last = chunk.first // self.batch, (chunk.first + chunk.count - 1) // self.batch
            number = last - head + 1 if self.c.table.shape[0] > 1 else 1
            made = self.matrices(chunk, number)
            self.product(made, chunk, query, None, self.c, LOG2E, heads=(head, number))
            by_query |= {"bias": made.memory, "bias_h": made.stride if number > 1 else 0, "ld": made.ld}
        by_key = {"key_bias": None, "key_bias_n": 0, "key_ld": 0}
        if self.B is not None:
            made = self.matrices(chunk, flipped=True)
            self.product(made, chunk, chunk.by_key(self.key), self.B, None, LOG2E, flipped=True)
            by_key = {"key_bias": made.memory, "key_bias_n": made.stride, "key_ld": made.ld}
        return by_query, by_key

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (B, L, H, d) and the log-sum-exp of the scores to base 2, (B, H, L)."""
        out = self.content.new_empty(self.batch, self.length, self.heads, self.size)
        lse = self.content.new_empty(self.batch, self.heads, self.length, dtype=torch.float32)
        by_head, how = out.transpose(1, 2), tile("forward", self.size, self.dtype)
        content_only = torch.empty_like(by_head, dtype=torch.float32) if self.V is not None else by_head
        matrices = sum(table is not None for table in (self.A, self.B, self.V))
        for chunk in self.chunks(matrices, 1 if matrices else self.batch):
            by_query, by_key = self.biases(chunk)
            weights = None if self.V is None else self.matrices(chunk)
            into, rest, rest_lse = (
                None if tensor is None else chunk.by_query(tensor)
                for tensor in (content_only, self.rest, self.rest_lse)
            )
            _launch(
                "forward",
                (-(-chunk.queries // how.rows), chunk.count),
                how,
                **self.common(chunk),
                **by_query,
                **by_key,
                rest=rest,
                rest_lse=rest_lse,
                out=into,
                lse=chunk.by_query(lse),
                weights=None if weights is None else weights.memory,
                **_strides("rest", into if rest is None else rest, "bhi"),
                **_strides("out", into, "bhi"),
                **_strides("lse", lse, "bh"),
                weights_n=0 if weights is None else weights.stride,
                weights_ld=0 if weights is None else weights.ld,
                BM=how.rows,
                BN=how.columns,
                EVEN=chunk.queries % how.rows == 0 and chunk.keys % how.columns == 0,
            )
            if weights is not None:
                self.apply(weights, chunk, chunk.by_query(by_head), None, self.V, into)
        return out, lse

    def backward(self, d_out, out, lse, with_u: bool) -> list[torch.Tensor | None]:
        """Return the gradients of content, query (None without u), key, value, A, B, c and V."""
        d_out, out = _rows_contiguous(d_out).transpose(1, 2), out.transpose(1, 2)
        delta = torch.empty_like(lse)
        _launch(
            "products",
            (-(-self.length // TILE), self.heads, self.batch),
            None,
            out=out,
            d_out=d_out,
            delta=delta,
            R=self.length,
            **_strides("out", out, "bhi"),
            **_strides("d_out", d_out, "bhi"),
            **_strides("delta", delta, "bh"),
            D=self.size,
            BM=TILE,
        )
        has_B, has_V = self.B is not None, self.V is not None
        plan = self.chunks(1 + (self.A is not None or self.c is not None) + 2 * has_B + 2 * has_V)
        several = any(chunk.row for chunk in plan)
        sums = torch.float32 if several or has_B else self.dtype
        shape = (self.batch, self.keys, self.heads, self.size)  # the layout of projections' results
        # with a window, there may be keys that no query sees, and chunks of queries have different keys
        new = self.key.new_empty if self.window is None else self.key.new_zeros
        d_key, d_value = (new(shape, dtype=sums).transpose(1, 2) for _ in range(2))
        shape = (self.batch, self.length, self.heads, self.size)
        d_content = self.content.new_empty(shape).transpose(1, 2)
        d_query = self.content.new_empty(shape).transpose(1, 2) if with_u and self.A is not None else None
        total = {letter: self.parts(getattr(self, letter)) for letter in ("A", "B", "c", "V")}
        many = has_B + has_V + bool(self.dropout) > 1
        how = tile("backward_many" if many else "backward", self.size, self.dtype)
        for chunk in plan:
            by_query, by_key = self.biases(chunk)
            gradient, into_key, into_value = chunk.by_query(d_out), chunk.by_key(d_key), chunk.by_key(d_value)
            d_scores = self.matrices(chunk)
            d_by_key = self.matrices(chunk, flipped=True) if has_B else None
            weights = self.matrices(chunk) if has_V else None
            by_value = self.matrices(chunk) if has_V else None
            if by_value is not None:
                self.product(by_value, chunk, gradient, self.V, None, 1.0)
                by_query["ld"] = by_value.ld
            _launch(
                "backward",
                (-(-chunk.keys // how.columns), chunk.count),
                how,
                **self.common(chunk),
                **by_query,
                **by_key,
                value_bias=None if by_value is None else by_value.memory,
                value_bias_n=0 if by_value is None else by_value.stride,
                d_out=gradient,
                lse=chunk.by_query(lse),
                delta=chunk.by_query(delta),
                d_key=into_key,
                d_value=into_value,
                d_scores=d_scores.memory,
                d_scores_by_key=None if d_by_key is None else d_by_key.memory,
                weights=None if weights is None else weights.memory,
                factor=self.scale,
                **_strides("d_out", gradient, "bhi"),
                **_strides("lse", lse, "bh"),
                **_strides("d_key", d_key, "bhj"),
                d_scores_n=d_scores.stride,
                d_scores_ld=d_scores.ld,
                by_key_n=0 if d_by_key is None else d_by_key.stride,
                by_key_ld=0 if d_by_key is None else d_by_key.ld,
                BM=how.rows,
                BN=how.columns,
                EVEN=chunk.queries % how.rows == 0 and chunk.keys % how.columns == 0,
                ADD=chunk.row > 0,
            )
            into, query = chunk.by_query(d_content), chunk.by_query(self.query)
            table = None if with_u else self.A
            self.apply(d_scores, chunk, into, chunk.by_key(self.key), table, None, self.scale)
            if d_query is not None:
                self.apply(d_scores, chunk, chunk.by_query(d_query), None, self.A, None)
            if self.A is not None or self.c is not None:
                self.gradient(d_scores, chunk, query, total["A"], total["c"])
            if weights is not None:
                self.gradient(weights, chunk, gradient, total["V"], None)
            if d_by_key is not None:
                self.apply(d_by_key, chunk, into_key, None, self.B, into_key, flipped=True)
                self.gradient(d_by_key, chunk, chunk.by_key(self.key), total["B"], None, flipped=True)
        if with_u and d_query is None:
            d_query = torch.zeros_like(d_content)
        tables = [self.summed(total[letter], getattr(self, letter), letter == "B") for letter in ("A", "B", "c", "V")]
        return [d_content, d_query, d_key.to(self.dtype), d_value.to(self.dtype), *tables]

    @property
    def splits(self) -> int:
        """Number of parts of the batch for a table's gradient: there must be enough programs for a large device."""
        blocks = -(-(self.offsets or self.length + self.keys) // 64) * self.heads
        return max(1, min(self.batch, 4, -(-512 // blocks)))

    def parts(self, rows: Rows | None) -> torch.Tensor | None:
        """Return zeros for the parts of a table's gradient by offset, (H · splits, P, …)."""
        if rows is None:
            return None
        shape = (self.heads * self.splits, rows.offsets, *rows.table.shape[2:])
        return rows.table.new_zeros(shape, dtype=torch.float32)

    def gradient(self, matrix, chunk, rows, out, out_scalars, flipped=False) -> None:
        """Launch `table_gradient` for rows (B, H, R, d); it adds to the parts."""
        how, R = tile("table_gradient", self.size, self.dtype), rows.shape[2]
        columns, band = chunk.queries if flipped else chunk.keys, self.band(chunk, flipped)
        begin, end = -_up(R, how.columns), columns
        if self.window is not None:
            begin, end = band["low"] // how.columns * how.columns, band["high"] + 1
        head, last = chunk.first // self.batch, (chunk.first + chunk.count - 1) // self.batch
        _launch(
            "table_gradient",
            (-(-(end - begin) // how.columns), last - head + 1, self.splits),
            how,
            matrix=matrix.memory,
            rows=rows,
            out=out,
            out_scalars=out_scalars,
            first=chunk.first,
            count=chunk.count,
            batch=self.batch,
            R=R,
            C=columns,
            P=(out if out is not None else out_scalars).shape[1],
            shift=self.shift(chunk, flipped),
            begin=begin,
            splits=self.splits,
            **band,
            **_strides("rows", rows, "bhi"),
            ld=matrix.ld,
            matrix_n=matrix.stride,
            D=self.size,
            BI=how.rows,
            BX=how.columns,
            BAND=self.window is not None,
            PRECISION=self.precision,
        )

    def summed(self, parts, rows: Rows | None, flipped: bool) -> torch.Tensor | None:
        """Return the table's gradient, the sum of its parts."""
        if rows is None:
            return None
        parts = parts.unflatten(0, (self.heads, self.splits)).sum(1)
        return rows.gradient(parts.flip(1) if flipped else parts)


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@torch.library.custom_op("hf_relpos::attention", mutates_args=())
def attention(
    content: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    A: torch.Tensor | None,
    B: torch.Tensor | None,
    c: torch.Tensor | None,
    V: torch.Tensor | None,
    index_A: torch.Tensor | None,
    index_B: torch.Tensor | None,
    index_V: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    start: int,
    scale: float,
    causal: bool,
    dropout: int,
    window: Sequence[int] | None = None,
    rest: torch.Tensor | None = None,
    rest_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, L, H, d) and each row's log-sum-exp, log₂ Σ 2^score, (B, H, L).

    Rows that see no key get zeros.

    Args:
        content: q̂ + u, (B, H, L, d), with a dtype of `DTYPES` and d of `SIZES`. key and value are (B, H, K, d).
        query: q̂, for A; None if it is `content`.
        A: s·A, (H or 1, L + K − 1, d), row 0 for offset 1 − L − start, as in `ToeplitzTerms`. Likewise B and V, and c,
            (H or 1, L + K − 1), in which −∞ hides an offset.
        index_A: row of each offset, int32 (L + K − 1,). A may then have any number of rows. Likewise index_B and
            index_V.
        mask: boolean (1 or B, 1 or H, 1 or L, K); True means that the query may attend to the key.
        seed: int64, one number on the device; only with dropout.
        start: index of the first query among the keys.
        dropout: probability of dropping a weight, in units of 2^−16.
        window: first and last offset j − i − start that counts; None means all.
        rest: output of attention to other keys, (B, L, H, d), finite. The result then includes these keys.
        rest_lse: log-sum-exp of the other keys, like the second result; −∞ for a query that sees none of them.
    """
    with _on(content):
        inputs = (content, query, key, value, A, B, c, V, index_A, index_B, index_V, mask, seed)
        return Call(*inputs, start, scale, causal, dropout, window, rest, rest_lse).forward()


@attention.register_fake
def _(content, *others, **defaults):
    batch, heads, length, size = content.shape
    out = content.new_empty(batch, length, heads, size)
    return out, content.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("hf_relpos::attention_backward", mutates_args=())
def attention_backward(
    d_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    content: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    A: torch.Tensor | None,
    B: torch.Tensor | None,
    c: torch.Tensor | None,
    V: torch.Tensor | None,
    index_A: torch.Tensor | None,
    index_B: torch.Tensor | None,
    index_V: torch.Tensor | None,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    start: int,
    scale: float,
    causal: bool,
    dropout: int,
    window: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Return the gradients of content, query, key, value, A, B, c and V, without those that are None."""
    with _on(content):
        inputs = (content, query, key, value, A, B, c, V, index_A, index_B, index_V, mask, seed)
        call = Call(*inputs, start, scale, causal, dropout, window)
        gradients = call.backward(d_out, out, lse, query is not None)
    return [gradient for gradient in gradients if gradient is not None]


@attention_backward.register_fake
def _(d_out, out, lse, content, query, key, value, A, B, c, V, *others, **defaults):
    by_head = (
        (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2))
        for x in (content, query, key, value)
        if x is not None
    )
    return [*by_head, *(x.new_empty(x.shape) for x in (A, B, c, V) if x is not None)]


def _setup(ctx, inputs, output):
    *tensors, ctx.start, ctx.scale, ctx.causal, ctx.dropout, ctx.window, rest, rest_lse = inputs
    ctx.save_for_backward(*output, rest, rest_lse, *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_lse):
    if d_out is None:
        return (None,) * 20
    out, lse, rest, rest_lse, *tensors = ctx.saved_tensors
    given = (ctx.start, ctx.scale, ctx.causal, ctx.dropout, ctx.window)
    gradients = iter(attention_backward(d_out, out, lse, *tensors, *given))
    by_input = [None if tensor is None else next(gradients) for tensor in tensors[:8]]
    return (*by_input, *[None] * 10, *_gradients_of_rest(d_out, out, lse, rest, rest_lse))


def _gradients_of_rest(d_out, out, lse, rest, rest_lse):
    """Return the gradients of `rest` and `rest_lse`."""
    if rest is None:
        return None, None
    share = torch.exp2(rest_lse - lse).transpose(1, 2)  # fraction of all weights, (B, L, H)
    d_lse = share * ((rest.float() - out.float()) * d_out.float()).sum(-1) / LOG2E
    return (share[..., None] * d_out).to(rest.dtype), d_lse.transpose(1, 2)


attention.register_autograd(_gradients, setup_context=_setup)
