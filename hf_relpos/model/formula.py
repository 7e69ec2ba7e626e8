"""The one formula. Every scheme declares which of its terms it has; every backend computes it.

    score_ij = s · [ q_i·k_j + q_i·A_r + k_j·B_r + u·k_j + c_r ] + c'_r + mask_ij,     r = r(i, j)
    out_i    = Σ_j softmax_j(score)_ij · (v_j + V_r)

i is a query, j a key, r = j − i their offset (key minus query: a key to the left has r < 0). A, B and V are tables of
d-vectors, c and c' of scalars, u is one d-vector per head. Each table has its own map from r to a row, so that one may
be clipped where another is bucketed. c stands inside the scale, c' outside. q and k may be rotated first (RoPE). A
term that depends on i alone would cancel in the softmax, so there is none.

Letters, everywhere: B batch, H heads, L queries, K keys, D model size, d = D / H head size, R rows of a table.

Cost: q·A is one product with the R rows followed by a gather, k·B the same, and the value side sums the probabilities
that fall on each row before one product with V. Nothing of size L·K·d exists at any time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .offsets import Offsets


@dataclass(frozen=True)
class Table:
    """Rows, and the map from an offset to its row.

    Attributes:
        rows: (H or 1, R, d) for A, B and V; (H or 1, R) for c and c'. A leading 1 means shared by all heads.
        row_of: r, a LongTensor of any shape, to row numbers of the same shape, each in [0, R).
    """

    rows: torch.Tensor
    row_of: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Terms:
    """What one scheme contributes to one attention call. Several tables for one letter are summed.

    Attributes:
        scale: s.
        A: query-side tables, rows (H or 1, R, d).
        B: key-side tables, rows (H or 1, R, d).
        u: content bias, (H, d).
        c: scalar tables inside the scale, rows (H or 1, R).
        c_outer: scalar tables outside the scale (c'), rows (H or 1, R).
        V: value-side tables, rows (H or 1, R, d).
        rotate: maps ((B, H, N, d) vectors, (N,) absolute positions) to rotated vectors; applied to q and k.
    """

    scale: float
    A: tuple[Table, ...] = ()
    B: tuple[Table, ...] = ()
    u: torch.Tensor | None = None
    c: tuple[Table, ...] = ()
    c_outer: tuple[Table, ...] = ()
    V: tuple[Table, ...] = ()
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def content_vectors(
    query: torch.Tensor, key: torch.Tensor, terms: Terms, offsets: Offsets
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The vectors of the two products of the formula.

    Args:
        query: (B, H, L, d).
        key: (B, H, K, d).

    Returns:
        q̂ + u for the content product, (B, H, L, d); q̂ for the A term, (B, H, L, d); k̂, (B, H, K, d).
    """
    if terms.rotate is not None:
        query = terms.rotate(query, offsets.query_positions(query.device))
        key = terms.rotate(key, offsets.key_positions(key.device))
    content = query if terms.u is None else query + terms.u[:, None].to(query.dtype)
    return content, query, key


def position_scores(query: torch.Tensor, key: torch.Tensor, terms: Terms, offsets: Offsets) -> torch.Tensor | None:
    """s · [q_i·A_r + k_j·B_r + c_r] + c'_r: all of the score but the content product and the mask.

    Args:
        query: q̂, (B, H, L, d), rotated if the scheme rotates.
        key: k̂, (B, H, K, d), likewise.

    Returns:
        (B or 1, H or 1, L, K) in the dtype of `query`, or None when no table has anything to say.
    """
    batch, heads, length, _ = query.shape
    key_length = key.shape[2]
    offset = offsets.matrix(query.device)
    inner, outer = [], []
    for table in terms.A:
        index = table.row_of(offset).expand(batch, heads, length, key_length)
        inner.append(torch.matmul(query, table.rows.to(query.dtype).transpose(-1, -2)).gather(-1, index))
    for table in terms.B:
        index = table.row_of(offset).transpose(-1, -2).expand(batch, heads, key_length, length)
        by_key = torch.matmul(key, table.rows.to(query.dtype).transpose(-1, -2)).gather(-1, index)
        inner.append(by_key.transpose(-1, -2))
    inner.extend(table.rows[:, table.row_of(offset)][None] for table in terms.c)
    outer.extend(table.rows[:, table.row_of(offset)][None] for table in terms.c_outer)
    if not inner and not outer:
        return None
    total = sum(outer)
    if inner:
        total = total + terms.scale * sum(inner)
    return total.to(query.dtype)


def position_values(probabilities: torch.Tensor, terms: Terms, offsets: Offsets) -> torch.Tensor | None:
    """Σ_j α_ij V_r: the value-side term.

    Args:
        probabilities: α, (B, H, L, K), after dropout.

    Returns:
        (B, H, L, d), or None without a V table.
    """
    offset = offsets.matrix(probabilities.device)
    total = None
    for table in terms.V:
        index = table.row_of(offset).expand(probabilities.shape)
        mass = probabilities.new_zeros(*probabilities.shape[:-1], table.rows.shape[1])
        mass = mass.scatter_add(-1, index, probabilities)
        term = torch.matmul(mass, table.rows.to(mass.dtype))
        total = term if total is None else total + term
    return total


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Terms,
    offsets: Offsets,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, as it stands: the eager backend, and the reference of all others.

    Args:
        query: (B, H, L, d).
        key: (B, H, K, d).
        value: (B, H, K, d).
        terms: what the scheme adds.
        offsets: r for every query and key.
        mask: broadcastable to (B, H, L, K); boolean (True: may attend) or additive. A row that may attend to nothing
            gets finite weights, as in Transformers' own eager attention.
        dropout: probability of dropping an attention weight (0 outside training).

    Returns:
        out (B, H, L, d) and the attention weights after dropout (B, H, L, K).
    """
    content, query, key = content_vectors(query, key, terms, offsets)
    scores = torch.matmul(content, key.transpose(-1, -2)) * terms.scale
    positional = position_scores(query, key, terms, offsets)
    if positional is not None:
        scores = scores + positional
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:  # min + a negative score may overflow to -inf in float16, and a row of -inf is NaN
            scores = (scores + mask).clamp(min=lowest)
    probabilities = torch.softmax(scores, dim=-1)
    probabilities = torch.nn.functional.dropout(probabilities, p=dropout, training=dropout > 0.0)
    out = torch.matmul(probabilities, value)
    positional = position_values(probabilities, terms, offsets)
    return (out if positional is None else out + positional.to(out.dtype)), probabilities
