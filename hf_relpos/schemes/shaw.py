"""Relative position representations of Shaw, Uszkoreit and Vaswani (arXiv 1803.02155, eq. 3 and 4)."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .scheme import Scheme, choice, clipped_table, integer


class Shaw(Scheme, name="shaw"):
    """score = s · q_i·(k_j + a^K_r), out_i = Σ_j α_ij (v_j + a^V_r), r clipped to ±clip.

    Parameters: key and value, each (2·clip + 1, d), row r + clip; per layer. The heads share them, as in the authors'
    tensor2tensor code (`relative_positions_keys` and `relative_positions_values`). With `per_head` they are
    (H, 2·clip + 1, d).

    On longer inputs, by its source: clipping lets it generalise to lengths not seen in training.
    """

    summary = "A vector per near distance, added to keys and values"
    source = "Shaw et al. 2018, arXiv 1803.02155, eq. 3-4"
    out_of_range = ("clip", "zero")
    options = {
        "clip": integer(16, "k of the paper, the largest distance with an embedding of its own"),
        "per_head": choice(False, True, help="tables of their own for each head"),
    }

    def build(self, config: Any) -> None:
        heads = (self.num_heads,) if self.settings["per_head"] else ()
        shape = (*heads, 2 * self.settings["clip"] + 1, self.head_size)
        self.key = nn.Parameter(torch.empty(shape))
        self.value = nn.Parameter(torch.empty(shape))

    def forward(self, context: AttentionContext) -> Terms:
        clip, out_of_range = self.settings["clip"], self.settings["out_of_range"]
        key, value = (clipped_table(rows, -clip, clip, out_of_range) for rows in (self.key, self.value))
        return Terms(query_table=(key,), value_table=(value,))
