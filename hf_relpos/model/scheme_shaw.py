"""Relative position representations of Shaw, Uszkoreit and Vaswani (arXiv 1803.02155, eq. 3 and 4)."""

import torch
from torch import nn
from transformers import initialization as init

from .formula import Table, Terms
from .offsets import Offsets
from .scheme import Option, Scheme, is_count


class Shaw(Scheme, name="shaw"):
    """score = s · q_i·(k_j + a^K_r), out_i = Σ_j α_ij (v_j + a^V_r), r clipped to ±clip.

    Parameters: key and value, each (2·clip + 1, d), row r + clip; per layer, shared by the heads, as in the authors'
    tensor2tensor code (`relative_positions_keys` and `relative_positions_values`).
    """

    source = "Shaw et al. 2018, arXiv 1803.02155, eq. 3-4"
    options = {
        "clip": Option(
            default=16,
            help="k of the paper, the largest distance told apart; a positive integer",
            accepts=is_count,
        )
    }
    beyond_range = "clips: distances past `clip` share the last row, at any length"

    def __init__(self, config):
        super().__init__(config)
        self.clip = self.settings["clip"]
        self.key = nn.Parameter(torch.empty(2 * self.clip + 1, self.head_size))
        self.value = nn.Parameter(torch.empty(2 * self.clip + 1, self.head_size))

    @classmethod
    def has_value_term(cls, options):
        return True

    def init_weights(self, std):
        init.normal_(self.key, mean=0.0, std=std)
        init.normal_(self.value, mean=0.0, std=std)

    def terms(self, offsets: Offsets) -> Terms:
        def row_of(r):
            return r.clamp(-self.clip, self.clip) + self.clip

        return Terms(scale=self.scale, A=(Table(self.key[None], row_of),), V=(Table(self.value[None], row_of),))
