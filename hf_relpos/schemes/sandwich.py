"""Sandwich (Chi, Fan, Rudnicky and Ramadge, arXiv 2212.10356)."""

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .scheme import Option, Scheme, is_count


MAX_WIDTH = 2**16  # every offset of a call needs half as many angles


class Sandwich(Scheme, name="sandwich"):
    """score = s · q_i·k_j + (Σ_{n=1}^{d̄/2} cos(r / 10000^{2n/d̄}) − d̄/2) / (8h/H), h = 1 … H. No parameters.

    The sum is the inner product of the sinusoidal positions of i and j, which are d̄ wide. −d̄/2 makes it 0 at distance
    0 and cancels in the softmax. It does not distinguish left and right.

    On longer inputs, by its source: causal language models keep their perplexity on longer texts.
    """

    summary = "Scores fall with distance, like products of fixed waves"
    source = "Chi et al. 2022, arXiv 2212.10356"
    out_of_range = ("extrapolate",)
    symmetric = True
    zero_init_is_identity = False
    options = {
        "dim": Option(
            default=128,
            help=f"d̄, the width of the sinusoids; a positive even integer up to {MAX_WIDTH:,}",
            accepts=lambda value: is_count(value) and value % 2 == 0 and value <= MAX_WIDTH,
        )
    }

    def forward(self, context: AttentionContext) -> Terms:
        r = context.offsets(context.device).to(context.dtype)
        waves = torch.arange(1, self.settings["dim"] // 2 + 1, device=r.device, dtype=r.dtype)
        angles = r[:, None] * 10000.0 ** (-2 * waves / self.settings["dim"])
        heads = torch.arange(1, self.num_heads + 1, device=r.device, dtype=r.dtype)
        bias = (angles.cos() - 1).sum(-1) / (8 * heads[:, None] / self.num_heads)
        return Terms(bias=(toeplitz_table(bias, context),))
