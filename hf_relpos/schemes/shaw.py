"""Relative position representations of Shaw, Uszkoreit and Vaswani (arXiv 1803.02155, eq. 3 and 4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Table, Terms
from .scheme import Option, Scheme, choice, is_count


class Shaw(Scheme, name="shaw"):
    """score = s · q_i·(k_j + a^K_r), out_i = Σ_j α_ij (v_j + a^V_r), r clipped to ±clip.

    Parameters: key and value, each (2·clip + 1, d), row r + clip; per layer. The heads share them, as in the authors'
    tensor2tensor code (`relative_positions_keys` and `relative_positions_values`). With `per_head` they are
    (H, 2·clip + 1, d).
    """

    summary = "A vector per near distance, added to keys and values"
    source = "Shaw et al. 2018, arXiv 1803.02155, eq. 3-4"
    out_of_range = ("clip", "zero")
    extrapolation_claim = "clipping lets it generalise to lengths not seen in training"
    options = {
        "clip": Option(
            default=16,
            help="k of the paper, the largest distance with an embedding of its own; a positive integer",
            accepts=is_count,
        ),
        "per_head": choice(False, True, help="tables of their own for each head"),
    }

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, options)
        self.clip = self.settings["clip"]
        shape: tuple[int, ...] = (2 * self.clip + 1, self.head_size)
        if self.settings["per_head"]:
            shape = (self.num_heads, *shape)
        self.key = nn.Parameter(torch.empty(shape))
        self.value = nn.Parameter(torch.empty(shape))

    def init_weights(self, std: float) -> None:
        init.normal_(self.key, mean=0.0, std=std)
        init.normal_(self.value, mean=0.0, std=std)

    def table(self, rows: torch.Tensor) -> Table:
        """Return a table of `rows`, ascending in r; a zero row follows if distances past `clip` have no term."""
        rows = rows if rows.dim() == 3 else rows[None]
        if self.settings["out_of_range"] == "clip":
            return Table(rows.clone(), row_of=lambda r: r.clamp(-self.clip, self.clip) + self.clip)
        past = 2 * self.clip + 1
        return Table(
            nn.functional.pad(rows, (0, 0, 0, 1)),
            row_of=lambda r: torch.where(r.abs() > self.clip, past, r + self.clip),
        )

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(query_table=(self.table(self.key),), value_table=(self.table(self.value),))
