"""Log-spaced continuous position bias (Swin Transformer V2: Liu et al., arXiv 2111.09883, §3.3), along one axis."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .scheme import ScalarLinear, Scheme, dtype_of, integer


class LogCPB(Scheme, name="log_cpb"):
    """score = s · q_i·k_j + 16 σ(G_h(x̂)), x̂ = sign(x) · log₈(1 + 8|x| / (window − 1)), x = i − j.

    G is an MLP with one hidden layer of ReLUs. It computes a bias for any distance; distances within the trained
    length, `window`, have |x̂| ≤ log₈ 9. The factors 8 and 16 and the sigmoid are in the authors' code, not in the
    paper. The bias here is 8 tanh(G/2) = 16 σ(G) − 8, which is the same after the softmax. Two parts are not
    implemented: the second axis, since text has one axis, and cosine attention, which is not a position scheme.

    Parameters: cpb_mlp.0 (W, 1) and (W,), cpb_mlp.2 (H, W) without a bias; per layer. Names are those of the authors'
    code, where the first weight has one column per axis.

    On longer inputs, by its source: transfers to larger windows of images better than a table or linear coordinates.
    """

    summary = "A small network of the logarithm of distance"
    source = (
        "Liu et al. 2022, arXiv 2111.09883, §3.3, eq. 3-4; microsoft/Swin-Transformer models/swin_transformer_v2.py"
    )
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False  # no gradient passes an MLP of zeros
    options = {
        "window": integer(
            None, "the trained length, by which distances are divided", none="max_position_embeddings", least=2
        ),
        "mlp_width": integer(512, "W, hidden units of the MLP"),
    }

    def build(self, config: Any) -> None:
        self.window = self.settings["window"] or max(config.max_position_embeddings, 2)
        width = self.settings["mlp_width"]
        self.cpb_mlp = nn.Sequential(ScalarLinear(width), nn.ReLU(), nn.Linear(width, self.num_heads, bias=False))

    def init_weights(self, std: float) -> None:
        first: Any = self.cpb_mlp[0]
        init.normal_(first.weight, mean=0.0, std=std)
        init.zeros_(first.bias)

    def forward(self, context: AttentionContext) -> Terms:
        dtype = dtype_of(self.cpb_mlp)
        x = -context.offsets(context.device).to(torch.promote_types(dtype, torch.float32))
        coordinates = x.sign() * torch.log2(1 + 8 * x.abs() / (self.window - 1)) / math.log2(8)
        bias = self.cpb_mlp(coordinates[:, None].to(dtype)).T  # (H, N)
        return Terms(bias=(toeplitz_table(8 * torch.tanh(bias / 2), context),))
