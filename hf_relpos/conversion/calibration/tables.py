"""The terms of a layer as tables by offset, and scores, which are linear in them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...attention.context import AttentionContext
from ...attention.formula import Table
from ...schemes.scheme import Scheme
from .blocks import Block


@dataclass
class Tables:
    """The terms of one layer by offset, with their scale. Scores and outputs are linear in them.

    Attributes:
        A, B, V: (H or 1, 2N − 1, d), or None.
        c: (H or 1, 2N − 1), or None.
        u: (H, d), or None.
    """

    A: torch.Tensor | None = None
    B: torch.Tensor | None = None
    c: torch.Tensor | None = None
    u: torch.Tensor | None = None
    V: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Letters and tensors of the tables that are not None."""
        return [(letter, tensor) for letter, tensor in vars(self).items() if tensor is not None]


def tables_of(scheme: Scheme, length: int, only: str = "ABcuV") -> Tables:
    """The terms of a scheme in a call of `length` tokens, by offset.

    Raises:
        ValueError: for terms that are not sums of A, B, c, c', u and V by offset.
    """
    parameter = next(scheme.parameters())
    context = AttentionContext(length, length, device=parameter.device, dtype=parameter.dtype)
    terms = scheme(context)
    if terms.dense or terms.gain or terms.feature_gain or terms.allow or terms.rotate:
        raise ValueError(f"the scheme {scheme.name!r} has terms that are not tables of distances")
    offsets = context.offsets(parameter.device)

    def full(tables: Sequence[Table], scale: float) -> torch.Tensor | None:
        if any(table.relation is not None for table in tables):
            raise ValueError(f"the scheme {scheme.name!r} has tables of another relation than the distance")
        parts = [table.rows[:, table.row_of(offsets)] * scale for table in tables]
        return functools.reduce(torch.add, parts) if parts else None

    s = scheme.scale
    inner, outer = full(terms.scaled_bias, s), full(terms.bias, 1.0)
    terms_by_letter = {
        "A": full(terms.query_table, s),
        "B": full(terms.key_table, s),
        "c": inner if outer is None else outer if inner is None else inner + outer,
        "u": None if terms.content_bias is None else terms.content_bias * s,
        "V": full(terms.value_table, 1.0),
    }
    return Tables(**{letter: tensor for letter, tensor in terms_by_letter.items() if letter in only})


def scores(tables: Tables, block: Block) -> torch.Tensor:
    """Jθ: the part of the scores of a block from the tables, expandable to (H, B, m, L)."""
    parts = []
    if tables.A is not None:
        parts.append(block.query_scores(tables.A))
    if tables.B is not None:
        parts.append(block.key_scores(tables.B))
    if tables.c is not None:
        per_offset = block.part(tables.c)[:, None].expand(-1, block.rows, -1)
        parts.append(block.skew(per_offset)[:, None])
    if tables.u is not None:
        parts.append(torch.einsum("hbjd,hd->hbj", block.key, tables.u)[:, :, None])
    return functools.reduce(torch.add, parts) if parts else block.content.new_zeros(())


def scores_gradient(block: Block, pairs: torch.Tensor, into: Tables) -> None:
    """Add Jᵀw for w (H, B, m, L) to the tables in `into`, per head."""
    if into.A is not None or into.c is not None:
        per_offset = block.unskew(pairs)
        if into.A is not None:
            block.part(into.A).add_(block.query_gradient(per_offset))
        if into.c is not None:
            block.part(into.c).add_(per_offset.sum((1, 2)))
    if into.B is not None:
        block.part(into.B).add_(block.key_gradient(pairs))
    if into.u is not None:
        into.u.add_(torch.einsum("hbij,hbjd->hd", pairs, block.key))


def zeros_like(tables: Tables, heads: int) -> Tables:
    """Tables of zeros of the same kind, per head, in float64."""
    return Tables(
        **{
            letter: tensor.new_zeros((heads, *tensor.shape[1:]), dtype=torch.float64)
            for letter, tensor in tables.items()
        }
    )
