"""Positions of hierarchical opacity propagation (Li et al., arXiv 2004.03249), its global block."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext, grid_offsets
from ..attention.formula import Table, Terms
from .encodings import sinusoid_concat
from .scheme import Scheme, dtype_of, integer


class Hop(Scheme, name="hop"):
    """score = s · q_i·k_j + q_i·(P_|Δy| + P_|Δx|), Δy and Δx being the rows and columns from i to j.

    P_δ = W · sinusoid(max(R − δ, 0)) + b. The authors' code counts distances backwards: R is the token itself, and 0
    stands for all distances from R on. Both axes and all heads share one table, which does not distinguish directions.
    The scale does not apply to it. Pairs with a token outside the grid, like [CLS], are scored by content alone.

    Parameters: pos_embed_linear (d, d) and (d,); per layer. The original has one head. It also hides tokens from
    themselves, normalises content and embeds its trimap; these belong to matting and are not implemented.
    """

    summary = "A vector per row and column distance, for images"
    source = "Li et al. 2020, arXiv 2004.03249; Yaoyi-Li/HOP-Matting networks/ops.py"
    out_of_range = ("clip",)
    symmetric = True
    even_size = "head_size"
    required_inputs = frozenset({"grid"})
    options = {"radius": integer(7, "R, numbers of rows and of columns from it on share an embedding")}

    def build(self, config: Any) -> None:
        self.pos_embed_linear = nn.Linear(self.head_size, self.head_size)

    def init_weights(self, std: float) -> None:
        init.xavier_uniform_(self.pos_embed_linear.weight)

    def forward(self, context: AttentionContext) -> Terms:
        radius = self.settings["radius"]
        reversed_distances = torch.arange(radius + 1, device=context.device)
        sinusoid = sinusoid_concat(reversed_distances, self.head_size, dtype_of(self.pos_embed_linear))
        # (1, R + 2, d); the last row is zero, for pairs without a term
        rows = nn.functional.pad(self.pos_embed_linear(sinusoid)[None] / self.scale, (0, 0, 0, 1))
        down, right, inside = grid_offsets(context)

        def table(steps: torch.Tensor) -> Table:
            row = torch.where(inside, (radius - steps.abs()).clamp(min=0), radius + 1)
            return Table(rows, row_of=lambda row: row, relation=row)

        return Terms(query_table=(table(down), table(right)))
