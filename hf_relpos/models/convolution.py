"""DeBERTa v2's convolution parallel to the first layer (He et al., arXiv 2006.03654, §A.5, nGram induced encoding)."""

from typing import Any

import torch
from torch import nn

from ..host.transformers import ACT2FN


class FirstLayerConvolution(nn.Module):
    """LayerNorm(y + act(dropout(conv(x)))) for the input x and the output y of the first layer.

    Parameters: conv.weight (D, D / groups, k), conv.bias (D,); LayerNorm.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=(kernel - 1) // 2, groups=config.conv_groups)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = ACT2FN[config.conv_act]

    def forward(self, inputs: torch.Tensor, outputs: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Map inputs and outputs of the layer, (B, L, D), to (B, L, D).

        Args:
            real: (B, L), false at padding, whose inputs count as zero; None without padding.
        """
        if real is not None:
            inputs = inputs * real.to(inputs)[..., None]
        mixed = self.conv(inputs.transpose(1, 2)).transpose(1, 2)
        return self.LayerNorm(outputs + self.activation(self.dropout(mixed)))


def tokens_to_convolve(attention_mask: Any, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Which tokens are not padding, (B, L); None for all.

    Args:
        attention_mask: argument of `forward`.
        documents: numbers of the keys' documents; None for one document per row.

    Raises:
        ValueError: for several documents in a row, which the convolution would mix, and for a mask that does not tell
            which tokens are padding.
    """
    if documents is not None:
        raise ValueError(
            "position_ids restart within a row: the convolution of conv_kernel_size would mix its documents; give "
            "each a row of its own"
        )
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask is prepared, and conv_kernel_size needs to know which tokens are padding; give (B, L)"
        )
    return attention_mask != 0
