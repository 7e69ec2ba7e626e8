"""FIRE (Li et al., arXiv 2310.04418), and its shared form FIRE-S."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .scheme import Option, ScalarLinear, Scheme, SharedScheme, choice, integer, is_number


class Interpolation(SharedScheme):
    """f(ψ(|i − j|) / ψ(max(i, j, L₀))), ψ(x) = log(|c|·x + 1), L₀ = |multiplier|·threshold, f an MLP of one number.

    Parameters: mlp.0 (W, 1) and (W,), mlp.2 (H, W) and (H,); c and L_multiplier, each (1,). Those two have a dimension
    because sharded training refuses tensors without one.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        width = settings["mlp_width"]
        self.mlp = nn.Sequential(ScalarLinear(width), nn.ReLU(), nn.Linear(width, self.num_heads))
        self.c = nn.Parameter(torch.empty(1))
        self.L_multiplier = nn.Parameter(torch.empty(1))

    def init_weights(self, std: float) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear | ScalarLinear):  # PyTorch's default
                bound = layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)
        init.constant_(self.c, 0.1)
        init.constant_(self.L_multiplier, 1.0)

    def forward(self, context: AttentionContext) -> torch.Tensor:
        """Return the bias, (1 or B, H, L, K)."""
        dtype = self.c.dtype
        c = self.c.to(torch.promote_types(dtype, torch.float32)).abs()
        threshold = (self.L_multiplier.to(c.dtype) * self.settings["threshold"]).abs()
        i = context.query_positions(c.device)[..., :, None].to(c.dtype)
        j = context.key_positions(c.device)[..., None, :].to(c.dtype)
        farthest = torch.maximum(i, j) if self.settings["normalizer"] == "both" else i
        normalizer = torch.log1p(c * torch.maximum(farthest, threshold))
        distance = torch.log1p(c * (i - j).abs()) / (normalizer + 1e-6)
        bias = self.mlp(distance[..., None].to(dtype)).movedim(-1, -3)
        return bias if bias.dim() == 4 else bias[None]


class Fire(Scheme, name="fire"):
    """score = s · q_i·k_j + f(ψ(|i − j|) / ψ(max(i, j, L₀))): distances relative to how far into the text they are.

    The paper has max(i, L₀), since it is about causal models. There j never exceeds i, and both are the same. Beyond
    L₀ the bias depends on i and j, not on j − i alone. It costs L·K·W operations per layer, W being the width of the
    MLP; with `shared` (FIRE-S) once for all layers.

    Parameters: those of `Interpolation`, as `distance_embedding.bias` in each layer, or `encoder.distance_embedding`
    with `shared`.

    On longer inputs, by its source: language models generalise to longer texts.
    """

    summary = "A small network of the distance over the text so far"
    source = "Li et al. 2023, arXiv 2310.04418; github.com/mcleish7/arithmetic"
    out_of_range = ("extrapolate",)
    uses_absolute_positions = True
    zero_init_is_identity = False  # no gradient passes an MLP of zeros; only its last weight may be zero
    options = {
        "normalizer": choice("both", "query", help="what L₀ is compared with: max(i, j) (both) or i, as in the paper"),
        "shared": choice(False, True, help="whether all layers have the same bias (FIRE-S)"),
        "mlp_width": integer(32, "W, hidden units of the MLP"),
        "threshold": Option(512, "L₀ at initialisation, times a learned multiplier; a positive number", is_number),
    }

    def build(self, config: Any) -> None:
        self.bias = None if self.settings["shared"] else Interpolation(config, self.settings)

    @classmethod
    def shared_module(cls, config: Any, settings: Mapping[str, Any]) -> SharedScheme | None:
        return Interpolation(config, settings) if settings["shared"] else None

    def forward(self, context: AttentionContext) -> Terms:
        return Terms(dense=(context.layer.shared if self.bias is None else self.bias(context),))
