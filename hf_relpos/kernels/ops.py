"""Attention of Toeplitz terms as operators of PyTorch, which the compiler and CUDA graphs see through.

`hf_relpos::attention` and its backward plan the work, chunk by chunk, and launch the kernels of tiles.py. A chunk is
some pairs (batch, head) and, for long inputs, some queries: as much as its pair matrices fit into `WORKSPACE`. Nothing
waits for the device, and nothing of size L·K outlives a call. Triton is imported when a kernel first runs.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


# Bytes for the pair matrices of a chunk.
WORKSPACE = 256 << 20
# Rows and columns of pair matrices come in these, the largest tile there is; numbers before and after the matrices.
TILE, MARGIN = 128, 512
LOG2E = math.log2(math.e)
SIZES = (16, 32, 64, 128)  # of heads
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRID = 65535  # programs along the second and third axis of a launch, at most


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: rows and columns of a tile (of queries and keys, or of rows of a table), and for Triton."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


# By (kernel, whether numbers are of 16 bits, whether heads are above 64): chosen for sm_90 by registers and spills
# (tests/test_kernels.py); scripts/bench_gpu.py measures others. "backward_many" is for two of B, V and dropout.
# What one kernel writes whole another may read whole: columns of table_apply divide those of backward, and rows of
# backward and forward those of table_product.
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
    """How `kernel` is cut for heads of that size."""
    return TILES[kernel, dtype.itemsize == 2, size > 64]


def scratch(count: int, like: torch.Tensor) -> torch.Tensor:
    """That many numbers, with whatever was in that memory."""
    return like.new_empty(count)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class PairMatrices:
    """Numbers by row and column, and pair (batch, head): the n-th matrix begins at n · `stride`.

    Rows are `ld` numbers apart, a multiple of the largest tile, so that tiles are aligned in memory and whole.
    """

    def __init__(self, count: int, rows: int, columns: int, like: torch.Tensor):
        self.ld = _up(columns, TILE)
        self.stride = _up(rows, TILE) * self.ld
        self.memory = scratch(count * self.stride + 2 * MARGIN, like)[MARGIN:]


def _bytes_per_row(matrices: int, keys: int, itemsize: int) -> int:
    return max(matrices, 1) * _up(keys, TILE) * itemsize


def chunks(pairs: int, length: int, row_bytes: int, together: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """(first pair, number of pairs, first query, last query + 1) of every chunk, the same for any contents.

    Args:
        row_bytes: of one row of all the pair matrices that a pair has.
        together: how many pairs share theirs.
    """
    whole = _up(length, TILE) * row_bytes
    rows = length if whole <= WORKSPACE else max(WORKSPACE // row_bytes // TILE, 1) * TILE
    count = min(together * max(WORKSPACE // whole, 1), pairs, GRID)
    for row in range(0, length, rows):
        for first in range(0, pairs, count):
            yield first, min(count, pairs - first), row, min(row + rows, length)


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
    """Of products of float32 there, as `tl.dot` calls it."""
    # `allow_tf32` raises once anyone, Transformers' Trainer for one, has chosen by the newer `fp32_precision`
    fast = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if fast else "ieee"


def is_mask_of_keys(mask: torch.Tensor) -> bool:
    """Whether a mask (1 or B, 1 or H, 1 or L, K) is the same for every query, without reading it."""
    return mask.shape[2] == 1 or mask.stride(2) == 0


class Rows:
    """A table, (H or 1, N, …), as kernels read it.

    Args:
        index: the row of each offset, int32 (P,); None where there is a row for each.
    """

    def __init__(self, table: torch.Tensor, index: torch.Tensor | None = None):
        self.table = table.contiguous()
        self.index = None if index is None else index.contiguous()
        self.offsets = table.shape[1] if index is None else index.shape[0]

    def arguments(self, flipped: bool) -> dict:
        """For `table_product` and `table_apply`; with `flipped`, offsets are counted from the last one."""
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
        """Like the table, from one by offset, (H, P, …)."""
        if self.table.shape[0] == 1:
            by_offset = by_offset.sum(0, keepdim=True)
        if self.index is not None:  # sorted on CUDA devices, and so added up in a fixed order
            total = by_offset.new_zeros(self.table.shape[1], *by_offset.transpose(0, 1).shape[1:])
            total.index_put_((self.index.long(),), by_offset.transpose(0, 1), accumulate=True)
            by_offset = total.transpose(0, 1)
        return by_offset.to(self.table.dtype)


NO_TABLE = {"table": None, "index": None, "table_h": 0, "table_x": 0, "index_x": 0}


def _by_head(table: torch.Tensor) -> int:
    """The step from head to head."""
    return table.stride(0) if table.shape[0] > 1 else 0


class Call:
    """One call: inputs as kernels take them, and the launches that forward and backward share.

    Args:
        content: q̂ + u, (B, H, L, d).
        query: q̂, for A; None where it is `content`.
        mask: boolean (1 or B, 1 or H, 1 or L, K), or None.
        seed: of the dropout, int64, one number, or None.
        dropout: in units of 2^−16.
        index_A: as `Rows.index`, likewise those of B and V.
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

    def common(self, first: int, row: int, end: int) -> dict:
        """What `forward` and `backward` both take, but bias matrices."""
        content = self.content[:, :, row:end]
        return {
            "content": content,
            "key": self.key,
            "value": self.value,
            "mask": None if self.mask is None else self.mask if self.by_key else self.mask[:, :, row:end],
            "visible_keys": self.visible_keys,
            "seed": self.seed,
            "first": first,
            "batch": self.batch,
            "heads": self.heads,
            "R": end - row,
            "K": self.keys,
            "start": self.start + row,
            "row0": row,
            "scale": self.scale * LOG2E,
            "dropout": self.dropout,
            **_strides("content", content, "bhi"),
            **_strides("key", self.key, "bhj"),
            **_strides("value", self.value, "bhj"),
            **self.mask_strides,
            "D": self.size,
            "CAUSAL": self.causal,
            "BY_KEY": self.by_key,
            "PRECISION": self.precision,
        }

    def product(self, out, first, count, rows, table, scalars, columns, shift, factor, batch, flipped=False) -> None:
        """`table_product` of that many pairs, rows (B, H, R, d); also where tiles go beyond them, finite numbers."""
        how = tile("table_product", self.size, self.dtype)
        either = table if table is not None else scalars
        R, columns = rows.shape[2], _up(columns, TILE)
        _launch(
            "table_product",
            (-(-(columns + how.rows - 1) // how.columns), -(-R // how.rows), count),
            how,
            rows=None if table is None else rows,
            scalars=None if scalars is None else scalars.table,
            out=out.memory,
            first=first,
            batch=batch,
            R=R,
            C=columns,
            P=either.offsets,
            shift=shift,
            factor=factor,
            **_strides("rows", rows, "bhi"),
            **(NO_TABLE if table is None else table.arguments(flipped)),
            scalars_h=0 if scalars is None else _by_head(scalars.table),
            scalars_x=1,
            ld=out.ld,
            out_n=out.stride,
            D=self.size,
            BM=how.rows,
            BX=how.columns,
            PRECISION=self.precision,
        )

    def apply(self, matrix, first, count, out, columns, dense, table, initial, shift, factor=1.0, flipped=False):
        """`table_apply` into `out`, (B, H, R, d)."""
        how, R = tile("table_apply", self.size, self.dtype), out.shape[2]
        _launch(
            "table_apply",
            (-(-R // how.rows), count),
            how,
            matrix=matrix.memory,
            dense=dense,
            initial=initial,
            out=out,
            first=first,
            batch=self.batch,
            R=R,
            C=columns,
            P=0 if table is None else table.offsets,
            shift=shift,
            factor=factor,
            **_strides("dense", self.key if dense is None else dense, "bhj"),
            **(NO_TABLE if table is None else table.arguments(flipped)),
            **_strides("initial", out if initial is None else initial, "bhi"),
            **_strides("out", out, "bhi"),
            ld=matrix.ld,
            matrix_n=matrix.stride,
            D=self.size,
            BM=how.rows,
            BX=how.columns,
            PRECISION=self.precision,
        )

    def biases(self, first: int, count: int, row: int, end: int) -> tuple[dict, dict]:
        """Bias matrices of a chunk as arguments: those by query, and those by key."""
        query, shift = self.query[:, :, row:end], self.length - 1 - row
        by_query = {"bias": None, "bias_n": 0, "bias_h": 0, "ld": 0}
        if self.A is not None:
            made = PairMatrices(count, end - row, self.keys, self.content)
            self.product(made, first, count, query, self.A, self.c, self.keys, shift, LOG2E, self.batch)
            by_query = {"bias": made.memory, "bias_n": made.stride, "bias_h": 0, "ld": made.ld}
        elif self.c is not None:  # the same for every row of the batch
            head, last = first // self.batch, (first + count - 1) // self.batch
            number = last - head + 1 if self.c.table.shape[0] > 1 else 1
            made = PairMatrices(number, end - row, self.keys, self.content)
            self.product(made, head, number, query, None, self.c, self.keys, shift, LOG2E, 1)
            by_query |= {"bias": made.memory, "bias_h": made.stride if number > 1 else 0, "ld": made.ld}
        by_key = {"key_bias": None, "key_bias_n": 0, "key_ld": 0}
        if self.B is not None:
            made = PairMatrices(count, self.keys, end - row, self.content)
            shift = self.keys - 1 + row
            self.product(made, first, count, self.key, self.B, None, end - row, shift, LOG2E, self.batch, flipped=True)
            by_key = {"key_bias": made.memory, "key_bias_n": made.stride, "key_ld": made.ld}
        return by_query, by_key

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, L, H, d) and log₂ Σ exp₂ of the scores, (B, H, L)."""
        out = self.content.new_empty(self.batch, self.length, self.heads, self.size)
        lse = self.content.new_empty(self.batch, self.heads, self.length, dtype=torch.float32)
        by_head, how = out.transpose(1, 2), tile("forward", self.size, self.dtype)
        content_only = torch.empty_like(by_head, dtype=torch.float32) if self.V is not None else by_head
        matrices = sum(table is not None for table in (self.A, self.B, self.V))
        shared = matrices == 0
        row_bytes = _bytes_per_row(matrices, self.keys, self.dtype.itemsize)
        for first, count, row, end in chunks(self.pairs, self.length, row_bytes, self.batch if shared else 1):
            R = end - row
            by_query, by_key = self.biases(first, count, row, end)
            weights = None if self.V is None else PairMatrices(count, R, self.keys, self.content)
            into = content_only[:, :, row:end]
            _launch(
                "forward",
                (-(-R // how.rows), count),
                how,
                **self.common(first, row, end),
                **by_query,
                **by_key,
                out=into,
                lse=lse[:, :, row:end],
                weights=None if weights is None else weights.memory,
                **_strides("out", into, "bhi"),
                **_strides("lse", lse, "bh"),
                weights_n=0 if weights is None else weights.stride,
                weights_ld=0 if weights is None else weights.ld,
                BM=how.rows,
                BN=how.columns,
                EVEN=R % how.rows == 0 and self.keys % how.columns == 0,
            )
            if weights is not None:
                to, shift = by_head[:, :, row:end], self.length - 1 - row
                self.apply(weights, first, count, to, self.keys, None, self.V, into, shift)
        return out, lse

    def backward(self, d_out, out, lse, with_u: bool) -> list[torch.Tensor | None]:
        """Gradients of content, query (None without u), key, value, A, B, c and V."""
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
        matrices = 1 + (self.A is not None or self.c is not None) + 2 * has_B + 2 * has_V
        plan = list(chunks(self.pairs, self.length, _bytes_per_row(matrices, self.keys, self.dtype.itemsize)))
        several = any(row for _, _, row, _ in plan)
        sums = torch.float32 if several or has_B else self.dtype
        shape = (self.batch, self.keys, self.heads, self.size)  # as the projections leave them
        d_key = self.key.new_empty(shape, dtype=sums).transpose(1, 2)
        d_value = self.key.new_empty(shape, dtype=sums).transpose(1, 2)
        shape = (self.batch, self.length, self.heads, self.size)
        d_content = self.content.new_empty(shape).transpose(1, 2)
        d_query = self.content.new_empty(shape).transpose(1, 2) if with_u and self.A is not None else None
        total = {letter: self.parts(getattr(self, letter)) for letter in ("A", "B", "c", "V")}
        many = has_B + has_V + bool(self.dropout) > 1
        how = tile("backward_many" if many else "backward", self.size, self.dtype)
        for first, count, row, end in plan:
            R, shift = end - row, self.length - 1 - row
            by_query, by_key = self.biases(first, count, row, end)
            gradient = d_out[:, :, row:end]
            d_scores = PairMatrices(count, R, self.keys, self.content)
            d_by_key = PairMatrices(count, self.keys, R, self.content) if has_B else None
            weights = PairMatrices(count, R, self.keys, self.content) if has_V else None
            by_value = PairMatrices(count, R, self.keys, self.content) if has_V else None
            if by_value is not None:
                self.product(by_value, first, count, gradient, self.V, None, self.keys, shift, 1.0, self.batch)
                by_query["ld"] = by_value.ld
            _launch(
                "backward",
                (-(-self.keys // how.columns), count),
                how,
                **self.common(first, row, end),
                **by_query,
                **by_key,
                value_bias=None if by_value is None else by_value.memory,
                value_bias_n=0 if by_value is None else by_value.stride,
                d_out=gradient,
                lse=lse[:, :, row:end],
                delta=delta[:, :, row:end],
                d_key=d_key,
                d_value=d_value,
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
                EVEN=R % how.rows == 0 and self.keys % how.columns == 0,
                ADD=row > 0,
            )
            into, query = d_content[:, :, row:end], self.query[:, :, row:end]
            table = None if with_u else self.A
            self.apply(d_scores, first, count, into, self.keys, self.key, table, None, shift, self.scale)
            if d_query is not None:
                self.apply(d_scores, first, count, d_query[:, :, row:end], self.keys, None, self.A, None, shift)
            if self.A is not None or self.c is not None:
                self.gradient(d_scores, first, count, query, total["A"], total["c"], self.keys, shift)
            if weights is not None:
                self.gradient(weights, first, count, gradient, total["V"], None, self.keys, shift)
            if d_by_key is not None:
                back = self.keys - 1 + row
                self.apply(d_by_key, first, count, d_key, R, None, self.B, d_key, back, flipped=True)
                self.gradient(d_by_key, first, count, self.key, total["B"], None, R, back)
        if with_u and d_query is None:
            d_query = torch.zeros_like(d_content)
        tables = [self.summed(total[letter], getattr(self, letter), letter == "B") for letter in ("A", "B", "c", "V")]
        return [d_content, d_query, d_key.to(self.dtype), d_value.to(self.dtype), *tables]

    @property
    def splits(self) -> int:
        """Into how many parts the rows of the batch go for a table's gradient: enough programs for a large device."""
        blocks = -(-(self.length + self.keys) // 64) * self.heads
        return max(1, min(self.batch, 4, -(-512 // blocks)))

    def parts(self, rows: Rows | None) -> torch.Tensor | None:
        """Zeros for the parts of a table's gradient by offset, (H · splits, P, …)."""
        if rows is None:
            return None
        shape = (self.heads * self.splits, rows.offsets, *rows.table.shape[2:])
        return rows.table.new_zeros(shape, dtype=torch.float32)

    def gradient(self, matrix, first, count, rows, out, out_scalars, columns, shift) -> None:
        """`table_gradient` added to the parts; rows (B, H, R, d)."""
        how, R = tile("table_gradient", self.size, self.dtype), rows.shape[2]
        begin = -_up(R, how.columns)
        head, last = first // self.batch, (first + count - 1) // self.batch
        _launch(
            "table_gradient",
            (-(-(columns - begin) // how.columns), last - head + 1, self.splits),
            how,
            matrix=matrix.memory,
            rows=rows,
            out=out,
            out_scalars=out_scalars,
            first=first,
            count=count,
            batch=self.batch,
            R=R,
            C=columns,
            P=(out if out is not None else out_scalars).shape[1],
            shift=shift,
            begin=begin,
            splits=self.splits,
            **_strides("rows", rows, "bhi"),
            ld=matrix.ld,
            matrix_n=matrix.stride,
            D=self.size,
            BI=how.rows,
            BX=how.columns,
            PRECISION=self.precision,
        )

    def summed(self, parts, rows: Rows | None, flipped: bool) -> torch.Tensor | None:
        """The table's gradient from its parts."""
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, L, H, d), and log₂ of every row's Σ 2^score, (B, H, L). Rows that see no key get zeros.

    Args:
        content: q̂ + u, (B, H, L, d), of `DTYPES` and `SIZES`; key and value (B, H, K, d).
        query: q̂, for A; None where it is `content`.
        A: s·A, (H or 1, L + K − 1, d), row 0 for the offset 1 − L − start, as `ToeplitzTerms` has them; likewise B
            and V, and c, (H or 1, L + K − 1), where −∞ hides an offset.
        index_A: the row of each offset, int32 (L + K − 1,), of an A of as many rows as it has; likewise those of B
            and V.
        mask: boolean (1 or B, 1 or H, 1 or L, K), True: may attend.
        seed: int64, one number on the device; only with dropout.
        start: index of the first query among the keys.
        dropout: probability of dropping a weight, in units of 2^−16.
    """
    with _on(content):
        inputs = (content, query, key, value, A, B, c, V, index_A, index_B, index_V, mask, seed)
        return Call(*inputs, start, scale, causal, dropout).forward()


@attention.register_fake
def _(content, *others):
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
) -> list[torch.Tensor]:
    """Gradients of those of content, query, key, value, A, B, c and V that are there."""
    with _on(content):
        inputs = (content, query, key, value, A, B, c, V, index_A, index_B, index_V, mask, seed)
        call = Call(*inputs, start, scale, causal, dropout)
        gradients = call.backward(d_out, out, lse, query is not None)
    return [gradient for gradient in gradients if gradient is not None]


@attention_backward.register_fake
def _(d_out, out, lse, content, query, key, value, A, B, c, V, *others):
    by_head = (
        (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2))
        for x in (content, query, key, value)
        if x is not None
    )
    return [*by_head, *(x.new_empty(x.shape) for x in (A, B, c, V) if x is not None)]


def _setup(ctx, inputs, output):
    *tensors, ctx.start, ctx.scale, ctx.causal, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_lse):
    if d_out is None:
        return (None,) * 17
    out, lse, *tensors = ctx.saved_tensors
    gradients = iter(attention_backward(d_out, out, lse, *tensors, ctx.start, ctx.scale, ctx.causal, ctx.dropout))
    by_input = [None if tensor is None else next(gradients) for tensor in tensors[:8]]
    return (*by_input, *[None] * 9)


attention.register_autograd(_gradients, setup_context=_setup)
