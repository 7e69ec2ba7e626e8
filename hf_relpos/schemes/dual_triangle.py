"""Dual Triangle Attention (Hallee and Gleghorn 2026, arXiv 2604.18603): masks of both directions, no parameters."""

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Clipped, Table, Terms
from .scheme import Scheme


class DualTriangle(Scheme, name="dual_triangle"):
    """score = s · q_i·k_j + M_ij. M is 0 for j ≤ i in the first half of the heads and j ≥ i in the others, else −∞.

    The paper divides the features of each head in two. In the public code of it that we read, queries, keys and values
    are divided, and each half has a softmax of its own. That is attention with twice as many heads of half the size,
    of which the first half looks back: set `num_attention_heads` to twice the paper's. With an odd number of heads the
    middle one looks back. In a decoder the second half sees only the token itself.

    `position_embedding_type=["dual_triangle", "rope"]` adds a rotation, of each half by itself; that code rotates a
    head before it divides it.

    On longer inputs, by its source: direction only; with a rotation, texts longer than those of training.
    """

    summary = "Half of the heads look to the left, the others to the right"
    source = "Hallee and Gleghorn 2026, arXiv 2604.18603"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False

    def forward(self, context: AttentionContext) -> Terms:
        ahead = self.num_heads // 2
        by_head = [(True, True, False)] * (self.num_heads - ahead) + [(False, True, True)] * ahead
        rows = torch.tensor(by_head, device=context.device)  # left, the token itself, right
        return Terms(allow=(Table(rows, Clipped(-1, 1)),))
