"""Terms that depend only on the offset j − i, as arrays with one row for each offset of the call (Toeplitz terms).

    score_ij = s · (q_i + u)·k_j + q_i·A_p + k_j·B_p + c_p + dense_ij,     p = j − i in [low, high]
    out_i    = Σ_j softmax_j(score)_ij · (v_j + V_p)

The scale is folded into A, B and c. p is an address: clipping, buckets, knots and sums of several tables have been
resolved. A backend that computes this form therefore computes every scheme that has it. The backward pass is
autograd's: an `index_select`, whose backward adds up the rows, on arrays of the size of the tables.

Tables whose relation is not the offset (a grid, labelled edges, token types), offsets that follow explicit positions,
and gains have no such form (`toeplitz_unsupported`). Backends that hold (L, K) matrices compute them.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..host.tracing import is_traced, may_read
from .context import AttentionContext
from .formula import TABLE_FIELDS, Clipped, RowMap, Table, Terms, content_scale, total_of


# The fields of `Terms` and of `ToeplitzTerms` that hold tables of vectors.
TABLES = ("query_table", "key_table", "value_table")


@dataclass(frozen=True)
class OffsetTable:
    """Vectors by offset. Several offsets may share a row.

    Attributes:
        rows: (H or 1, N, d).
        row_of: (P,), the row of each offset; None if each of the P offsets has a row of its own, in their order.
        clamped: how many offsets at the beginning and at the end are known to share a row of the scheme's table, so
            that their products and gradients may be computed once; (1, 1) if none do.
    """

    rows: torch.Tensor
    row_of: torch.Tensor | None = None
    clamped: tuple[int, int] = (1, 1)

    def between(self, first: int, end: int) -> "OffsetTable":
        """Return the table of some offsets, by their indices. Each must have a row of its own."""
        left, right, count = *self.clamped, self.rows.shape[1]
        ends = max(1, min(left, end) - first), max(1, end - max(count - right, first))
        return OffsetTable(self.rows[:, first:end], clamped=ends)


@dataclass(frozen=True)
class ToeplitzTerms:
    """The terms of one attention call by offset, for P = high − low + 1 offsets in ascending order.

    Attributes:
        low: the first offset.
        scale: s, the scale of the content product.
        query_table: s·A, or None.
        key_table: s·B, or None.
        bias: s·c + c', (H or 1, P), or None.
        value_table: V, or None.
        allow: which offsets may be attended to, boolean (H or 1, P), or None.
        dense: a dense bias outside the scale, (1 or B, 1 or H, L, K), or None.
    """

    low: int
    scale: float
    query_table: OffsetTable | None = None
    key_table: OffsetTable | None = None
    bias: torch.Tensor | None = None
    value_table: OffsetTable | None = None
    allow: torch.Tensor | None = None
    dense: torch.Tensor | None = None

    def _with_tables(self, change: Callable[[OffsetTable], OffsetTable], **others: Any) -> "ToeplitzTerms":
        tables = {name: getattr(self, name) for name in TABLES}
        changed: dict[str, Any] = {name: table and change(table) for name, table in tables.items()}
        return replace(self, **changed, **others)

    def to(self, dtype: torch.dtype) -> "ToeplitzTerms":
        """Return a copy with tables and biases in another dtype."""
        return self._with_tables(
            lambda table: replace(table, rows=table.rows.to(dtype)),
            bias=None if self.bias is None else self.bias.to(dtype),
            dense=None if self.dense is None else self.dense.to(dtype),
        )

    def between(self, first: int, end: int) -> "ToeplitzTerms":
        """Return the terms of some offsets, by their indices, as views. There must be no dense bias."""
        return self._with_tables(
            lambda table: table.between(first, end),
            low=self.low + first,
            bias=None if self.bias is None else self.bias[:, first:end],
            allow=None if self.allow is None else self.allow[:, first:end],
        )

    def without_tensors(self) -> "ToeplitzTerms":
        """Return a copy without tensors for a graph. The graph saves these itself, and would hold them twice."""
        return self._with_tables(lambda table: replace(table, rows=table.rows.new_empty(0)), bias=None, dense=None)


def toeplitz_unsupported(terms: Terms, context: AttentionContext) -> list[str]:
    """Return the reasons why these terms have no Toeplitz form. The list is empty if they have one."""
    reasons = []
    tables = {letter: getattr(terms, field) for letter, field in TABLE_FIELDS.items()}
    tables |= {"c'": terms.bias, "allow": terms.allow}
    for letter, group in tables.items():
        if any(table.relation is not None for table in group):
            reasons.append(f"{letter} depends on another relation than the offset")
    if terms.gain or terms.feature_gain is not None:
        reasons.append("a gain multiplies the content score")
    if context.positions is not None and any(tables.values()):
        reasons.append("position_ids have gaps, so that offsets are not differences of indices")
    return reasons


def to_toeplitz(terms: Terms, context: AttentionContext, query: torch.Tensor, by_row: bool = False) -> ToeplitzTerms:
    """Bring terms into Toeplitz form. `toeplitz_unsupported` must give no reason against them.

    Args:
        query: (…, d), a tensor whose head size, device and dtype the result has. Products with s are computed before
            rounding to this dtype.
        by_row: whether A and B may keep the rows of the scheme's table, in their order, if these are fewer than the
            offsets. Their `row_of` is then int32. No table keeps them while a graph is traced, since the graph must
            hold for any length.
    """
    scale, dtype = content_scale(query, terms), query.dtype
    offsets = context.offsets(query.device)
    if by_row and not is_traced():
        return _by_row(terms, context, query, offsets)
    inner = _sum_by_offset(terms.scaled_bias, offsets, context.low, scale)
    outer = _sum_by_offset(terms.bias, offsets, context.low)
    scalars = [table.rows for table in (inner, outer) if table is not None]
    allow = [_rows_by_offset(table, offsets, context.low).rows for table in terms.allow]
    return ToeplitzTerms(
        low=context.low,
        scale=scale,
        query_table=_sum_by_offset(terms.query_table, offsets, context.low, scale),
        key_table=_sum_by_offset(terms.key_table, offsets, context.low, scale),
        bias=total_of(scalars) if scalars else None,
        value_table=_sum_by_offset(terms.value_table, offsets, context.low),
        allow=functools.reduce(operator.and_, allow) if allow else None,
        dense=total_of(terms.dense) if terms.dense else None,
    ).to(dtype)


def _by_row(terms: Terms, context: AttentionContext, query: torch.Tensor, offsets: torch.Tensor) -> ToeplitzTerms:
    """`to_toeplitz`, but tables that are read by row keep their rows, multiplied by the scale."""
    scale = content_scale(query, terms)
    found: dict[str, Any] = {}
    for name in ("query_table", "key_table"):
        tables = getattr(terms, name)
        if len(tables) == 1 and tables[0].rows.shape[1] < len(offsets):
            rows = _precise(tables[0].rows, scale).to(query.dtype)
            found[name] = OffsetTable(rows, tables[0].row_of(offsets).int())
    others: dict[str, Any] = dict.fromkeys(found, ())
    return replace(to_toeplitz(replace(terms, **others), context, query), **found)


def _sum_by_offset(
    tables: tuple[Table, ...], offsets: torch.Tensor, low: int, factor: float = 1.0
) -> OffsetTable | None:
    """Return factor · Σ of the tables, rows (H or 1, P, …), with their common clamped ends; None without tables."""
    parts = [_rows_by_offset(table, offsets, low, factor) for table in tables]
    if not parts:
        return None
    left, right = (min(ends) for ends in zip(*(part.clamped for part in parts), strict=True))
    return OffsetTable(total_of([part.rows for part in parts]), clamped=(left, right))


def _precise(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """Return factor · rows, in float32 at least: gradients of offsets that share a row are not summed in half."""
    if rows.is_floating_point():
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows if factor == 1.0 else factor * rows


def _rows_by_offset(table: Table, offsets: torch.Tensor, low: int, factor: float = 1.0) -> OffsetTable:
    """Return factor · the row of each offset in `offsets`, with the sizes of the clamped ends.

    The clamped ends are read from the map and never from the values. Rows that are equal only for now, such as fresh
    zeros, have separate gradients.
    """
    rows, row_of = table.rows, table.row_of
    if row_of == Clipped(low):
        return OffsetTable(rows if factor == 1.0 else factor * rows)  # the table has this form already
    index = row_of(offsets)
    if isinstance(row_of, RowMap):
        clamped = (1, 1) if is_traced() else row_of.ends(low, low + len(offsets) - 1)
    elif may_read(offsets.device):
        steps = index.diff().nonzero()  # the offsets whose row differs from that of the next
        clamped = (int(steps[0]) + 1, len(index) - 1 - int(steps[-1])) if len(steps) else (len(index), 1)
    else:
        clamped = 1, 1
    if not may_read(offsets.device):  # here the backward of `index_select` has no fixed order either
        return OffsetTable(_precise(rows, factor)[:, index], clamped=clamped)
    return OffsetTable(_precise(rows, factor).index_select(1, index), clamped=clamped)
