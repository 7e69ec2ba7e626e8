"""KERPLE (Chi, Fan, Ramadge and Rudnicky, arXiv 2205.09921), with one kernel for all layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import Terms, toeplitz_table
from .scheme import Scheme, SharedScheme, choice


def bounded(parameter: torch.Tensor, low: float, high: float | None = None) -> torch.Tensor:
    """Clamp `parameter`, in float32 or wider.

    The gradient ignores the clamp. Otherwise a value out of bounds could not come back.
    """
    values = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    return values + (values.clamp(low, high) - values).detach()


class Kernel(SharedScheme):
    """The bias of every offset of the call.

    Parameters: bias_p and bias_a, each (H, 1, 1), as in the authors' code.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.bias_p = nn.Parameter(torch.empty(config.num_attention_heads, 1, 1))
        self.bias_a = nn.Parameter(torch.empty(config.num_attention_heads, 1, 1))

    def init_weights(self, std: float) -> None:
        init.uniform_(self.bias_p, 0.0, 2.0)
        init.uniform_(self.bias_a, 0.0, 1.0)

    def forward(self, context: AttentionContext) -> torch.Tensor:
        """Return the bias, (H, N), in the order of `context.offsets`."""
        a = bounded(self.bias_a, 0.01)[..., 0]
        distance = context.offsets(a.device).abs().to(a.dtype)
        if self.settings["kind"] == "log":
            return -bounded(self.bias_p, 0.01)[..., 0] * torch.log1p(a * distance)
        # float16 ends at 65504; the attention weight is zero long before that
        return (-a * distance ** bounded(self.bias_p, 0.01, 2.0)[..., 0]).clamp(min=-3e4)


class Kerple(Scheme, name="kerple"):
    """score = s · q_i·k_j − p_h·log(1 + a_h·|r|), or − a_h·|r|^p_h with p_h ≤ 2.

    Values of p and a below 0.01 count as 0.01, as in the authors' code, which clamps the parameters themselves. Their
    r_1 and r_2 are p and a in the logarithmic kernel, a and p in the power kernel. In an encoder, it does not
    distinguish left and right. Kernels that multiply the content score, which the code also has, are not implemented.

    The parameters are `encoder.distance_embedding.bias_p` and `.bias_a`, shared by all layers.

    On longer inputs, by its source: causal language models keep their perplexity on longer texts.
    """

    summary = "Scores fall with the logarithm of distance, learned per head"
    source = "Chi et al. 2022, arXiv 2205.09921; github.com/chijames/KERPLE"
    out_of_range = ("extrapolate",)
    symmetric = True
    zero_init_is_identity = False
    shared_class = Kernel
    options = {
        "kind": choice("log", "power", help="the kernel"),
        "scaled": choice(
            False, True, help="whether 1/√d also divides the bias, as the paper writes it; the released code does not"
        ),
    }

    def forward(self, context: AttentionContext) -> Terms:
        bias = (toeplitz_table(context.layer.shared, context),)
        return Terms(scaled_bias=bias) if self.settings["scaled"] else Terms(bias=bias)
