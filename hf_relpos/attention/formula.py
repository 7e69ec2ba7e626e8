"""The formula of attention. Every scheme declares which of its terms it has, and every backend computes it.

    score_ij = s · [ g_r (q_i·k_j + u·k_j) + q_i·A_r + k_j·B_r + c_r ] + c'_r + mask_ij,     r = r(i, j)
    out_i    = Σ_j softmax_j(score)_ij · (v_j + V_r)

i is a query, j a key, and r = j − i their offset: a key to the left has r < 0. A, B and V are tables of d-vectors, c
and c' are tables of scalars, and u is one d-vector per head. Each table has its own map from r to a row, so that one
may be clipped while another is bucketed. A table may also be indexed by another relation of the pair than its offset.
c stands inside the scale and c' outside; c' may also be a dense bias, with an entry for each pair. q and k may be
rotated first (RoPE), also into wider vectors (PoPE). There is no term that depends on i alone, since the softmax would
cancel it. g is a gain on the content score, 1 unless a scheme has one. The multiplicative methods of Huang et al. need
it; it may also be a vector, with one factor for each feature of q_i·k_j. A scheme may also hide keys by their offset
(`allow`).

Letters, everywhere: B batch, H heads, L queries, K keys, D model size, d = D / H head size, R rows of a table.

Cost: q·A is one product with the R rows followed by a gather, and so is k·B. The value side sums the probabilities
that fall on each row before one product with V. No tensor of size L·K·d exists at any time. The gain by feature is the
only term that takes L·K·d multiplications.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..host.tracing import is_traced, is_transformed
from .context import AttentionContext
from .masks import finite, is_visible


class RowMap:
    """A map from offsets to rows, for `Table.row_of`, that equals others with the same fields.

    Layers then share what is made of it, and nobody has to read which offsets share a row.
    """

    def __call__(self, relation: torch.Tensor) -> torch.Tensor:
        """The row of each offset, with the shape of `relation`."""
        raise NotImplementedError

    def ends(self, low: int, high: int) -> tuple[int, int]:
        """How many offsets from `low` on share its row, and how many up to `high` share that one's: 1 for none."""
        return 1, 1


@dataclass(frozen=True)
class Clipped(RowMap):
    """Offsets from `low` to `high` have the rows 0, 1, …; those beyond have the nearest of these.

    Attributes:
        low: the first.
        high: the last; None if there are no offsets beyond.
        zero: whether those beyond have one more row instead.
        descending: whether the rows are those of `high`, `high` − 1, ….
    """

    low: int
    high: int | None = None
    zero: bool = False
    descending: bool = False

    def __call__(self, relation: torch.Tensor) -> torch.Tensor:
        if self.high is None:
            return relation - self.low
        row, last = self.high - relation if self.descending else relation - self.low, self.high - self.low
        return torch.where((row < 0) | (row > last), last + 1, row) if self.zero else row.clamp(0, last)

    def ends(self, low: int, high: int) -> tuple[int, int]:
        if self.high is None:
            return 1, 1
        left, right = min(self.low - self.zero, high) - low, high - max(self.high + self.zero, low)
        return 1 + max(left, 0), 1 + max(right, 0)


@dataclass(frozen=True)
class Table:
    """Rows, and the map from a pair (i, j) to its row.

    Attributes:
        rows: (H or 1, R, d) for A, B and V; (H or 1, R) for c, c' and the gain; boolean (H or 1, R) for `allow`. A
            leading 1 means that all heads share the rows.
        row_of: maps the relation, a LongTensor of any shape, to row numbers in [0, R) of the same shape.
        relation: (L, K) or (B, L, K), the input of `row_of`; None means the offset r = j − i.
    """

    rows: torch.Tensor
    row_of: Callable[[torch.Tensor], torch.Tensor]
    relation: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.rows.device

    def index(self, context: AttentionContext) -> torch.Tensor:
        """Return the row of every pair, (1, 1, L, K) or (B, 1, L, K)."""
        if self.relation is not None:
            index = self.row_of(self.relation)
        elif isinstance(self.row_of, RowMap):
            index = context.once((self.row_of, self.device), lambda: self.row_of(context.matrix(self.device)))
        else:
            index = self.row_of(context.matrix(self.device))
        return index[None, None] if index.dim() == 2 else index[:, None]

    def scalars(self, context: AttentionContext) -> torch.Tensor:
        """Return the entry of every pair, for a table of scalars, (1 or B, H or 1, L, K)."""
        if self.row_of == Clipped(context.low) and context.is_consecutive and not is_traced():
            return self.rows.unfold(1, context.key_length, 1).flip(1)[None]  # as below, with a cheaper backward
        index = self.index(context)[:, 0]  # (1 or B, L, K)
        return self.rows[:, index].transpose(0, 1)


def toeplitz_table(rows: torch.Tensor, context: AttentionContext) -> Table:
    """Make a table that has one row for each offset of this call.

    Args:
        rows: (H or 1, high − low + 1, …), in the order of `context.offsets`.
    """
    return Table(rows, Clipped(context.low))


# The fields of `Terms` that hold tables by offset, by their letters in the formula.
TABLE_FIELDS = {"A": "query_table", "B": "key_table", "c": "scaled_bias", "V": "value_table"}
# All fields that are tuples of tables.
ALL_TABLES = (*TABLE_FIELDS.values(), "bias", "gain", "allow")


@dataclass(frozen=True)
class Terms:
    """What a scheme adds to one attention call. Several tables of one field are summed; gains are multiplied.

    Attributes:
        scale: s; None means 1/√d, and lets another scheme of a combination set it.
        query_table: A, rows (H or 1, R, d).
        key_table: B, rows (H or 1, R, d).
        content_bias: u, (H, d).
        scaled_bias: c, scalars inside the scale, rows (H or 1, R).
        bias: c', scalars outside the scale, rows (H or 1, R).
        dense: dense biases outside the scale, added to c': tensors (1 or B, 1 or H, L, K).
        value_table: V, rows (H or 1, R, d).
        gain: factors of the content score, rows (H or 1, R).
        feature_gain: factors of each feature of the content score, Σ_c q_ic k_jc g_{r,c}, rows (H or 1, R, d).
        allow: which offsets a query may attend to, boolean rows (H or 1, R). All tables must allow a key. A query that
            may attend to no key gets zeros.
        rotate: maps ((B, H, N, d) vectors, (N,) or (B, N) positions) to rotated vectors, which may be wider if `scale`
            is set; applied to q and k.
        rotate_key: applied to k in place of `rotate`; None for the same.
    """

    scale: float | None = None
    query_table: tuple[Table, ...] = ()
    key_table: tuple[Table, ...] = ()
    content_bias: torch.Tensor | None = None
    scaled_bias: tuple[Table, ...] = ()
    bias: tuple[Table, ...] = ()
    dense: tuple[torch.Tensor, ...] = ()
    value_table: tuple[Table, ...] = ()
    gain: tuple[Table, ...] = ()
    feature_gain: Table | None = None
    allow: tuple[Table, ...] = ()
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    rotate_key: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def only_content(self) -> bool:
        """Whether the content product is the only term, with at most a scale and a rotation."""
        return self == Terms(scale=self.scale, rotate=self.rotate, rotate_key=self.rotate_key)

    @property
    def by_offset(self) -> bool:
        """Whether every term is a table by offset, so that terms of long rows hold for shorter ones, too."""
        return not self.dense and all(table.relation is None for table in self.all_tables)

    @property
    def all_tables(self) -> list[Table]:
        """All tables, in the order of `ALL_TABLES`."""
        tables = [table for field in ALL_TABLES for table in getattr(self, field)]
        return tables if self.feature_gain is None else [*tables, self.feature_gain]


def map_tables(terms: Terms, function: Callable[[Table], Table | None]) -> Terms:
    """Return terms with what a function makes of each table, in the order of `Terms.all_tables`; None drops it."""
    changed: dict[str, Any] = {}
    for field in ALL_TABLES:
        made = map(function, getattr(terms, field))
        changed[field] = tuple(table for table in made if table is not None)
    changed["feature_gain"] = None if terms.feature_gain is None else function(terms.feature_gain)
    return replace(terms, **changed)


def content_vectors(
    query: torch.Tensor, key: torch.Tensor, terms: Terms, context: AttentionContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the vectors of the products of the formula.

    Args:
        query: (B, H, L, d).
        key: (B, H, K, d).

    Returns:
        q̂ + u for the content product, (B, H, L, d); q̂ for the A term, (B, H, L, d); k̂, (B, H, K, d). They are wider
        than d if the rotation makes them so.
    """
    if terms.rotate is not None:
        query = terms.rotate(query, context.query_positions(query.device))
        key = (terms.rotate_key or terms.rotate)(key, context.key_positions(key.device))
    content = query if terms.content_bias is None else query + terms.content_bias[:, None].to(query.dtype)
    return content, query, key


def content_scale(query: torch.Tensor, terms: Terms) -> float:
    """Return s, which is 1/√d unless the scheme sets it."""
    return query.shape[-1] ** -0.5 if terms.scale is None else terms.scale


def position_scores(
    query: torch.Tensor, key: torch.Tensor, terms: Terms, context: AttentionContext, is_scaled: bool = False
) -> torch.Tensor | None:
    """Compute s · [q_i·A_r + k_j·B_r + c_r] + c'_r: the score without the content product and the mask.

    Args:
        query: q̂, (B, H, L, d), rotated if the scheme rotates.
        key: k̂, (B, H, K, d), rotated if the scheme rotates.
        is_scaled: whether `query` has been multiplied by s.

    Returns:
        (B or 1, H or 1, L, K) in the dtype of `query`, or None if there are no such terms.
    """
    (batch, heads, length, _), key_length, scale = query.shape, key.shape[2], content_scale(query, terms)
    scalars: dict[Any, Table] = {}  # of all tables of scalars with the same relation and map, their sum
    for table, factor in [*((each, scale) for each in terms.scaled_bias), *((each, 1.0) for each in terms.bias)]:
        rows, place = _scaled(table, factor), _place(table)
        rows = scalars[place].rows + rows if place in scalars else rows
        scalars[place] = Table(rows, table.row_of, table.relation)
    found = list(terms.dense)
    for table in terms.query_table:
        rows, own, added = _scaled(table, 1.0 if is_scaled else scale), scalars.get(_place(table)), None
        if own is not None and own.rows.shape == rows.shape[:2]:
            added = scalars.pop(_place(table)).rows.to(query.dtype)
        index = table.index(context).expand(batch, heads, length, key_length)
        found.append(_products(query, rows.to(query.dtype), added).gather(-1, index))
    for table in terms.key_table:
        # rows by keys, so that nothing of the size of the scores is transposed
        products = torch.matmul(_scaled(table, scale).to(key.dtype), _by_head(key).transpose(-1, -2))  # (H, R, B·K)
        products = products.unflatten(2, (batch, key_length)).permute(2, 0, 1, 3)
        found.append(products.gather(-2, table.index(context).expand(batch, heads, length, key_length)))
    found.extend(table.scalars(context) for table in scalars.values())
    return total_of(found).to(query.dtype) if found else None


def _place(table: Table) -> Hashable:
    """What is equal for tables that have the same row for every pair."""
    return table.row_of, id(table.relation)


def _scaled(table: Table, factor: float) -> torch.Tensor:
    """The rows of a table times a factor: fewer numbers than the scores are."""
    return table.rows if factor == 1.0 else table.rows * factor


def _by_head(vectors: torch.Tensor) -> torch.Tensor:
    """(B, H, L, d) as (H, B·L, d), so that a table is multiplied once for all rows: a view of projected states."""
    return vectors.transpose(0, 1).flatten(1, 2)


def _products(vectors: torch.Tensor, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """Multiply (B, H, L, d) by rows (H or 1, R, d), and add (H or 1, R): (B, H, L, R), in one product for all rows."""
    batch, heads, length, _ = vectors.shape
    if len(rows) == 1:
        of_tokens = vectors.transpose(1, 2).flatten(0, 2)  # a view of projected states
        products = nn.functional.linear(of_tokens, rows.squeeze(0), None if added is None else added.squeeze(0))
        return products.view(batch, length, heads, -1).transpose(1, 2)
    by_head, matrices = _by_head(vectors), rows.transpose(-1, -2)
    products = torch.bmm(by_head, matrices) if added is None else torch.baddbmm(added[:, None], by_head, matrices)
    return products.unflatten(1, (batch, length)).transpose(0, 1)


def total_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of at least one tensor, added in their order."""
    return functools.reduce(operator.add, tensors)


def featurewise_scores(
    query: torch.Tensor, key: torch.Tensor, table: Table, context: AttentionContext
) -> torch.Tensor:
    """Compute Σ_c q_ic k_jc g_{r,c}: the content score with a gain for every feature.

    There is no factorised form, since the gain differs from pair to pair and from feature to feature. This takes L·K·d
    multiplications, while q·A takes R·L·d in one matrix product. The features are taken one at a time, and computed
    again in the backward, so that memory holds a few (B, H, L, K) tensors and none that is d times as large.

    Args:
        query: (B, H, L, d).
        key: (B, H, K, d).
        table: the gains, rows (H or 1, R, d).

    Returns:
        (B, H, L, K) in the dtype of `query`.
    """
    index, precise = table.index(context)[:, 0], torch.promote_types(query.dtype, torch.float32)  # (1 or B, L, K)

    def share(q: torch.Tensor, k: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """The share of one feature, (B, H, L, K), of its values in queries, keys and gains."""
        by_pair = gain.to(precise).index_select(1, index.flatten()).unflatten(1, index.shape)
        return by_pair.transpose(0, 1) * q[..., :, None] * k[..., None, :]

    total = query.new_zeros((), dtype=precise)
    keeps_all = is_traced() or is_transformed() or not torch.is_grad_enabled()
    for each in zip(query.unbind(-1), key.unbind(-1), table.rows.to(query.dtype).unbind(-1), strict=True):
        total = total + (
            share(*each) if keeps_all else checkpoint(share, *each, use_reentrant=False, preserve_rng_state=False)
        )
    return total.to(query.dtype)


def position_values(probabilities: torch.Tensor, terms: Terms, context: AttentionContext) -> torch.Tensor | None:
    """Compute Σ_j α_ij V_r, the value-side term.

    Args:
        probabilities: α, (B, H, L, K), after dropout.

    Returns:
        (B, H, L, d), or None without a V table.
    """
    found = []
    for table in terms.value_table:
        index, rows = table.index(context).expand(probabilities.shape), table.rows
        mass = probabilities.new_zeros(*probabilities.shape[:-1], rows.shape[1])
        mass, rows = mass.scatter_add(-1, index, probabilities), rows.to(mass.dtype)
        found.append(torch.matmul(mass, rows.squeeze(0) if len(rows) == 1 else rows))
    return total_of(found) if found else None


def allowed(terms: Terms, context: AttentionContext, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the pairs that both the scheme and the mask allow, or None if the scheme hides no key.

    Args:
        mask: broadcastable to (B, H, L, K); boolean (True: may attend) or additive; or None.

    Returns:
        Boolean, broadcastable to (B, H, L, K).
    """
    if not terms.allow:
        return None
    visible = [table.scalars(context) for table in terms.allow]
    if mask is not None:
        visible.append(is_visible(mask))
    return functools.reduce(operator.and_, visible)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    context: AttentionContext,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the formula as it stands. This is the eager backend and the reference for all others.

    Args:
        query: (B, H, L, d).
        key: (B, H, K, d).
        value: (B, H, K, d).
        terms: what the scheme adds.
        context: the offset r of every query and key.
        mask: broadcastable to (B, H, L, K); boolean (True: may attend) or additive. If the mask alone hides all keys
            of a query, its weights are finite, as in Transformers' own eager attention.
        dropout: probability of dropping an attention weight (0 outside training).

    Returns:
        out (B, H, L, d) and the attention weights after dropout (B, H, L, K).
    """
    content, query, key = content_vectors(query, key, terms, context)
    content = content * content_scale(query, terms)  # fewer elements than the scores have
    is_scaled = terms.content_bias is None
    positional = position_scores(content if is_scaled else query, key, terms, context, is_scaled)
    if terms.feature_gain is None and not terms.gain:
        scores = _plus_product(positional, content, key.transpose(-1, -2))
    else:
        if terms.feature_gain is None:
            scores = torch.matmul(content, key.transpose(-1, -2))
        else:
            scores = featurewise_scores(content, key, terms.feature_gain, context)
        for table in terms.gain:
            scores = scores * table.scalars(context).to(scores.dtype)
        scores = scores if positional is None else scores + positional
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:  # min plus a negative score may overflow to -inf in float16
            scores = finite(scores + mask, scores.dtype)
    visible = allowed(terms, context, mask)
    if visible is not None:
        scores = scores.masked_fill(~visible, lowest)
    probabilities = torch.softmax(scores, dim=-1)
    if visible is not None:
        probabilities = probabilities.masked_fill(~visible, 0.0)
    if dropout > 0.0:  # in a graph for any dropout this is not a bool, and `training` must be one
        probabilities = torch.nn.functional.dropout(probabilities, p=dropout)
    positional = position_values(probabilities, terms, context)
    return _plus_product(positional, probabilities, value), probabilities


def _plus_product(added: torch.Tensor | None, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute `added` + `one` @ `other`, (B, H, L, …), in one operation where nothing has to be repeated for it."""
    if added is None:
        return torch.matmul(one, other)
    if is_traced() or added.shape != (*one.shape[:-1], other.shape[-1]):  # a graph must not depend on sizes
        return torch.matmul(one, other) + added
    product = torch.baddbmm(*(each.flatten(0, 1) for each in (added, one, other)))
    return product.unflatten(0, added.shape[:2])
