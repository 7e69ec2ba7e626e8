"""CABLE: biases by a distance that the content makes (Veisi et al., arXiv 2503.08067)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from .alibi import alibi_slopes
from .scheme import Scheme, choice


class Cable(Scheme, name="cable"):
    """score = s · q_i·k_j − |z_i − z_j|, z_i = Σ_{l ≤ i} n_l, n_l = softplus(w_h·x_l + b_h) of the layer's inputs x.

    The distance of two tokens is thus the sum of numbers computed from the tokens between them. The paper's causal
    models have z_j − z_i; here distances are the same to both sides. The public code leaves out s, which is 1/√d.
    In a decoder, the forget gates σ(w_h·x + b_h) of FoX (Lin et al., arXiv 2503.02130) are this with −w and −b.

    gate="key": −softplus(ω_h)·m_h·|r|·n_j with ALiBi's slopes m_h, the key-gated additive form of GRAPE (Zhang et al.,
    arXiv 2512.07805). It has u·k_j/√d for w·x_j + b, which is the same where no normalisation follows W_k.

    z follows the order of tokens in the row, whatever their position_ids, unlike r. Padding adds nothing to it, if the
    mask is (batch, length); a prepared mask does not tell which tokens are padding. In float32 a distance has an error
    of some 1e-7 of z.
    The bias takes memory quadratic in the length. Sums of waves of z would not, but are far from |z_i − z_j| near 0.

    Parameters: h_attn, a linear layer from D to H, and omega (H,) with gate="key"; per layer.

    On longer inputs, by its source: causal language models keep their perplexity on longer texts.
    """

    summary = "Scores fall with a distance computed from the content in between"
    source = "Veisi et al. 2025, arXiv 2503.08067; gate='key': Zhang et al. 2025, arXiv 2512.07805"
    out_of_range = ("extrapolate",)
    zero_init_is_identity = False
    options = {"gate": choice("path", "key", help="whose numbers count: all tokens' up to the key, or the key's")}

    def build(self, config: Any) -> None:
        self.h_attn = nn.Linear(config.hidden_size, self.num_heads)
        if self.settings["gate"] == "key":
            self.omega = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def is_symmetric_with(cls, settings: Mapping[str, Any]) -> bool:
        return settings["gate"] == "key"

    def init_weights(self, std: float) -> None:
        if self.settings["gate"] == "key":
            init.constant_(self.omega, 0.5413)  # softplus is 1

    def token_numbers(self, states: torch.Tensor) -> torch.Tensor:
        return softplus(self.h_attn(states))

    def forward(self, context: AttentionContext) -> Terms:
        numbers = context.layer.token_numbers
        assert numbers is not None, "the layer computes them"
        if self.settings["gate"] == "key":
            distance = context.matrix(numbers.device).abs().to(context.dtype)
            rates = softplus(self.omega.to(context.dtype)) * alibi_slopes(
                self.num_heads, numbers.device, context.dtype
            )
            distance = distance[None, None] if distance.dim() == 2 else distance[:, None]
            return Terms(dense=(-distance * (rates[:, None] * numbers)[:, :, None],))
        if context.tokens.real is not None:
            numbers = numbers.masked_fill(~context.tokens.real[:, None], 0.0)
        z = numbers.to(context.dtype).cumsum(-1)  # (B, H, K)
        queries = torch.arange(context.query_length, device=z.device) + context.start
        return Terms(dense=(-(z[..., queries, None] - z[..., None, :]).abs(),))
