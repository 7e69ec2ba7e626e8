"""Transformer-XL (Dai et al., arXiv 1901.02860, §3.3), bidirectional."""

from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .encodings import sinusoid_concat
from .scheme import MAX_COUNT, Scheme, integer


class TransformerXL(Scheme, name="transformer_xl"):
    """score = s · [(q_i + u)·k_j + (q_i + v)·W R_{i−j}], R the sinusoid of dimension D in concatenated layout.

    In the letters of the formula, A_r = W R_{−r} and c_r = v·A_r. The paper's u is `r_w_bias`, its v is `r_r_bias`
    and its W_{k,R} is `r_net`. Names and shapes are those of the published checkpoints with `untie_r`.

    Parameters: r_net.weight (H·d, D); r_w_bias and r_r_bias (H, d); per layer.

    On longer inputs, by its source: works with a longer memory than it was trained with (causal).
    """

    summary = "Projected waves of the distance, and learned biases"
    source = "Dai et al. 2019, arXiv 1901.02860, §3.3"
    out_of_range = ("extrapolate", "clip")
    even_size = "hidden_size"
    options = {
        "clamp_len": integer(
            None,
            "distances past it are clipped to it, on both sides",
            none="max_position_embeddings − 1 when out_of_range='clip' and for no limit otherwise",
        )
    }

    def build(self, config: Any) -> None:
        last = config.max_position_embeddings - 1 if self.settings["out_of_range"] == "clip" else MAX_COUNT
        self.clamp_len = self.settings["clamp_len"] or last
        self.add_projection(config.hidden_size)
        self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
        self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def add_projection(self, size: int) -> None:
        """Add W, from vectors of size D."""
        self.r_net = nn.Linear(size, size, bias=False)

    def project_waves(self, sinusoid: torch.Tensor) -> torch.Tensor:
        """Return W R, (N, H, d), of sinusoids (N, D)."""
        return self.r_net(sinusoid).view(-1, self.num_heads, self.head_size)

    def forward(self, context: AttentionContext) -> Terms:
        distances = -context.offsets(self.r_w_bias.device)
        distances = distances.clamp(-self.clamp_len, self.clamp_len)
        sinusoid = sinusoid_concat(distances, self.num_heads * self.head_size, self.r_w_bias.dtype)
        rows = self.project_waves(sinusoid).transpose(0, 1)  # (H, N, d)
        scalars = torch.einsum("hd,hrd->hr", self.r_r_bias.to(rows.dtype), rows)
        return Terms(
            query_table=(toeplitz_table(rows, context),),
            content_bias=self.r_w_bias.clone(),
            scaled_bias=(toeplitz_table(scalars, context),),
        )
