"""Relative rows and columns, as in attention augmented convolutions (Bello et al., arXiv 1904.09925, §3.2)."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext, grid_offsets
from ..attention.formula import Table, Terms
from .scheme import Scheme, choice, integer


class Relative2d(Scheme, name="relative_2d"):
    """score = s · q_i·(k_j + H_Δy + W_Δx), Δy and Δx being rows and columns from i to j; H_Δ = W_Δ = 0 for |Δ| ≥ m.

    Grids may have any shape. Pairs with a token outside the grid, like [CLS], are scored by content alone.

    Parameters: height_key_relative_embeddings and width_key_relative_embeddings, each (2m − 1, d), row Δ + m − 1, or
    (H, 2m − 1, d) with `per_head`; per layer. The heads share the paper's tables, but by default not tensor2tensor's.
    """

    summary = "A vector per row and column distance, on a grid"
    source = "Bello et al. 2019, arXiv 1904.09925, §3.2, eq. 4; tensor2tensor relative_2d"
    out_of_range = ("zero", "clip")
    required_inputs = frozenset({"grid"})
    options = {
        "max_relative_position": integer(32, "m, numbers of rows and of columns below it have a term"),
        "per_head": choice(False, True, help="tables of their own for each head"),
    }

    def build(self, config: Any) -> None:
        self.max_distance = self.settings["max_relative_position"] - 1
        heads = (self.num_heads,) if self.settings["per_head"] else ()
        shape = (*heads, 2 * self.max_distance + 1, self.head_size)
        self.height_key_relative_embeddings = nn.Parameter(torch.empty(shape))
        self.width_key_relative_embeddings = nn.Parameter(torch.empty(shape))

    def init_weights(self, std: float) -> None:
        super().init_weights(self.head_size**-0.5)

    def table(self, rows: torch.Tensor, steps: torch.Tensor, inside: torch.Tensor) -> Table:
        """Return a table of `rows`, in ascending order of Δ, followed by a zero row for pairs without a term.

        Args:
            steps: Δ of every pair, (B, L, L).
            inside: whether both tokens of a pair are on the grid, (B, L, L).
        """
        if self.settings["out_of_range"] == "clip":
            steps = steps.clamp(-self.max_distance, self.max_distance)
        near = inside & (steps.abs() <= self.max_distance)
        return Table(
            nn.functional.pad(rows if rows.dim() == 3 else rows[None], (0, 0, 0, 1)),
            row_of=lambda row: row,
            relation=torch.where(near, steps + self.max_distance, 2 * self.max_distance + 1),
        )

    def forward(self, context: AttentionContext) -> Terms:
        down, right, inside = grid_offsets(context)
        height = self.table(self.height_key_relative_embeddings, down, inside)
        width = self.table(self.width_key_relative_embeddings, right, inside)
        return Terms(query_table=(height, width))
