"""CABLE: biases by a distance that the content makes (Veisi et al., arXiv 2503.08067)."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .scheme import Scheme


class Cable(Scheme, name="cable"):
    """score = s · q_i·k_j − |z_i − z_j|, z_i = Σ_{l ≤ i} softplus(w_h·x_l + b_h) of the layer's inputs x.

    Tokens of a row are thus as far from each other as the tokens between them say. The paper's causal models have
    z_j − z_i; here keys to the right are as far as those to the left. The public code leaves out s, which is 1/√d.
    In a decoder, the forget gates σ(w_h·x + b_h) of FoX (Lin et al., arXiv 2503.02130) are this with −w and −b.

    z follows the order of tokens in the row, whatever their position_ids. Padding adds nothing to it, if the mask is
    (batch, length); a prepared mask does not tell which tokens are padding. In float32 a distance has an error of some
    1e-7 of z.
    The bias takes memory quadratic in the length. Sums of waves of z would not, but are far from |z_i − z_j| near 0.

    Parameters: h_attn, a linear layer from D to H; per layer.
    """

    summary = "Scores fall with a distance that each token's content adds to"
    source = "Veisi et al. 2025, arXiv 2503.08067; github.com/axiomlab/Cable src/Cable.py"
    out_of_range = ("extrapolate",)
    extrapolation_claim = "causal language models keep their perplexity on longer texts"
    zero_is_neutral = False

    def __init__(self, config: Any, options: dict[str, Any] | None = None) -> None:
        super().__init__(config, options)
        self.h_attn = nn.Linear(config.hidden_size, self.num_heads)

    def token_numbers(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(self.h_attn(states))

    def forward(self, context: AttentionContext) -> Terms:
        numbers = context.token_numbers
        assert numbers is not None, "the layer computes them"
        if context.real is not None:
            numbers = numbers.masked_fill(~context.real[:, None], 0.0)
        z = numbers.to(context.dtype).cumsum(-1)  # (B, H, K)
        queries = torch.arange(context.query_length, device=z.device) + context.start
        return Terms(dense=(-(z[..., queries, None] - z[..., None, :]).abs(),))
