"""GRAPE-M, the multiplicative half of GRAPE: rotations at learned rates (Zhang et al., arXiv 2512.07805, §2 and 3)."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .rope import RoPE


# The authors' code trains 16 log θ, so that θ changes slowly.
SLOWER = 16


class GrapeM(RoPE, name="grape_m"):
    """score = s · q_i·G(r) k_j, G(r) = exp(r L), L = Σ_n θ_n (b_n a_nᵀ − a_n b_nᵀ): RoPE with learned θ_n.

    a_n and b_n are orthonormal and span plane n, which G(r) turns by r θ_n. The paper allows learned planes, too. As
    those of a head are orthogonal to one another, turning its W_q and W_k does the same: planes are RoPE's here, as in
    the authors' code, and so are the options and the first θ. Rates that depend on the content, and rates of each
    head, are not implemented. The additive half is `cable` with gate="key".

    Parameters: log_rate, 16 log(θ / RoPE's θ), (d/2,); per layer, shared by its heads. The authors' code has 16 log θ,
    and the opposite direction: halves of each head of W_q and W_k have to be swapped.

    On longer inputs, by its source: nothing.
    """

    summary = "Queries and keys are rotated by their position, at learned rates"
    source = "Zhang et al. 2025, arXiv 2512.07805, §3.1 and algorithm 1"

    def build(self, config: Any) -> None:
        self.log_rate = nn.Parameter(torch.empty(self.head_size // 2))

    def init_weights(self, std: float) -> None:
        init.zeros_(self.log_rate)

    def frequencies(self, context: AttentionContext) -> tuple[torch.Tensor, float]:
        angles, size = super().frequencies(context)
        rates = self.log_rate[: len(angles)].to(angles.dtype) / SLOWER
        return angles * rates.exp(), size

    def forward(self, context: AttentionContext) -> Terms:
        own = replace(context, kept=None)  # not once for all layers, as each has its own angles
        return Terms(rotate=functools.partial(self.rotate, context=own, frequencies=self.frequencies(context)))
