"""The general scheme: any tables of the formula, each free, for converters to fit.

Every additive scheme of the literature is this one with its tables tied, clipped or fixed. Tables may be stored on
knots: one row for each near distance and ever fewer for far ones, with linear interpolation in between (hat
functions). Distances that are rarely seen then share rows with distances that are seen.
"""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Clipped, Table, Terms
from ..host.tracing import is_traced
from .scheme import WHICH_TABLES, Scheme, choice, integer, register_tables, terms_of_tables


def knots(max_distance: int, dense: int, per_octave: int) -> list[int]:
    """Return the knots, the offsets of the hat functions, ascending and symmetric.

    Args:
        max_distance: largest distance; always a knot.
        dense: every distance up to this one is a knot.
        per_octave: number of knots for each doubling of the distance beyond `dense`.
    """
    right = list(range(1, min(dense, max_distance) + 1))
    step = 0
    while right[-1] < max_distance:
        step += 1
        right.append(max(right[-1] + 1, min(max_distance, round(dense * 2 ** (step / per_octave)))))
    return [-knot for knot in reversed(right)] + [0, *right]


class Tables(Scheme, name="tables"):
    """score = s · (q_i·k_j + q_i·A_r + k_j·B_r + c_r), out_i = Σ_j α_ij (v_j + V_r); `terms` names the tables to use.

    Parameters: A, B and V (H or 1, N, d), c (H or 1, N); per layer. N is the number of knots, or 2·max_distance + 1
    with `storage`="rows", in ascending order of r.

    On longer inputs: distances beyond the range share the last row.
    """

    summary = "All tables of the formula, unconstrained: the closest conversion"
    source = "hf_relpos; hat functions on knots as in shape-constrained regression"
    out_of_range = ("clip", "zero")
    options = {
        "terms": WHICH_TABLES,
        "per_head": choice(True, False, help="tables of their own for each head"),
        "max_distance": integer(
            None, "largest distance with an embedding of its own", none="max_position_embeddings − 1"
        ),
        "storage": choice("knots", "rows", help="one row for each knot, or for each distance"),
        "dense": integer(16, "every distance up to this one has a knot"),
        "per_octave": integer(4, "knots for each doubling of the distance"),
    }

    def build(self, config: Any) -> None:
        self.max_distance = self.settings["max_distance"] or max(config.max_position_embeddings - 1, 1)
        if self.settings["storage"] == "knots":
            self.knots = knots(self.max_distance, self.settings["dense"], self.settings["per_octave"])
        else:
            self.knots = list(range(-self.max_distance, self.max_distance + 1))
        register_tables(self, len(self.knots))

    def expand(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Compute rows at offsets from rows at knots, by linear interpolation; exact at the knots.

        Args:
            rows: (H or 1, N, …).
            offsets: r, (M,).

        Returns:
            (H or 1, M, …).
        """
        return self.at_offsets(rows, self.weights(offsets, rows.dtype))

    def at_offsets(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute rows at offsets from rows at knots and the result of `weights`."""
        if not weights.is_floating_point():
            rows = nn.functional.pad(rows, (0, 0) * (rows.dim() - 2) + (0, 1))
            return rows.index_select(1, weights)
        return torch.matmul(weights, rows) if rows.dim() == 3 else torch.matmul(rows, weights.T)

    def weights(self, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Compute the weight of each knot at offsets, (M, N); of knots at all offsets their numbers, (M,)."""
        knots = torch.tensor(self.knots, device=offsets.device)
        clipped = offsets.clamp(-self.max_distance, self.max_distance)
        beyond = offsets.abs() > self.max_distance if self.settings["out_of_range"] == "zero" else None
        if len(knots) == 2 * self.max_distance + 1:
            number = clipped + self.max_distance
            return number if beyond is None else number.masked_fill(beyond, len(knots))
        right = (knots < clipped[:, None]).sum(-1)  # ONNX has no searchsorted
        left = (right - 1).clamp(min=0)
        of_left = ((knots[right] - clipped).to(dtype) / (knots[right] - knots[left]).clamp(min=1))[:, None]
        number = torch.arange(len(knots), device=offsets.device)
        found = of_left * (left[:, None] == number) + (1 - of_left) * (right[:, None] == number)
        return found if beyond is None else found.masked_fill(beyond[:, None], 0.0)

    def table(self, rows: torch.Tensor, context: AttentionContext) -> Table:
        """Return the table of this call, from rows at knots."""
        first, last, row_of = context.low, context.high, Clipped(context.low)
        if not is_traced():  # sizes are not known in a graph
            reach = self.max_distance + (self.settings["out_of_range"] == "zero")  # all rows from here on are the same
            first, last = (max(-reach, min(end, reach)) for end in (first, last))
            row_of = Clipped(first, last)
        weights = context.once(
            (self.signature, rows.dtype, rows.device),
            lambda: self.weights(torch.arange(first, last + 1, device=rows.device), rows.dtype),
        )
        return Table(self.at_offsets(rows, weights), row_of)

    def forward(self, context: AttentionContext) -> Terms:
        return terms_of_tables(self, lambda rows: self.table(rows, context))
