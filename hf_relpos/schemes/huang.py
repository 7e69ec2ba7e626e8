"""Methods 1 to 3 of Huang, Liang, Xu and Xiang (arXiv 2009.13658): positions that multiply the content score.

Method 4 is `relative_key_query`. The authors released code for that one only, so these follow the equations. A gain of
one is plain attention, so parameters are initialised to ones plus a little noise. Zeros are not neutral: they make
attention uniform and stop the gradients of queries and keys.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .scheme import Scheme


class HuangM1(Scheme, name="huang_m1"):
    """score = s · (q_i·k_j) a_{|r|}: one factor per distance, the same on both sides.

    Parameters: weight (P,), row |r|, with distances clipped to P − 1; per layer, shared by the heads.
    """

    summary = "A factor on the score per distance"
    source = "Huang et al. 2020, arXiv 2009.13658, method 1"
    out_of_range = ("clip",)
    symmetric = True
    zero_init_is_identity = False

    def build(self, config: Any) -> None:
        self.max_distance = config.max_position_embeddings - 1
        self.weight = nn.Parameter(torch.empty(self.shape()))

    def shape(self) -> tuple[int, ...]:
        """Return the shape of `weight`."""
        return (self.max_distance + 1,)

    def init_weights(self, std: float) -> None:
        init.normal_(self.weight, mean=1.0, std=std)

    def rows(self, context: AttentionContext) -> torch.Tensor:
        """Return the rows of the offsets that can occur in this call, in ascending order of r, (1, N, …)."""
        return self.weight[context.offsets(self.weight.device).abs().clamp(max=self.max_distance)][None]

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(gain=(toeplitz_table(self.rows(context), context),))


class HuangM2(HuangM1, name="huang_m2"):
    """score = s · (q_i·k_j) a_r: one factor per offset.

    Parameters: weight (2P − 1,), row r + P − 1, with offsets clipped to ±(P − 1); per layer, shared by the heads.
    """

    summary = "A factor on the score per signed distance"
    source = "Huang et al. 2020, arXiv 2009.13658, method 2"
    symmetric = False

    def shape(self) -> tuple[int, ...]:
        return (2 * self.max_distance + 1,)

    def rows(self, context: AttentionContext) -> torch.Tensor:
        offsets = context.offsets(self.weight.device).clamp(-self.max_distance, self.max_distance)
        return self.weight[offsets + self.max_distance][None]


class HuangM3(HuangM2, name="huang_m3"):
    """score = s · Σ_c q_ic k_jc a_{r,c}: one factor per offset and feature.

    It costs L²d multiplications, which no factorisation avoids; see `formula.featurewise_scores`.

    Parameters: weight (2P − 1, d), row r + P − 1, with offsets clipped to ±(P − 1); per layer, shared by the heads.
    """

    summary = "A factor on each feature per signed distance"
    source = "Huang et al. 2020, arXiv 2009.13658, method 3"

    def shape(self) -> tuple[int, ...]:
        return (2 * self.max_distance + 1, self.head_size)

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(feature_gain=toeplitz_table(self.rows(context), context))
